"""Which nodes of an exported graph each stage of a pipelined plan runs, and which tensors pass between stages.

``pase.local.stage_assignment`` says what belongs to which stage. A segment is one node.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pase.errors import PaseError
from pase.frontends.torch.blocks import blocks_of
from pase.frontends.torch.frontend import TracedTorch
from pase.ir import Place, simplify
from pase.ir.cut_points import chain_of
from pase.local.stage_assignment import PinnedSegment, SegmentedProgram
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
    units, ends = _units(traced, pipeline), _ends(program)
    kinds = {r.tensor: op.op.kind for op in program.ops for r in op.results}
    weights, batch = ({t for t, kind in kinds.items() if kind == of} for of in ("parameter", "input"))
    segments = {
        i: PinnedSegment(reads - made, sorted(made), units[i]) for i, (reads, made) in sorted(ends.items())
    }
    cut = SegmentedProgram(
        segments=segments, weights=weights, batch=batch, cuts=pipeline.cuts, returned=sorted(returned)
    )
    return tuple(
        TorchStage(
            nodes=frozenset(s.segments),
            enters=s.enters,
            leaves=s.leaves,
            reads=frozenset[str]().union(*(ends[i][0] for i in s.segments)),
        )
        for s in cut.stages()
    )


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


def _ends(program: LocalProgram) -> dict[int, tuple[set[str], set[str]]]:
    """Node -> (the tensors that its ops read, the tensors that they compute)."""
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
