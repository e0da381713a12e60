"""The defaults of frameworks (wait-free backpropagation, PyTorch DDP, Horovod), and plain priority."""

from __future__ import annotations

import math

from pase.schedule.plan import BucketPlan, Message, issue_order, whole
from pase.schedule.registry import MIB, Options, register
from pase.schedule.simulate import evaluate
from pase.schedule.types import ScheduleProblem, TransferGroup
from pase.schedule.view import can_fuse, fastest_link, need_order, ready_order, ready_s

__all__ = ["ddp", "fifo", "horovod", "priority"]


@register("fifo", "wait-free backpropagation: each tensor alone, as it becomes ready", rank=0)
def fifo(problem: ScheduleProblem, options: Options) -> BucketPlan:
    """Poseidon's WFBP: send each gradient as soon as it is made. Zhang et al., USENIX ATC 2017."""
    messages = [whole(problem, [t], link=fastest_link(problem, t)) for t in ready_order(problem)]
    return BucketPlan(policy="fifo", messages=tuple(messages))


@register("priority", "each tensor alone, the ready one needed soonest first", rank=0)
def priority(problem: ScheduleProblem, options: Options) -> BucketPlan:
    """P3 without partitions: non-preemptive priority by next use. Jayarajan et al., MLSys 2019."""
    messages = [whole(problem, [t], link=fastest_link(problem, t)) for t in need_order(problem)]
    return BucketPlan(policy="priority", messages=tuple(messages), dispatch="priority")


@register("ddp", "PyTorch DDP: buckets of 1 MiB, then 25 MiB, in ready order; step() waits for all", rank=0)
def ddp(problem: ScheduleProblem, options: Options) -> BucketPlan:
    """PyTorch DDP: a bucket closes when its size reaches the limit. No tensor is split.

    Buckets follow the ready order, as DDP rebuilds them after its first iteration. Li et al., VLDB 2020;
    torch/csrc/distributed/c10d/reducer.cpp.
    """
    buckets: list[list[int]] = []
    current: dict[TransferGroup, tuple[list[int], int]] = {}
    closed: dict[TransferGroup, int] = {}
    for t in ready_order(problem):
        group = problem.tensors[t].group
        members, size = current.pop(group, ([], 0))
        if members and not can_fuse(problem, members, t):
            members, size = [], 0
        if not members:
            buckets.append(members)
        members.append(t)
        size += problem.tensors[t].nbytes
        limit = options.ddp_cap_bytes if closed.get(group) else options.ddp_first_bytes
        if size >= limit:
            closed[group] = closed.get(group, 0) + 1
        else:
            current[group] = (members, size)
    # DDP launches a bucket when its last tensor is ready, in bucket order.
    messages = [whole(problem, b, link=fastest_link(problem, b[0])) for b in buckets]
    return BucketPlan(policy="ddp", messages=_launched(problem, messages), barrier=_steps(problem))


def _launched(problem: ScheduleProblem, messages: list[Message]) -> tuple[Message, ...]:
    place = [0] * len(problem.tensors)
    for i, t in enumerate(ready_order(problem)):
        place[t] = i
    return issue_order(problem, messages, place)


@register(
    "horovod",
    "Horovod: what is ready at each cycle's tick is fused up to a limit; both autotuned",
    plain_only=True,
    rank=0,
)
def horovod(problem: ScheduleProblem, options: Options) -> BucketPlan:
    """Horovod: in every cycle, the ready tensors are fused in ready order, up to the fusion threshold.

    Horovod tunes the cycle and the threshold while it trains; here the evaluator chooses both. Sergeev & Del Balso,
    2018.
    """
    best: tuple[float, BucketPlan] | None = None
    for cycle_s in (1e-3, 2.5e-3, 5e-3):
        for limit in (16 * MIB, 64 * MIB, 128 * MIB):
            plan = _horovod(problem, cycle_s, limit)
            cost = evaluate(problem, plan, timeline=False, check=False).iteration_s
            if best is None or cost < best[0]:
                best = (cost, plan)
    assert best is not None
    return best[1]


def _horovod(problem: ScheduleProblem, cycle_s: float, limit_bytes: int) -> BucketPlan:
    ready = ready_s(problem)
    order = ready_order(problem)
    messages: list[Message] = []
    members: list[int] = []
    size, tick = 0, -1

    def flush() -> None:
        if members:
            hold = max(0.0, tick * cycle_s - max(float(ready[t]) for t in members))
            messages.append(whole(problem, members, link=fastest_link(problem, members[0]), hold_s=hold))

    for t in order:
        at = math.ceil(float(ready[t]) / cycle_s - 1e-9)
        nbytes = problem.tensors[t].nbytes
        if members and (at != tick or size + nbytes > limit_bytes or not can_fuse(problem, members, t)):
            flush()
            members, size = [], 0
        members = [*members, t]
        size, tick = size + nbytes, at
    flush()
    detail = {"cycle_s": cycle_s, "fusion_bytes": limit_bytes}
    return BucketPlan(
        policy="horovod", messages=_launched(problem, messages), barrier=_steps(problem), detail=detail
    )


def _steps(problem: ScheduleProblem) -> bool:
    """Whether optimizer.step() can be a barrier: no tensor is gathered after it for the next forward."""
    return not any(t.follows for t in problem.tensors)
