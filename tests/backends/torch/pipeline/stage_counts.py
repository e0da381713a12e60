"""The collectives that a plan lists for one rank of a pipeline, to compare with what the rank sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from pase.backends.audit.torch import SentCounts, planned
from pase.backends.torch.pipeline.plan import TorchPipeline
from pase.backends.torch.spmd.gathered_again import read_again
from pase.backends.torch.spmd.messages import gradient_messages
from pase.local.types import LocalOp, LocalProgram, LocalTransfer


def planned_in_stages(run: TorchPipeline, rank: int) -> SentCounts:
    """The plan's collectives on a device of one of the pipeline's ranks.

    They are those of the rank's stages, and those that reshard activations passed between stages.
    """
    out: SentCounts = Counter()
    for k, stage in enumerate(run.stages):
        if run.schedule.rank_of[k] == rank:
            stored = {t for t, owner in run.stage_of_parameter.items() if owner == k}
            whole = run.split(k).program
            part = _part(whole, stage.nodes, stored, returns=k + 1 == len(run.stages))
            once = {n for n, t in enumerate(part.transfers) if t.hoisted and any(t.runs)}
            # Of the whole program: a tied parameter that another stage stores is in a message, too.
            out += planned(part, gradient_messages(whole, run.split(k).bucket_bytes, once), whole=whole)
            for m, times in run.exchanged(k):
                axes = tuple(a for a in m.axes if part.mesh.sizes[part.mesh.names.index(a)] > 1)
                out[m.kind, axes, m.nbytes] += times if axes else 0
    return +out


def _part(
    program: LocalProgram, nodes: Collection[int], stored: Collection[str], *, returns: bool
) -> LocalProgram:
    """The part of a program that a stage runs.

    nodes: the stage's nodes of the exported graph. stored: the stage's parameters. returns: whether the stage returns
    the model's results.
    """

    def inside(op: LocalOp) -> bool:
        if op.op.kind == "output":
            return returns
        if op.op.kind == "parameter":
            return op.results[0].tensor in stored
        return op.op.eqn.number_in("") in nodes

    used = {n for n in range(len(program.transfers)) if any(map(inside, program.users(n)))}
    copied = {program.transfers[n].tensor for n in used}

    def runs(op: LocalOp) -> bool:
        copies = {r.tensor for r in op.results} & set(program.originals)
        return bool(copies & copied) if copies else inside(op)

    def sent(n: int, t: LocalTransfer) -> LocalTransfer:
        there, back = t.runs if n in used else (0.0, 0.0)
        # Another stage's backward may need what this one's does not: a head that is tied to a table.
        elsewhere = read_again(program, n, lambda op: True) and not read_again(program, n, inside)
        return replace(t, runs=(there / 2 if elsewhere else there, back))

    return replace(
        program,
        ops=tuple(filter(runs, program.ops)),
        transfers=tuple(sent(n, t) for n, t in enumerate(program.transfers)),
    )
