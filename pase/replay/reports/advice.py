"""Advice: what to change in the model or the program, and what a replay with that change saves.

The time that an op would take is that of the run's own ops of the kind, where it has them, or else follows from the
card's rates in its machine file. Advice overlaps, so gains do not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pase.machine.types import Device
from pase.replay.graph import launching_calls
from pase.replay.kernels import SINGLE, work_of
from pase.replay.measurement.origins import Origin
from pase.replay.measurement.spending import Amount, Spending, file_dtype, peak_flops
from pase.replay.reports.findings import Finding, Scene, exposed_tasks
from pase.replay.reports.spent import aligned_to, misaligned, shape_text
from pase.replay.reports.trust import busiest_ns
from pase.replay.types import COLLECTIVE, OPERATIONS, on_stream

__all__ = ["advice"]

_ALIKE = 0.1
"""Products with at least this fraction of the FLOPs are compared with one: smaller ones do not fill the card."""
_FULL = 0.5
"""At least this fraction of the peak is what large aligned products reach; others say nothing of what is possible."""
_MOST = 3
_SEVERAL = 8
"""An update of fewer kernels gains nothing from being fused."""
_MUCH = 0.02
"""A larger batch changes the training, so it is advised only if it saves at least this fraction."""


def advice(s: Scene, spent: Sequence[Spending]) -> list[Finding]:
    """Returns the advice for the slowest rank, of each kind what gains most."""
    if not spent:
        return []
    slowest = max(spent, key=lambda x: x.total_ns)
    looks = (_pad, _lower_precision, _layout, _fuse_optimizer, _overlap, _larger_batch)
    return [f for look in looks for f in look(s, slowest)]


def _pad(s: Scene, x: Spending) -> list[Finding]:
    """Finds products with dims whose rows are not aligned, by the dim."""
    by_dim: dict[int, list[tuple[Origin, Amount, float]]] = {}
    for o, a in x.ops.items():
        rate = _aligned_rate(x, o)
        if rate is None or not a.calls:
            continue
        odd = misaligned(o)
        more = 1.0
        for d in odd:
            more *= aligned_to(d, o.precision) / d
        then = more * a.flops / rate[0] * 1e9
        if odd and then < a.busy_ns:
            by_dim.setdefault(odd[-1], []).append((o, a, then / a.busy_ns))
    out = []
    for dim, ops in by_dim.items():
        largest = max((o for o, _, _ in ops), key=lambda o: o.flops)
        rate = _aligned_rate(x, largest)
        to = aligned_to(dim, largest.precision)
        out.append(
            _changed(
                s,
                x,
                "pad",
                f"Pad {dim} to {to}: {len(ops)} product(s) read or write rows that are not aligned",
                f"Rows of {dim} elements are no multiple of 16 bytes, which matrix units want. "
                + "; ".join(f"{o.name} ({o.where}) {shape_text(o)}" for o, _, _ in ops[:_MOST])
                + f". Aligned ones reach {rate[0] / 1e12 if rate else 0.0:.2g} TFLOP/s ({rate[1] if rate else ''}).",
                ops,
            )
        )
    return _best(out)


def _aligned_rate(x: Spending, o: Origin) -> tuple[float, str] | None:
    """Returns the FLOP/s that an aligned product like this one reaches and how that is known; None if it is not."""
    peak = peak_flops(x.device, o.precision) if x.device is not None else None
    if not o.product or o.flops <= 0:
        return None
    seen = [
        a.flops / a.timed_ns * 1e9
        for other, a in x.ops.items()
        if other.product
        and other.precision == o.precision
        and other.flops >= _ALIKE * o.flops
        and a.timed_ns
        and not misaligned(other)
    ]
    fast = [r for r in seen if peak is None or r >= _FULL * peak]
    if fast:
        return float(np.median(fast)), "the run's own"
    if x.device is None or peak is None:
        return None
    return peak * x.device.reached(
        "matmul", file_dtype(o.precision)
    ), f"by the machine file of {x.device.name}"


def _lower_precision(s: Scene, x: Spending) -> list[Finding]:
    """Finds products in float32, which the card runs faster in bfloat16."""
    ops = []
    for o, a in x.ops.items():
        gain = _gain(x.device, o)
        if o.precision in SINGLE and o.kind.startswith("product") and a.calls and gain > 1:
            ops.append((o, a, 1 / gain))
    if not ops:
        return []
    ops.sort(key=lambda p: -p[1].busy_ns)
    largest = ops[0][0]
    return [
        _changed(
            s,
            x,
            "precision",
            f"{len(ops)} kind(s) of products run in float32; in bfloat16 the card has a higher rate",
            f"The largest: {largest.name} ({largest.where}) {shape_text(largest)}. Cast its operands to bfloat16, and "
            "accumulate in float32. The gain assumes that the products reach the same fraction of the peak.",
            ops,
        )
    ]


def _gain(device: Device | None, o: Origin) -> float:
    now = peak_flops(device, o.precision) if device is not None else None
    then = peak_flops(device, "bf16") if device is not None else None
    return then / now if now and then else 0.0


def _layout(s: Scene, x: Spending) -> list[Finding]:
    """Finds copies that change the layout for convolutions."""
    ops = [
        (o, a, 0.0)
        for o, a in x.ops.items()
        if o.kind == "copy"
        and a.calls
        and work_of(o.name) == "convolution"
        and not o.name.startswith("copy")  # XLA's own
    ]
    if not ops:
        return []
    return [
        _changed(
            s,
            x,
            "layout",
            "Convolutions copy their operands to another layout",
            "Keep images as NHWC (channels_last), so that the library need not convert them. "
            f"The largest: {ops[0][0].name} ({ops[0][0].where}) {shape_text(ops[0][0])}.",
            ops,
        )
    ]


def _optimizer_tasks(s: Scene, x: Spending) -> np.ndarray:
    """Returns a mask of the optimizer's device tasks, on all ranks: those of other ranks have the same names."""
    g = s.graph
    events = [e for o in x.ops if o.kind == "optimizer" for e in x.events[o]]
    mine = np.isin(g.event, events) & (g.event >= 0)
    return mine | (np.isin(g.name, g.name[mine]) & (g.rank != x.rank) & on_stream(g.kind))


