"""Lowers a graph and its strategy to the local program.

Layouts, and the collectives between and inside nodes, come from the same functions with which the search prices them
(``pase.tables``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from pase.errors import PaseError
from pase.ir import Access, Edge, Graph, Node, Op
from pase.ir.blocks import hoisted_of
from pase.ir.types import shared_edge
from pase.local.types import (
    Combine,
    LocalOp,
    LocalOperand,
    LocalProgram,
    LocalReshardStep,
    LocalResult,
    LocalTransfer,
    NodeCollective,
)
from pase.machine import CollectiveKind, Mesh
from pase.tables.axis_layout import AccessLayout, AxisLayout
from pase.tables.charges import Charge, Flow, edge_flows, node_charges
from pase.tables.itemize import config_of
from pase.tables.layouts import concrete_size, read_layout, write_layout
from pase.tables.reshard_path import reshard_steps
from pase.tables.work import phase_of

__all__ = ["between", "local_program", "program_of"]


def local_program(graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> LocalProgram:
    """The local program of a strategy. configs: node name -> int8 [axes]."""
    lower = _Lower(graph, mesh, configs)
    edges = {shared_edge(graph.node[e.dst], e.op, e.access): k for k, e in enumerate(graph.edges)}
    return LocalProgram(
        name=graph.name,
        mesh=mesh,
        ops=tuple(op for n in graph.nodes for op in lower.node(n, edges)),
        transfers=tuple(map(lower.transfer, graph.edges)),
        originals={t.name: t.copy_of for t in graph.tensors.values() if t.copy_of},
        hoisted=hoisted_of(graph),
    )


def program_of(
    graph: Graph, mesh: Mesh, strategy: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> LocalProgram:
    """``local_program`` of a plan's strategy: node name -> iteration dim -> mesh axes. Raises PaseError if the strategy
    belongs to another graph."""
    if other := sorted({n.name for n in graph.nodes} ^ set(strategy)):
        raise PaseError(
            f"the strategy belongs to another model: only one of the two has the node '{other[0]}'",
            where=f"strategy for '{graph.name}'",
            fix="pass the model that the strategy was compiled for, or compile again",
        )
    return local_program(graph, mesh, {n.name: config_of(n, strategy[n.name], mesh) for n in graph.nodes})


_COMBINES: dict[str, Combine] = {
    "reduce_max": "max",
    "reduce_min": "min",
    "scatter_max": "max",
    "scatter_min": "min",
    "reduce_or": "max",
    "reduce_and": "min",
    **dict.fromkeys(("reduce_prod", "scatter_mul", "reduce", "reduce_xor"), "other"),
}
"""Function -> how its partial results are reduced. Those of all other functions are summed."""


def _combine(op: Op) -> Combine:
    """How partial results of an op are reduced."""
    return _COMBINES.get(op.function.name, "sum")


class _Lower:
    """Lowers the nodes and edges of one strategy. configs: node name -> int8 [axes]."""

    def __init__(self, graph: Graph, mesh: Mesh, configs: Mapping[str, np.ndarray]) -> None:
        self.graph, self.mesh, self.configs = graph, mesh, configs

    def _read(self, node: Node, op: Op, a: Access) -> AccessLayout:
        """How an op reads a tensor."""
        return read_layout(node, op, a, self.configs[node.name], self.mesh)

    def _write(self, node: Node, op: Op, a: Access) -> AccessLayout:
        """How an op writes a tensor."""
        return write_layout(node, op, a, self.configs[node.name], self.mesh)

    def _shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(concrete_size(s, tensor) for s in self.graph.tensors[tensor].shape)

    def _axes(self, bits: int) -> tuple[str, ...]:
        """The names of the axes in a bit set."""
        return tuple(name for i, name in enumerate(self.mesh.names) if bits >> i & 1)

    def transfer(self, edge: Edge) -> LocalTransfer:
        """An edge's reshard steps in order, forward and backward."""
        src, dst = self.graph.node[edge.src], self.graph.node[edge.dst]
        maker, write = src.write_of(edge.tensor)
        have, want = self._write(src, maker, write), self._read(dst, edge.op, edge.access)
        flows = {f.back: f for f in edge_flows(self.graph, edge)}
        there, back = flows.get(False), flows.get(True)
        return LocalTransfer(
            tensor=edge.tensor,
            src=edge.src,
            dst=edge.dst,
            combine=_combine(maker),
            forward=() if there is None else self._reshard_steps(there, have, want),
            backward=None if back is None else self._reshard_steps(back, have, want),
            phase="backward" if there is None else there.phase,
            runs=(0.0 if there is None else there.times, 0.0 if back is None else back.times),
            hoisted=hoisted_of(self.graph) != "none" and src.kind == "parameter",
        )

    def _reshard_steps(
        self, flow: Flow, written: AccessLayout, read: AccessLayout
    ) -> tuple[LocalReshardStep, ...]:
        """The reshard steps of a flow between an op that writes a tensor and one that reads it."""
        ends = (read.gradient, written.gradient) if flow.back else (written.layout, read.layout)
        return tuple(_path(*ends, flow.bytes_of, self.mesh))

    def node(self, node: Node, edges: Mapping[object, int]) -> Iterable[LocalOp]:
        """The node's ops, each with the collectives inside it. Those of the whole node go to its main op.

        edges: ``shared_edge`` of a read -> the number of its transfer.
        """
        config = self.configs[node.name][None, :]
        inside: dict[int, list[Charge]] = defaultdict(list)
        main = next(k for k, op in enumerate(node.ops) if op is node.main)
        for charge in node_charges(self.graph, node, config, self.mesh):
            inside[main if charge.within is None else charge.within.op].append(charge)
        for k, op in enumerate(node.ops):
            yield self._op(node, op, inside[k], edges)

    def _op(self, node: Node, op: Op, inside: list[Charge], edges: Mapping[object, int]) -> LocalOp:
        own_phase = phase_of(self.graph, node.name, op)

        def over(phase: str, kind: str, access: int) -> tuple[str, ...]:
            """The axes over which the op's collectives of this kind run for one of its reads or writes."""
            charges = (
                c
                for c in inside
                if c.within is not None and (c.phase, c.kind, c.within.access) == (phase, kind, access)
            )
            return self._axes(sum({int(np.ravel(c.axes)[0]) for c in charges}))

        def operand(i: int, a: Access) -> LocalOperand:
            read = self._read(node, op, a)
            tensor, transfer = self._source(node, op, a, edges)
            return LocalOperand(
                tensor=tensor,
                shape=self._shape(a.tensor),
                layout=read.layout,
                gradient=read.gradient,
                transfer=transfer,
                constant=a.tensor not in self.graph.producer,
                summed=over("backward", "all_reduce", i),
                halo=over(own_phase, "permute", i),
            )

        def result(i: int, a: Access) -> LocalResult:
            written = self._write(node, op, a)
            steps = between(written.layout, written.gradient, self.mesh) if op.kind == "parameter" else ()
            return LocalResult(
                tensor=a.tensor,
                shape=self._shape(a.tensor),
                layout=written.layout,
                gradient=written.gradient,
                summed=over(own_phase, "all_reduce", i),
                gradient_carrier="value" if all(m.free for m in steps) else "zeros",
            )

        return LocalOp(
            node=node.name,
            op=op,
            operands=tuple(operand(i, a) for i, a in enumerate(op.reads)),
            results=tuple(result(i, a) for i, a in enumerate(op.writes)),
            combine=_combine(op),
            sent=tuple(s for c in inside if (s := self._sent(c)) is not None),
        )

    def _source(self, node: Node, op: Op, a: Access, edges: Mapping[object, int]) -> tuple[str, int | None]:
        """The tensor that an op reads, and its transfer; None if the same node makes it.

        What a copy node makes of its copy (a cast), it reads through the transfer that brings the copy.
        """
        if a.tensor not in node.internal:
            return a.tensor, edges.get(shared_edge(node, op, a))
        maker, _ = node.write_of(a.tensor)
        if maker.kind != "copy":
            return a.tensor, None
        return maker.reads[0].tensor, edges.get(shared_edge(node, maker, maker.reads[0]))

    def _sent(self, c: Charge) -> NodeCollective | None:
        """The charge as a collective; None if it sends nothing under this strategy."""
        axes, nbytes, rounds = (np.ravel(x)[0] for x in (c.axes, c.nbytes, c.rounds))
        if not axes or not nbytes or not rounds:
            return None
        return NodeCollective(
            kind=c.kind,
            axes=self._axes(int(axes)),
            nbytes=round(float(nbytes)),
            tensor=c.tensor,
            phase=c.phase,
            times=round(c.times * float(rounds)),
        )


