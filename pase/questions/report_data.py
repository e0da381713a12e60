"""Data for the widgets of a report: the model as a graph, its mesh, and the step as streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from pase.files.json_values import JsonObject
from pase.ir.precision import rate_words
from pase.plan.types import NodePlan, PlanData
from pase.questions.explain import Explanation, roles, why
from pase.questions.report_pipeline import stages_data
from pase.tables.itemize import Collective, LocalWork

__all__ = ["explorer_data", "priced_step"]

PARAMETERS = "parameters"
"""The name of the group that holds a layer's parameters."""


def explorer_data(e: Explanation) -> JsonObject:
    """Data for the explorer widget: nodes and collectives by number, the order of the list, the mesh and the stages."""
    plan = e.plan
    op_of = roles(plan)
    number = {n.name: i for i, n in enumerate(plan.nodes)}
    sent: dict[str, list[int]] = {}
    for i, c in enumerate(plan.collectives):
        sent.setdefault(c.node, []).append(i)
    paths = layer_paths(plan.nodes)
    return {
        "unit": plan.unit,
        "mesh": {"names": plan.mesh.names, "sizes": plan.mesh.sizes, "host": _host(e)},
        "stages": stages_data(plan),
        "order": [number[name] for name in paths],
        "nodes": [
            {
                "name": n.name,
                "role": "parameter" if n.op == "parameter" else "op",
                "path": paths[n.name],
                "op": n.op,
                "einsum": n.einsum,
                "sizes": dict(n.sizes),
                "split": dict(n.split),
                "times": n.times,
                "source": n.source,
                "cost": [_short(n.cost.compute), _short(n.cost.communication), _short(n.cost.update)],
                "reads": [number[r] for r in n.reads],
                "keeps": dict(n.keeps),
                "recompute": n.kept_for_recompute,
                "moves": sent.get(n.name, []),
                "work": _work(n.work),
                "next": _next(e, n.name),
            }
            for n in plan.nodes
        ],
        "moves": [
            {
                "kind": c.kind,
                "axes": c.axes,
                "bytes": c.nbytes,
                "times": c.times,
                "phase": c.phase,
                "why": why(c, op_of, plan.whole_step),
                "source": number.get(c.source, -1),
                "cost": _short(c.cost),
            }
            for c in plan.collectives
        ],
    }


def _work(work: Sequence[LocalWork]) -> list[JsonObject]:
    """What a device computes of a node: a row for each pass and kind of work."""
    alike: dict[tuple[str, str, str], list[LocalWork]] = {}
    for w in work:
        alike.setdefault((w.phase, w.kind, w.dtype), []).append(w)
    return [
        {
            "phase": phase,
            "kind": kind,
            "dtype": rate_words(dtype),
            "flops": _short(sum(w.flops * w.times for w in some)),
            "bytes": _short(sum(w.nbytes * w.times for w in some)),
            "cost": _short(sum(w.cost for w in some)),
        }
        for (phase, kind, dtype), some in alike.items()
    ]


def _short(x: float) -> float:
    """Round to six digits, which halves the size in the file and is more than a reader needs."""
    return float(f"{x:.6g}")


def _host(e: Explanation) -> int:
    """The number of devices that the machine's innermost level connects; 1 if it is not known."""
    return 1 if e.machine is None else e.machine.levels[0].ways or 1


def _next(e: Explanation, layer: str) -> float | str | None:
    """How much more the best strategy with another split of this layer costs, as a fraction of the plan's cost."""
    other, whole = e.next_best.get(layer), e.plan.cost
    if other is None or not whole:
        return None
    return "impossible" if other == float("inf") else _short(max(other / whole - 1, 0.0))