def _fuse_optimizer(s: Scene, x: Spending) -> list[Finding]:
    """Finds an update of many kernels. One kernel that does it all moves the same bytes, and is launched once."""
    g = s.graph
    mine = _optimizer_tasks(s, x)
    kernels = np.flatnonzero(mine & (g.rank == x.rank))
    if len(kernels) < _SEVERAL:
        return []
    duration = g.duration_ns.copy()
    n = len(x.iterations)
    for o, a in x.ops.items():
        if o.kind == "optimizer" and a.busy_ns and a.floor_ns > 0 and x.device is not None:
            floor = a.floor_ns / x.device.efficiency.get("memory", 1.0)
            duration[mine & np.isin(g.name, g.name[np.isin(g.event, x.events[o])])] *= min(
                floor / a.busy_ns, 1.0
            )
    # A launch right after another one of the optimizer's is not needed, nor is what the host does in between.
    before = g.before_on_thread
    calls = {c for op, c in launching_calls(g).items() if mine[op]}
    for c in calls:
        work = before.get(c, -1)
        if before.get(work, -1) in calls:
            duration[[c, work]] = 0.0
    removed = (g.duration_ns - duration)[g.rank == x.rank].sum()
    busy = sum(a.busy_ns for o, a in x.ops.items() if o.kind == "optimizer") / n
    host = (g.duration_ns - duration)[(g.rank == x.rank) & ~on_stream(g.kind)].sum()
    return [
        Finding(
            kind="optimizer",
            title=f"The optimizer runs as {len(kernels)} kernels",
            detail=(
                "One fused kernel (fused=True in PyTorch; in JAX, an update of flattened parameters) reads and writes "
                "the same bytes with one launch. The gain is what the launches and the host between them take"
                + (", and what the kernels take beyond their bytes." if x.device is not None else ".")
            ),
            cost_ns=s.saved(replace(g, duration_ns=duration), float(removed)),
            measured_ns=busy + float(host),
            evidence=s.tasks(kernels[np.argsort(-g.duration_ns[kernels])[:2]].tolist()),
        )
    ]


_HIDE = {
    "all_gather": "Gather the next layer's parameters while this one computes (prefetch).",
    "reduce_scatter": "Send gradients while backward still computes (smaller buckets, a stream of their own).",
    "all_reduce": "Send gradients while backward still computes (smaller buckets). An all-reduce inside of a layer "
    "has nothing of its layer to hide behind: split the batch in two halves, and let one compute meanwhile.",
    "all_to_all": "Split the batch in two halves: the tokens of one travel while the other computes.",
    "send_recv": "Send a stage's result while the next micro-batch computes.",
    "permute": "Send the next part while this one computes.",
}
"""Operation → how to hide it."""


