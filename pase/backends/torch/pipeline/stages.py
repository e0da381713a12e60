"""Which nodes of an exported graph each stage of a pipelined plan runs, and which tensors pass between stages.

A node that works on activations (values that depend on parameters and on the batch) belongs to one stage: that of its
block. Nodes before the blocks belong to the first stage, nodes after them to the last. Any other node (a mask, a cast
of a weight) runs in each stage that needs it. Activations that a later stage reads are sent from stage to stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pase.errors import PaseError
from pase.frontends.torch.blocks import blocks_of
from pase.frontends.torch.frontend import TracedTorch
from pase.ir import Place, simplify
from pase.ir.cut_points import chain_of
from pase.local.stage_assignment import PinnedSegment, pinned
from pase.local.types import LocalProgram
from pase.plan.pipeline import PipelinePlan

__all__ = ["TorchStage", "stages_of"]


@dataclass(frozen=True, kw_only=True)
class TorchStage:
    """One stage.

    nodes: the numbers of its nodes in the exported graph.
    enters, leaves: the tensors that it gets from the previous stage, and sends to the next one.
    reads: all tensors that its nodes read.
    """

    nodes: frozenset[int]
    enters: tuple[str, ...]
    leaves: tuple[str, ...]
    reads: frozenset[str]


def stages_of(
    traced: TracedTorch, program: LocalProgram, pipeline: PipelinePlan, returned: Collection[str]
) -> tuple[TorchStage, ...]:
    """The plan's stages.

    traced: the model on one micro-batch.
    program: the local program under any strategy.
    returned: tensors that the last stage must provide in addition to what its nodes read.

    Raises PaseError if the exported graph does not have the plan's blocks, or units, in a row.
    """
    units = _units(traced, pipeline)
    return _StageCut(program=program, cuts=pipeline.cuts, units=units, returned=frozenset(returned)).stages()


def _units(traced: TracedTorch, pipeline: PipelinePlan) -> list[int]:
    """Node -> its block, or unit: -1 before the first, and their number after the last."""
    name, many, nodes = traced.graph.name, sum(pipeline.cuts), traced.scope.nodes
    blocks = blocks_of(traced)
    if not pipeline.cut_points:
        if any(b.prefix for b in blocks) or len(blocks) != many:
            raise PaseError(
                f"the model cannot be run in stages: the plan cuts between {many} equal layers in a row, but the graph "
                f"has {sum(not b.prefix for b in blocks)}; layers that are iterations of a scan are not cut",
                where=f"model '{name}'",
                fix="compile it again, or with pipeline='none'",
            )
        at = {i: k for k, b in enumerate(blocks) for i in range(b.start, b.stop)}
        first, last = blocks[0].start, blocks[-1].stop
        out: list[int] = []
        for i in range(len(nodes)):
            before = out[-1] if out else -1
            out.append(-1 if i < first else many if i >= last else at.get(i, before))
        return out
    chain = chain_of(simplify(traced.graph), blocks)
    if chain.units != many or chain.loops:
        raise PaseError(
            f"the model cannot be run in stages: the plan cuts it into {many} units, but its graph has {chain.units}"
            + (", some of them iterations of a scan" if chain.loops else ""),
            where=f"model '{name}'",
            fix="compile it with pipeline='none'" if chain.loops else "compile it again",
        )
    found = [-1] * len(nodes)
    for path, unit in chain.at.items():
        number = Place(path).number_in("")
        if number is not None:
            found[number] = max(found[number], unit)
    return found


@dataclass(frozen=True, kw_only=True)
class _StageCut:
    """Assigns nodes to stages. units: the unit of each node."""

    program: LocalProgram
    cuts: Sequence[int]
    units: Sequence[int]
    returned: frozenset[str]

    @cached_property
    def reads(self) -> Mapping[int, frozenset[str]]:
        """Node -> the tensors of other nodes that it reads."""
        return {i: frozenset(self._ends[i][0] - self._ends[i][1]) for i in sorted(self._ends)}

    @cached_property
    def maker(self) -> Mapping[str, int]:
        """Tensor -> the node that computes it."""
        return {t: i for i, (_, made) in self._ends.items() for t in made}

    @cached_property
    def _ends(self) -> Mapping[int, tuple[set[str], set[str]]]:
        """Node -> (the tensors that its ops read, the tensors that they compute)."""
        program = self.program
        found: dict[int, tuple[set[str], set[str]]] = {}
        for op in program.ops:
            i = op.op.eqn.number_in("")
            copied = all(r.tensor in program.originals for r in op.results)
            if i is None or copied or op.op.kind in ("parameter", "input"):
                continue
            reads, made = found.setdefault(i, (set(), set()))
            reads |= {program.original(o.tensor) for o in op.operands if not o.constant}
            made |= {r.tensor for r in op.results}
        return found

    @cached_property
    def pinned(self) -> Mapping[int, int]:
        """Node that works on activations -> its stage."""
        kinds = {r.tensor: op.op.kind for op in self.program.ops for r in op.results}
        weights, batch = ({t for t, kind in kinds.items() if kind == of} for of in ("parameter", "input"))
        segments = ((i, PinnedSegment(self.reads[i], self._ends[i][1], self.units[i])) for i in self.reads)
        return pinned(segments, weights, batch, self.cuts)

    def stages(self) -> tuple[TorchStage, ...]:
        many = len(self.cuts)
        wanted: list[set[str]] = [set() for _ in range(many)]
        for i, s in self.pinned.items():
            wanted[s] |= self.reads[i]
        wanted[-1] |= self.returned
        enters: list[tuple[str, ...]] = [()]
        for s in range(1, many):
            later = set().union(*wanted[s:])
            cross = {t for t in later if self.pinned.get(self.maker.get(t, -1), s) < s}
            enters.append(tuple(sorted(cross, key=lambda t: (self.maker[t], t))))
        return tuple(
            self._stage(s, wanted[s], enters[s], enters[s + 1] if s + 1 < many else ()) for s in range(many)
        )

    def _stage(
        self, stage: int, wanted: set[str], enters: tuple[str, ...], leaves: tuple[str, ...]
    ) -> TorchStage:
        nodes = {i for i, s in self.pinned.items() if s == stage}
        have = set(enters)
        todo = [*wanted, *leaves]
        while todo:
            t = todo.pop()
            if t in have:
                continue
            have.add(t)
            i = self.maker.get(t)
            if i is not None and i not in self.pinned:
                nodes.add(i)
                todo += self.reads[i]
        reads = set().union(*(self._ends[i][0] for i in nodes))
        return TorchStage(nodes=frozenset(nodes), enters=enters, leaves=leaves, reads=frozenset(reads))