def layer_paths(nodes: Sequence[NodePlan]) -> dict[str, list[str]]:
    """Node -> its groups, outermost first. Nodes are in execution order, and parameters come before their readers.

    An op belongs to the module whose parameter it reads. Any other op joins the group of an op that it reads in the
    same repeated block, or else that of its next reader. After the last op with a parameter, ops are grouped by
    function.
    """
    module, last = _modules(nodes)
    users = _first_users(nodes)
    owned: dict[str, list[NodePlan]] = {}
    for n in nodes:
        if n.op == "parameter" and n.name in users:
            owned.setdefault(users[n.name], []).append(n)
    working = [n for n in nodes if n.op != "parameter"]
    at: dict[str, list[str]] = {}
    for k, n in enumerate(working):
        own = [] if k > last else module.get(n.name, [])
        at[n.name] = own or [n.name.partition("@")[2].partition("~")[0] or n.op]
    out: dict[str, list[str]] = {}
    for _, together in itertools.groupby(working, key=lambda n: at[n.name]):
        members = [*together]
        for n in members:
            out |= {p.name: [*at[n.name], PARAMETERS] for p in owned.get(n.name, ())}
        out |= {n.name: at[n.name] for n in members}
    return out | {n.name: [PARAMETERS] for n in nodes if n.name not in out}


def _module(path: str) -> list[str]:
    """The module of a parameter: its path without the last name, unless the path has only one name.

    >>> _module("blocks.attention.wq"), _module("wte")
    (['blocks', 'attention'], ['wte'])
    """
    parts = [p for p in path.replace("/", ".").split(".") if p]
    return parts[:-1] or parts or [path]


def _modules(nodes: Sequence[NodePlan]) -> tuple[dict[str, list[str]], int]:
    """Returns (node -> module, index of the last node that reads a parameter, where parameters are not counted)."""
    of = {n.name: n for n in nodes}
    working = [n for n in nodes if n.op != "parameter"]
    found: dict[str, list[str]] = {}
    last = -1
    for k, n in enumerate(working):
        weights = [r for r in n.reads if of[r].op == "parameter"]
        before = [r for r in n.reads if r in found and of[r].times == n.times]
        if weights:
            found[n.name], last = _module(weights[0]), k
        elif before:
            found[n.name] = found[before[0]]
        elif n.op == "input":
            found[n.name] = ["inputs"]
    placed = set(found)
    for n in reversed(working):  # a node without a module so far takes that of its reader
        for r in n.reads:
            if r not in placed and of[r].times == n.times and n.name in found:
                found[r] = found[n.name]
    return found, last


def _first_users(nodes: Sequence[NodePlan]) -> dict[str, str]:
    """Node -> its first reader that is not a parameter."""
    users: dict[str, str] = {}
    for n in nodes:
        if n.op != "parameter":
            for r in n.reads:
                users.setdefault(r, n.name)
    return users


def priced_step(plan: PlanData) -> JsonObject:
    """The step as it is priced, for the timeline widget: its parts run one after another, without overlap."""
    from pase.pages.streams import StreamBox, drawn_streams

    streams: Mapping[str, list[StreamBox]] = {"compute": [], "communication": []}
    at = 0
    for stream, label, kind, cost in _bars(plan):
        length = round(cost * 1e9)
        if length:
            streams[stream].append(StreamBox(label=label, kind=kind, start_ns=at, length_ns=length))
        at += length
    return drawn_streams(
        "Timeline of the step",
        streams,
        [
            ("forward", "compute"),
            ("backward", "backward"),
            ("update", "update"),
            ("communication", "communication"),
        ],
        end_ns=at,
        hint="Click a box, or use the arrow keys, to read it; drag to move; Ctrl and the wheel, or two fingers, zoom.",
    )


def _bars(plan: PlanData) -> Iterator[tuple[str, str, int, float]]:
    """Yields (stream, label, kind, cost): forward in the order of the nodes, backward in reverse unless the
    program has it itself, then the update."""
    kinds = {"forward": 0, "backward": 1, "update": 2}
    sent: dict[tuple[str, str], list[Collective]] = {}
    for c in plan.collectives:
        sent.setdefault((c.node, c.phase), []).append(c)
    back = plan.nodes if plan.whole_step else plan.nodes[::-1]
    for phase, nodes in (("forward", plan.nodes), ("backward", back), ("update", plan.nodes)):
        for n in nodes:
            yield "compute", n.name, kinds[phase], sum(w.cost for w in n.work if w.phase == phase)
            for c in sent.get((n.name, phase), ()):
                yield "communication", f"{c.kind} for {n.name}", 3, c.cost