def _overlap(s: Scene, x: Spending) -> list[Finding]:
    """Finds, by operation, collectives that run while nothing computes. At best they hide behind other compute."""
    g = s.graph
    comm = np.flatnonzero((g.kind == COLLECTIVE) & np.isin(g.operation, [OPERATIONS.index(o) for o in _HIDE]))
    if not len(comm):
        return []
    _, exposed = exposed_tasks(g, comm)
    out = []
    for number in np.unique(g.operation[comm]).tolist():
        mine = comm[g.operation[comm] == number]
        duration = g.duration_ns.copy()
        duration[mine] -= np.minimum([max(exposed.get(i, 0.0), 0.0) for i in mine.tolist()], duration[mine])
        bare = sum(exposed[i] for i in mine.tolist() if int(g.rank[i]) == x.rank)
        # What computes beside no collective has room for them.
        room = x.total_ns / len(x.iterations) - sum(x.idle.values()) / len(x.iterations)
        room -= sum(g.duration_ns[i] for i in comm.tolist() if int(g.rank[i]) == x.rank)
        calls = int((g.rank[mine] == x.rank).sum())
        if bare <= 0 or not calls:
            continue
        name = OPERATIONS[number]
        longest = sorted(mine.tolist(), key=lambda i: -exposed[i])
        out.append(
            Finding(
                kind="overlap",
                title=(
                    f"{calls} {'calls' if calls > 1 else 'call'} of {name}, while nothing computes for "
                    f"{bare / 1e6:.2f} ms in the replay of a typical iteration"
                ),
                detail=_HIDE[name]
                + " The gain is an upper bound: it needs compute that does not wait for them.",
                cost_ns=s.saved(replace(g, duration_ns=duration), min(bare, max(room, 0.0))),
                measured_ns=bare,
                evidence=s.tasks(longest[:2]),
            )
        )
    return _best(out)


def _larger_batch(s: Scene, x: Spending) -> list[Finding]:
    """Finds time that does not depend on the batch: launches, gaps and the update.

    Twice the examples take at most twice the time of each device op, except of the optimizer's. The host launches as
    many ops as before. A host that computes itself (``idle["host"]``) takes longer for more examples, too.
    """
    if s.run.doubts or "host" in x.idle:
        return []
    g = s.graph
    fixed = _optimizer_tasks(s, x)
    twice = replace(g, duration_ns=np.where(on_stream(g.kind) & ~fixed, 2 * g.duration_ns, g.duration_ns))
    then = max(s.run.changed_ns(twice), busiest_ns(twice))
    n = len(x.iterations)
    amortized = sum(x.idle.values()) / n + g.duration_ns[fixed & (g.rank == x.rank)].sum()
    gain = min(max(s.run.replayed_ns - then / 2, 0.0), float(amortized))
    if gain < _MUCH * s.run.replayed_ns:
        return []
    return [
        Finding(
            kind="larger-batch",
            title=(
                f"A batch twice as large would take {then / 1e6:.2f} ms, {then / s.run.replayed_ns:.2f} times as long"
            ),
            detail=(
                "Launches, gaps and the update take the same for more examples, if the host's data loading keeps up. "
                "The gain is for as many examples as now, with device ops that take twice as long. Activations take "
                "twice the memory; with gradient accumulation, take fewer and larger micro-batches."
            ),
            cost_ns=gain,
            measured_ns=float(amortized),
        )
    ]


def _changed(
    s: Scene,
    x: Spending,
    kind: str,
    title: str,
    detail: str,
    ops: Sequence[tuple[Origin, Amount, float]],
) -> Finding:
    """Returns a finding with the time that a replay saves if each op takes a fraction of its time, on all ranks.

    ops: (origin, what it takes, the fraction).
    """
    g = s.graph
    n = len(x.iterations)
    names: dict[str, float] = {}
    tasks = np.zeros(len(g), dtype=bool)
    part = np.ones(len(g))
    for o, _, fraction in ops:
        mine = np.isin(g.event, x.events[o]) & (g.event >= 0)
        tasks |= mine
        part[mine] = fraction
        names.update({g.task_name(i): fraction for i in np.flatnonzero(mine).tolist()})
    if len(g.ranks) > 1:
        # Other ranks run the same ops; their kernels have the same names.
        named = np.array([names.get(name, -1.0) for name in g.names])
        others = (g.rank != x.rank) & (named[g.name] >= 0) & (g.kind != COLLECTIVE)
        part[others] = named[g.name][others]
    cause = sum(a.busy_ns * (1 - fraction) for _, a, fraction in ops) / n
    first = np.flatnonzero(tasks)
    longest = first[np.argsort(-g.duration_ns[first])[:2]].tolist()
    return Finding(
        kind=kind,
        title=title,
        detail=detail,
        cost_ns=s.saved(replace(g, duration_ns=g.duration_ns * part), cause),
        measured_ns=sum(a.busy_ns for _, a, _ in ops) / n,
        evidence=s.tasks(longest),
    )


def _best(found: list[Finding]) -> list[Finding]:
    return sorted(found, key=lambda f: (-f.cost_ns, -f.measured_ns))[:_MOST]
