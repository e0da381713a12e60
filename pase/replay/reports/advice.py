"""Advice on single ops: what to change in the model, and what a replay with those ops as fast as such ops are saves.

The time that an op would take is that of the run's own ops of the kind, where it has them, or else follows from the
card's rates in its machine file. Advice overlaps, so gains do not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pase.machine.types import Device
from pase.replay.kernels import work_of
from pase.replay.measurement.origins import Origin
from pase.replay.measurement.spending import Amount, Spending, peak_flops
from pase.replay.reports.findings import Finding, Scene
from pase.replay.reports.spent import aligned_to, misaligned, shape_text
from pase.replay.types import COLLECTIVE

__all__ = ["advice"]

_ALIKE = 0.1
"""Products with at least this fraction of the FLOPs are compared with one: smaller ones do not fill the card."""
_FULL = 0.5
"""At least this fraction of the peak is what large aligned products reach; others say nothing of what is possible."""
_MOST = 3


def advice(s: Scene, spent: Sequence[Spending]) -> list[Finding]:
    """Returns the findings on single ops of the slowest rank, each kind's most expensive ones."""
    if not spent:
        return []
    slowest = max(spent, key=lambda x: x.total_ns)
    return [*_pad(s, slowest), *_lower_precision(s, slowest), *_layout(s, slowest)]


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
            more *= aligned_to(d) / d
        then = more * a.flops / rate[0] * 1e9
        if odd and then < a.busy_ns:
            by_dim.setdefault(odd[-1], []).append((o, a, then / a.busy_ns))
    out = []
    for dim, ops in by_dim.items():
        largest = max((o for o, _, _ in ops), key=lambda o: o.flops)
        rate = _aligned_rate(x, largest)
        to = aligned_to(dim)
        out.append(
            _changed(
                s,
                x,
                "pad",
                f"Pad {dim} to {to}: {len(ops)} product(s) read or write rows that are not aligned",
                f"Rows of {dim} elements are no multiple of 16 bytes, which matrix units want. "
                + "; ".join(f"{o.name} ({o.where}) {shape_text(o)}" for o, _, _ in ops[:_MOST])
                + f". Aligned ones reach {rate[0] / 1e12 if rate else 0.0:.0f} TFLOP/s ({rate[1] if rate else ''}).",
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
    return peak * x.device.reached("matmul", _file_dtype(o)), f"by the machine file of {x.device.name}"


def _file_dtype(o: Origin) -> str:
    return {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}.get(o.precision, "float32")


def _lower_precision(s: Scene, x: Spending) -> list[Finding]:
    """Finds products in float32, which the card runs faster in bfloat16."""
    ops = []
    for o, a in x.ops.items():
        gain = _gain(x.device, o)
        if o.precision in ("f32", "tf32", "fp32") and o.kind.startswith("product") and a.calls and gain > 1:
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
        and not o.name.startswith("copy of")
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
