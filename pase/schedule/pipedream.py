"""Reads PipeDream-style profiles: a DAG of layers with milliseconds of forward and backward and bytes of parameters.

A profile has lines "ID -- DESCRIPTION -- forward_compute_time=…, backward_compute_time=…, activation_size=…,
parameter_size=…" (ms and bytes), then lines "<tab>ID -- ID" for edges. Source: msr-fiddle/pipedream,
profiler/*/profiles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import networkx as nx

from pase.errors import PaseError
from pase.files.terminal import printable
from pase.schedule.types import ALL_DEVICES, AxisGroup, ComputeBlock, Link, ScheduleProblem, Transfer

__all__ = ["Layer", "looks_like_pipedream", "problem_from_layers", "read_pipedream"]

_NODE = re.compile(r"^(\S+) -- (.*?) -- (forward_compute_time=.*)$")
_EDGE = re.compile(r"^\t(\S+) -- (\S+)\s*$")
_FIELD = re.compile(r"(\w+)=(\[[^\]]*\]|[^,\s]+)")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer. parameters: (name, bytes) of each tensor to synchronise. after: indices of the layers that it reads."""

    name: str
    forward_s: float
    backward_s: float
    parameters: tuple[tuple[str, int], ...] = ()
    after: tuple[int, ...] = ()


def looks_like_pipedream(text: str) -> bool:
    return "forward_compute_time=" in text[:4000]


def read_pipedream(
    text: str,
    links: tuple[Link, ...],
    *,
    name: str = "profile",
    axes: AxisGroup = ALL_DEVICES,
    dataflow: bool = False,
) -> ScheduleProblem:
    """The data-parallel problem of a profile.

    text: the profile. name: its file name. links, axes, dataflow: as in `ScheduleProblem` and `Transfer`.

    Raises PaseError, which names the line.
    """
    rows: dict[str, tuple[str, float, float, int]] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if printable(line) != line:
            raise PaseError(
                "there is a control character in the line", where=f"{name}, line {number}", fix="remove it"
            )
        if edge := _EDGE.match(line):
            edges.append((number, edge[1], edge[2]))
            continue
        node = _NODE.match(line)
        if node is None:
            raise PaseError(
                f"{line[:80]!r} is neither a layer nor an edge",
                where=f"{name}, line {number}",
                fix="write 'ID -- DESCRIPTION -- forward_compute_time=…' or '<tab>ID -- ID'",
            )
        fields = dict(_FIELD.findall(node[3]))
        values = []
        for key in ("forward_compute_time", "backward_compute_time", "parameter_size"):
            try:
                values.append(float(fields[key]))
            except (KeyError, ValueError):
                raise PaseError(
                    f"layer '{node[1]}' has no number for {key}",
                    where=f"{name}, line {number}",
                    fix=f"write {key}=NUMBER",
                ) from None
            if not 0 <= values[-1] < float("inf"):
                raise PaseError(
                    f"layer '{node[1]}' has {key}={values[-1]}",
                    where=f"{name}, line {number}",
                    fix="give a finite number, 0 or more",
                )
        if node[1] in rows:
            raise PaseError(
                f"layer '{node[1]}' is listed twice",
                where=f"{name}, line {number}",
                fix="give each layer its own ID",
            )
        rows[node[1]] = (node[2], values[0] / 1e3, values[1] / 1e3, round(values[2]))
    if not rows:
        raise PaseError("the profile has no layers", where=name, fix="write at least one layer")
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(rows)
    for number, a, b in edges:
        for end in (a, b):
            if end not in rows:
                raise PaseError(
                    f"the edge names '{end}', which is not a layer of the profile",
                    where=f"{name}, line {number}",
                    fix="add the layer or remove the edge",
                )
        graph.add_edge(a, b)
    if not nx.is_directed_acyclic_graph(graph):
        cycle = " -> ".join(str(a) for a, _ in nx.find_cycle(graph))
        raise PaseError(f"the layers form a cycle ({cycle})", where=name, fix="remove one of its edges")
    number_of = {r: int(m[0]) if (m := re.findall(r"\d+", r)) else 0 for r in rows}
    order = list(nx.lexicographical_topological_sort(graph, key=lambda r: (number_of[r], r)))
    at = {r: i for i, r in enumerate(order)}
    layers = [
        Layer(
            name=f"{r} {rows[r][0].split('(')[0].strip()}",
            forward_s=rows[r][1],
            backward_s=rows[r][2],
            parameters=((r, rows[r][3]),) if rows[r][3] else (),
            after=tuple(sorted(at[q] for q in graph.predecessors(r))),
        )
        for r in order
    ]
    return problem_from_layers(
        layers, links, name=name, axes=axes, dataflow=dataflow, source="PipeDream profile"
    )


def problem_from_layers(
    layers: list[Layer],
    links: tuple[Link, ...],
    *,
    name: str,
    axes: AxisGroup = ALL_DEVICES,
    dataflow: bool = False,
    source: str = "",
) -> ScheduleProblem:
    """Make a problem whose forward runs the layers in order and whose backward runs them in reverse.

    A parameter's gradient is ready after its layer's backward and needed before its layer's next forward.

    >>> from pase.schedule.types import SendTime
    >>> net = Link(name="net", curve=SendTime.alpha_beta(alpha_s=0.0, beta_s_per_byte=1.0))
    >>> p = problem_from_layers([Layer(name="l", forward_s=1.0, backward_s=2.0, parameters=(("w", 4),))], (net,),
    ...     name="one layer")
    >>> p.tensors[0].ready_after, p.tensors[0].needed_before
    (1, 0)
    """
    n = len(layers)
    readers: list[list[int]] = [[] for _ in layers]
    for i, layer in enumerate(layers):
        for a in layer.after:
            readers[a].append(i)
    blocks = [
        ComputeBlock(
            name=layer.name, phase="forward", seconds=layer.forward_s, after=layer.after if dataflow else None
        )
        for layer in layers
    ]
    # The backward of layer i is block 2n - 1 - i. It waits for its readers' backward, or for its own forward.
    for i in reversed(range(n)):
        waits = tuple(sorted(2 * n - 1 - r for r in readers[i])) or (i,)
        blocks.append(
            ComputeBlock(
                name=f"{layers[i].name}'",
                phase="backward",
                seconds=layers[i].backward_s,
                after=waits if dataflow else None,
            )
        )
    tensors = [
        Transfer(name=pname, nbytes=nbytes, ready_after=2 * n - 1 - i, needed_before=i, axes=axes)
        for i, layer in enumerate(layers)
        for pname, nbytes in layer.parameters
    ]
    return ScheduleProblem(
        name=name, blocks=tuple(blocks), tensors=tuple(tensors), links=links, dataflow=dataflow, source=source
    )
