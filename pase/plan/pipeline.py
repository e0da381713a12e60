"""The stages of a pipelined plan: which blocks each has, how they are split, and the figures of the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pase.files.codec import AtLeastOne, Count, NotNegative
from pase.ir.blocks import Block

if TYPE_CHECKING:
    from pase.pipeline.types import Schedule
    from pase.plan.types import PlanData

__all__ = ["PipelinePlan", "ReplicaPlan", "StagePlan", "lines", "unequal"]

EQUAL = 1e-3
"""Relative: what cuts are searched to. Steps that differ by less are as good."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage. blocks: how many of the model's equal blocks it has.

    The first stage also has what comes before the blocks, and the last one what comes after them. strategy: which of
    the plan's ``strategies`` splits it. recomputes: whether backward recomputes its blocks. weights: whether they are
    gathered and their gradients summed once per step, or at each micro-batch. forward_s, backward_s: seconds of one
    micro-batch; backward includes recomputation. memory_bytes: on a device of its rank, for all stages of that rank.
    weight_s, again_s: the parts of backward_s that are weights' gradients and recomputation. send_s: to the next stage;
    back_s: for gradients on the way back, as long where it is None.
    kept_bytes: what a device holds of one micro-batch until its backward; waiting_bytes: the part of it that stays
    until its weights' gradients, where they are computed apart. send_bytes: of one micro-batch, from a device of it to
    the next stage; back_bytes: of the gradients that come back. None in layouts written before these existed.
    """

    rank: Count
    blocks: Count
    strategy: Count
    recomputes: bool
    weights: Literal["once", "each"]
    forward_s: NotNegative
    backward_s: NotNegative
    memory_bytes: Count
    weight_s: NotNegative | None = None
    again_s: NotNegative | None = None
    send_s: NotNegative | None = None
    back_s: NotNegative | None = None
    kept_bytes: Count | None = None
    waiting_bytes: Count | None = None
    send_bytes: Count | None = None
    back_bytes: Count | None = None


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """A replica of the model on one group of a machine's devices. micro_batches: its share of the step's. step_s: until
    it is done, before gradients are summed between replicas. mesh: axis -> size, of one of its ranks."""

    group: str
    micro_batches: AtLeastOne
    step_s: NotNegative
    mesh: Mapping[str, AtLeastOne]
    pipeline: PipelinePlan


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A pipeline of ``degree`` ranks, each with the plan's mesh, and with ``chunks`` stages on each rank.

    cuts: number of blocks of each stage. bubble: the fraction of the step in which the average rank works on no
    micro-batch, including sums of gradients and the update. imbalance: how much more the busiest rank works than the
    average one.
    cuts_bound: no other cuts of these stages take less time. strategies: node -> iteration dim -> mesh axes, for the
    stages.
    others: seconds of the step under other schedules, "name" or "name ×chunks", on the same devices. scope: what the
    plan's certificate covers.
    """

    degree: AtLeastOne
    chunks: AtLeastOne
    micro_batches: AtLeastOne
    schedule: str
    cuts: tuple[Count, ...]
    bubble: NotNegative
    imbalance: NotNegative
    cuts_bound: NotNegative
    stages: tuple[StagePlan, ...]
    strategies: tuple[Mapping[str, Mapping[str, tuple[str, ...]]], ...]
    others: Mapping[str, float]
    scope: str
    again: tuple[tuple[Block, ...], ...] = ()
    """For each of ``strategies``, the blocks of equations that its backward recomputes. Empty in layouts written before
    this field existed."""
    before_s: tuple[NotNegative, ...] = ()
    after_s: tuple[NotNegative, ...] = ()
    """Seconds of each rank once a step: before its first action (weights gathered) and after its last one (gradients
    summed, the update). Empty in layouts written before these existed."""
    hidden_s: NotNegative = 0.0
    """Seconds a step of gathers and sums that the compute of a rank hides, on average: ``before_s`` and ``after_s``
    have the rest."""
    stages_of: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)
    """Node -> the stages that have it, for nodes that not all stages have. Empty in layouts written before this
    existed: every model has such nodes."""

    narrow: bool = False
    """The model has no equal blocks: ``cuts`` counts units between the narrow places of its graph."""
    groups: tuple[str, ...] = ()
    """The machine's group in which each rank lies. Empty if all devices are equal."""
    replicas: tuple[ReplicaPlan, ...] = ()
    """If each of the machine's groups holds a replica: all of them. The rest of the plan is that of the slowest."""
    sum_s: NotNegative | None = None
    """Seconds to sum gradients between replicas, after the slowest."""
    equal_s: NotNegative | None = None
    """Seconds of the step if unequal devices had equal shares, of the blocks or, with replicas, of the micro-batches.
    None if devices are equal, or if equal shares do not fit."""

    def recomputed_blocks(self, strategy: int, all_of_them: tuple[Block, ...]) -> tuple[Block, ...]:
        """The blocks that the stages of a strategy recompute. all_of_them: the plan's own, for older layouts."""
        if self.again:
            return self.again[strategy]
        return all_of_them if any(s.recomputes for s in self.stages if s.strategy == strategy) else ()

    def actions(self) -> Schedule:
        """The schedule itself: each rank's list of actions."""
        from pase.pipeline.registry import schedule

        return schedule(self.schedule, self.degree, self.micro_batches, self.chunks)

    def rank_name(self, rank: int) -> str:
        """The rank, with the group of devices in which it lies if there are several."""
        return f"rank {rank} ({self.groups[rank]})" if self.groups else f"rank {rank}"

    def __str__(self) -> str:
        chunks = f" of {self.chunks} stages each" if self.chunks > 1 else ""
        micro = _many(self.micro_batches, "micro-batch", "micro-batches")
        return f"{_many(self.degree, 'rank', 'ranks')}{chunks}, {micro}, {self.schedule}"