def between(have: AxisLayout, want: AxisLayout, mesh: Mesh, nbytes: int = 0) -> tuple[LocalReshardStep, ...]:
    """The reshard steps from one layout to another. nbytes: of the whole tensor; if it is 0, each step has 0 bytes."""
    return tuple(_path(have, want, lambda _: nbytes, mesh))


def _path(
    have: AxisLayout, want: AxisLayout, bytes_of: Callable[[CollectiveKind], int], mesh: Mesh
) -> Iterator[LocalReshardStep]:
    """The reshard steps from one layout to another. The step that makes axes partial comes last.

    bytes_of: the tensor's bytes in a collective of a given kind.
    """
    for m in reshard_steps(have, want, mesh.sizes):
        yield LocalReshardStep(
            kind=m.kind,
            axes=tuple(name for i, name in enumerate(mesh.names) if m.axes >> i & 1),
            before=have,
            after=m.after,
            nbytes=0 if m.kind == "slice" else round(bytes_of(m.kind) / mesh.ways(m.split)),
        )
        have = m.after
    if to_partial := sorted({*want.partial} - {*have.partial}):
        after = AxisLayout("partial" if i in to_partial else s for i, s in enumerate(have))
        yield LocalReshardStep(
            kind="own", axes=tuple(mesh.names[i] for i in to_partial), before=have, after=after
        )
