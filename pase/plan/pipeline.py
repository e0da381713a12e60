"""The stages of a pipelined plan: the blocks of each stage, how they are split, and the figures of the schedule."""

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
"""The relative precision to which cuts are searched. Steps that differ by less count as equally good."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage of a pipeline.

    blocks: how many of the model's equal blocks it has. The first stage also has what comes before the blocks, and the
        last one what comes after them.
    strategy: the index of the strategy in the plan's ``strategies`` that splits it.
    recomputes: whether backward recomputes its blocks.
    weights: whether they are gathered and their gradients summed once per step, or at each micro-batch. Then they are
        gathered for its forward, and again for its backward; the circular schedule gathers once in either case.
    forward_s, backward_s: seconds of one micro-batch; backward includes recomputation.
    memory_bytes: bytes on a device of its rank, for all stages of that rank.
    weight_s, recompute_s: the parts of backward_s that are weights' gradients and recomputation.
    send_s, back_s: seconds to send to the next stage, and to send gradients back. If back_s is None, it equals send_s.
    kept_bytes: what a device holds of one micro-batch until its backward.
    waiting_bytes: the part of kept_bytes that stays until the weights' gradients, if these are computed separately.
    send_bytes, back_bytes: bytes of one micro-batch that one of its devices sends to the next stage, and bytes of the
        gradients that come back.

    The fields that may be None are None in layouts written before they existed.
    """

    rank: Count
    blocks: Count
    strategy: Count
    recomputes: bool
    weights: Literal["hoisted", "each"]
    forward_s: NotNegative
    backward_s: NotNegative
    memory_bytes: Count
    weight_s: NotNegative | None = None
    recompute_s: NotNegative | None = None
    send_s: NotNegative | None = None
    back_s: NotNegative | None = None
    kept_bytes: Count | None = None
    waiting_bytes: Count | None = None
    send_bytes: Count | None = None
    back_bytes: Count | None = None


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """A replica of the model on one group of a machine's devices.

    micro_batches: how many of the step's micro-batches it takes.
    step_s: seconds until it is done, before gradients are summed between replicas.
    mesh: axis -> size, for one of its ranks.
    """

    group: str
    micro_batches: AtLeastOne
    step_s: NotNegative
    mesh: Mapping[str, AtLeastOne]
    pipeline: PipelinePlan


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A pipeline of ``degree`` ranks, each with the plan's mesh, and with ``chunks`` stages on each rank.

    cuts: the number of blocks of each stage.
    bubble: the fraction of the step in which the average rank works on no micro-batch, including sums of gradients and
        the update.
    imbalance: how much more the busiest rank works than the average one.
    cuts_bound: no other cuts of these stages take less time.
    strategies: node -> iteration dim -> mesh axes, for the stages.
    others: seconds of the step under other schedules on the same devices, by "name" or "name ×chunks".
    scope: what the plan's certificate covers.
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
    recompute: tuple[tuple[Block, ...], ...] = ()
    """For each of ``strategies``, the blocks of equations that its backward recomputes. Empty in layouts written before
    this field existed."""
    before_s: tuple[NotNegative, ...] = ()
    after_s: tuple[NotNegative, ...] = ()
    """Seconds of each rank per step, before its first action (weights are gathered) and after its last one (gradients
    are summed, and the optimizer updates). Empty in layouts written before these fields existed."""
    hidden_s: NotNegative = 0.0
    """Seconds per step of gathers and sums that overlap with a rank's compute, on average. ``before_s`` and ``after_s``
    have the rest."""
    stages_of: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)
    """Node -> the stages that have it, for nodes that not all stages have. Every model has such nodes; this is empty
    only in layouts written before this field existed."""

    cut_points: bool = False
    """Whether the model has no equal blocks, so that ``cuts`` counts the units between the cut points of its graph."""
    groups: tuple[str, ...] = ()
    """The machine's group to which each rank belongs. Empty if all devices are equal."""
    replicas: tuple[ReplicaPlan, ...] = ()
    """All replicas, if each of the machine's groups holds one. The rest of the plan is then that of the slowest one."""
    sum_s: NotNegative | None = None
    """Seconds to sum gradients between replicas, after the slowest one is done."""
    equal_s: NotNegative | None = None
    """Seconds of the step if unequal devices had equal numbers of blocks or, with replicas, of micro-batches. None if
    devices are equal, or if equal numbers do not fit."""

    def recomputed_blocks(self, strategy: int, all_of_them: tuple[Block, ...]) -> tuple[Block, ...]:
        """Return the blocks that the stages of a strategy recompute. all_of_them: the plan's own, for older layouts."""
        if self.recompute:
            return self.recompute[strategy]
        return all_of_them if any(s.recomputes for s in self.stages if s.strategy == strategy) else ()

    def actions(self) -> Schedule:
        """Return the schedule itself: each rank's list of actions."""
        from pase.pipeline.registry import schedule

        return schedule(self.schedule, self.degree, self.micro_batches, self.chunks)

    def rank_name(self, rank: int) -> str:
        """Return the rank's name, with its group of devices if there are several groups."""
        return f"rank {rank} ({self.groups[rank]})" if self.groups else f"rank {rank}"

    def __str__(self) -> str:
        chunks = f" of {self.chunks} stages each" if self.chunks > 1 else ""
        micro = _many(self.micro_batches, "micro-batch", "micro-batches")
        return f"{_many(self.degree, 'rank', 'ranks')}{chunks}, {micro}, {self.schedule}"


def lines(plan: PlanData) -> list[str]:
    """Return the pipeline as text for people; empty if there is no pipeline."""
    p = plan.pipeline
    if p is None:
        return []
    recomputed = sum(s.recomputes for s in p.stages)
    each = sum(s.weights == "each" for s in p.stages)
    how = [f"{recomputed} of {len(p.stages)} stages recomputed in backward"] if recomputed else []
    how += [f"{each} gather and sum in each micro-batch"] if each else []
    out = [
        f"stages {p} · bubble {p.bubble:.1%} · imbalance {p.imbalance:.1%}"
        + (f" · {' · '.join(how)}" if how else ""),
        f"cuts   {runs(p.cuts)} {'units' if p.cut_points else 'blocks'} a stage; the mesh is one rank's",
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
            "plan.jax.train_step(optimizer) runs the replicas in JAX, each with its part of the micro-batches"
        )
    else:
        way = "as one program" if p.schedule == "circular" else "stage by stage"
        runs_in = f"plan.jax.train_step(optimizer) runs it in JAX, {way}; pase emit does not support it yet"
    out.append(f"note   {runs_in}")
    return out


def unequal(p: PipelinePlan, step_s: float) -> list[str]:
    """Return what each group of unequal devices does, and what equal parts would take."""
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