def lines(plan: PlanData) -> list[str]:
    """The pipeline as text for people; empty if there is no pipeline."""
    p = plan.pipeline
    if p is None:
        return []
    recompute_s = sum(s.recomputes for s in p.stages)
    each = sum(s.weights == "each" for s in p.stages)
    how = [f"{recompute_s} of {len(p.stages)} stages computed again in backward"] if recompute_s else []
    how += [f"{each} gather and sum at each micro-batch"] if each else []
    out = [
        f"stages {p} · bubble {p.bubble:.1%} · imbalance {p.imbalance:.1%}"
        + (f" · {' · '.join(how)}" if how else ""),
        f"cuts   {runs(p.cuts)} {'units' if p.narrow else 'blocks'} a stage; the mesh is one rank's",
    ]
    out += unequal(p, plan.cost)
    slower = sorted((s, name) for name, s in p.others.items())
    if slower:
        texts = (f"{name} {s / plan.cost - 1:+.1%}" for s, name in slower)
        out.append(f"other schedules, each with its own best cuts: {' · '.join(texts)}")
    out.append(f"scope  {p.scope}")
    if plan.provenance.get("frontend") == "torch" and not p.groups and not p.replicas:
        runs_in = (
            "plan.torch.train_step(module, optimizer) runs it, stage by stage; 'pase emit --to torch-schedule' writes "
            "its list of actions, which torch.distributed.pipelining runs"
        )
    elif plan.provenance.get("frontend") == "torch":
        runs_in = "plan.torch does not run stages on unequal groups of devices yet"
    elif p.replicas:
        runs_in = (
            "plan.jax.train_step(optimizer) runs the replicas in JAX, each its share of the micro-batches"
        )
    else:
        way = "as one program" if p.schedule == "circular" else "stage by stage"
        runs_in = f"plan.jax.train_step(optimizer) runs it in JAX, {way}; pase emit does not take it yet"
    out.append(f"note   {runs_in}")
    return out


def unequal(p: PipelinePlan, step_s: float) -> list[str]:
    """Which groups of unequal devices do what, and what equal shares would take."""
    if not p.groups:
        return []
    out = []
    for r in p.replicas:
        mesh = "×".join(map(str, r.mesh.values()))
        out.append(
            f"share  {r.group}: {_many(r.micro_batches, 'micro-batch', 'micro-batches')}, {r.step_s * 1e3:.4g} ms, "
            f"{_many(r.pipeline.degree, 'rank', 'ranks')} of {mesh}"
        )
    if not p.replicas:
        out.append(f"groups {runs(p.groups)} by rank")
    what = "shares of the micro-batches" if p.replicas else "numbers of blocks"
    if p.equal_s is None:
        out.append(f"equal  {what} do not fit")
    elif p.equal_s <= step_s * (1 + EQUAL):
        out.append(f"equal  {what} are as good")
    else:
        out.append(f"equal  {what} would take {p.equal_s / step_s - 1:.1%} longer")
    if p.sum_s is not None:
        out.append(f"sum    of gradients between the groups: {p.sum_s * 1e3:.4g} ms of the step")
    return out


def _many(n: int, one: str, more: str) -> str:
    """
    >>> _many(1, "rank", "ranks"), _many(3, "rank", "ranks")
    ('1 rank', '3 ranks')
    """
    return f"{n} {one if n == 1 else more}"


def runs(cuts: tuple[object, ...]) -> str:
    """
    >>> runs((7, 8, 8, 8, 6))
    '7 8×3 6'
    """
    out: list[tuple[object, int]] = []
    for n in cuts:
        if out and out[-1][0] == n:
            out[-1] = n, out[-1][1] + 1
        else:
            out.append((n, 1))
    return " ".join(f"{n}×{k}" if k > 1 else str(n) for n, k in out)
