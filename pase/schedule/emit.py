"""Writes bucket plans as settings of other programs: XLA flags, XLA profile text and PyTorch DDP bucket caps."""

from __future__ import annotations

from pase.schedule.plan import BucketPlan
from pase.schedule.simulate import message_name, message_seconds
from pase.schedule.types import ScheduleProblem

__all__ = ["ddp_caps_mb", "pgle_text", "xla_flags"]

MIB = 2**20
_THRESHOLD = {
    "all_reduce": "xla_gpu_all_reduce_combine_threshold_bytes",
    "all_gather": "xla_gpu_all_gather_combine_threshold_bytes",
    "reduce_scatter": "xla_gpu_reduce_scatter_combine_threshold_bytes",
}


def xla_flags(problem: ScheduleProblem, plan: BucketPlan) -> list[str]:
    """XLA flags that come closest to the plan: combiner thresholds and the latency-hiding scheduler.

    XLA has one threshold per kind of collective for the whole program, so it is set to the largest bucket of the kind.
    A plan with unequal buckets needs explicit collectives (`backends.jax.bucket_runner`).
    """
    largest: dict[str, int] = {}
    for m in plan.messages:
        kind = problem.tensors[m.pieces[0].tensor].kind
        largest[kind] = max(largest.get(kind, 0), m.nbytes)
    flags = [f"--{_THRESHOLD[kind]}={size}" for kind, size in sorted(largest.items()) if kind in _THRESHOLD]
    flags.append("--xla_gpu_enable_latency_hiding_scheduler=true")
    links = len({m.link for m in plan.messages})
    if links > 1:
        flags.append(f"--xla_gpu_experimental_parallel_collective_overlap_limit={links}")
    return flags


def pgle_text(problem: ScheduleProblem, plan: BucketPlan) -> str:
    """XLA's profile-guided latency estimates as a text proto: microseconds of each message's start op, in plan order.

    XLA numbers the ops of a kind in program order; the first has no suffix.
    """
    seen: dict[str, int] = {}
    lines = []
    for m, seconds in zip(plan.messages, message_seconds(problem, plan.messages), strict=True):
        op = problem.tensors[m.pieces[0].tensor].kind.replace("_", "-") + "-start"
        n = seen.get(op, 0)
        seen[op] = n + 1
        name = f"{op}.{n}" if n else op
        lines.append(f'costs {{ name: "{name}" cost_us: {seconds * 1e6:.3f} }}  # {message_name(problem, m)}')
    return "\n".join(lines) + "\n"


def ddp_caps_mb(problem: ScheduleProblem, plan: BucketPlan) -> list[float]:
    """DDP's bucket caps in MiB, in the order in which buckets are sent.

    Newer PyTorch takes them as bucket_cap_mb_list. For bucket_cap_mb of older versions, use the largest. DDP closes a
    bucket when it reaches its cap, so the caps are exact: with a cap that is rounded up, a bucket would also take the
    next tensor. DDP never splits a tensor; a plan that cuts tensors needs `backends.emit.ddp_hook`.
    """
    return [m.nbytes / MIB for m in plan.messages if problem.tensors[m.pieces[0].tensor].lag == 1]
