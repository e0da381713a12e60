"""Fits a Machine to samples: smooths tables within their spread, fits links, and rejects implausible measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pase.calibrate.suite import SMALLEST_EXTENT
from pase.calibrate.types import (
    COLLECTIVE_OPS,
    CONV_OPS,
    FORMS,
    LIGHT_BYTES,
    Level,
    Sample,
    Task,
)
from pase.errors import PaseError
from pase.machine import CollectiveCurve, Curve, Device, Host, LinkLevel, Machine, MatmulTable
from pase.machine.tables import matmul_flops_per_s

__all__ = ["Ceilings", "Fitted", "Refused", "fit", "fit_line", "smoothed"]

_XLA_TILE = (8, 128)
_FILLED_AT_MOST = 0.25
_SLACK = 0.15
_USUAL_SPREAD = 0.5
_FLAT = 1e-9
_LEAST_LIGHT = 0.01
_FASTEST_CONV = 8.0
_SLOWEST_LAUNCH_S = 0.1
_TOO_FAST = 10.0
_SMALL_PRODUCT_SLACK = 1.0
"""The largest relative change by smoothing that a matmul may need. A library chooses special kernels for thin shapes,
so a larger product may really take down to half the time of a thin one. More than that is a measurement error."""


class Refused(PaseError):
    """The measurements are implausible. Each problem names a measurement and says what to do.

    doubtful: keys of the samples to measure again, which may resolve the problems.
    """

    def __init__(self, problems: Sequence[str], doubtful: Sequence[str]) -> None:
        super().__init__("the measurements make no sense:\n  " + "\n  ".join(problems))
        self.doubtful = tuple(dict.fromkeys(doubtful))


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Upper limits of one device's rates. Measurements above them are rejected. source: where the limits come from."""

    flops_per_s: float = 1e17
    memory_bytes_per_s: float = 1e14
    source: str = "no device is known to come near"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The fitted machine, and a report on the fit.

    smoothed: table -> largest relative change of a point by smoothing.
    checks: witness key -> predicted / measured time.
    notes: remarks for the user.
    """

    machine: Machine
    smoothed: Mapping[str, float] = field(default_factory=dict)
    checks: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()


def smoothed(seconds: np.ndarray) -> tuple[np.ndarray, float, int]:
    """Smooths a measured table, so that more work never takes less time.

    Returns (times that do not decrease along any axis, the largest relative change, its flat index).

    The result is the geometric mean of the smallest non-decreasing table above the measured one and the largest one
    below it. So a decrease by x between two points changes each by about x/2. A non-decreasing table is unchanged.

    >>> smoothed(np.array([1.0, 4.0, 1.0, 8.0]))
    (array([1., 2., 2., 8.]), 1.0, 1)
    """
    above, below = seconds.copy(), seconds.copy()
    for axis in range(seconds.ndim):
        above = np.maximum.accumulate(above, axis=axis)
        below = np.flip(np.minimum.accumulate(np.flip(below, axis), axis=axis), axis)
    best = np.sqrt(above * below)
    change = np.maximum(best / seconds, seconds / best) - 1.0
    at = int(change.argmax())
    return best, float(change.flat[at]), at


def fit_line(nbytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fits seconds = alpha + beta·bytes by least squares of the relative error, which gives small sizes equal weight.

    Returns (alpha, beta).
    """
    n, t = np.asarray(nbytes, float), np.asarray(seconds, float)
    rows = np.stack([1 / t, n / t], axis=1)
    scale = np.abs(rows).max(axis=0)
    alpha, beta = np.linalg.lstsq(rows / scale, np.ones(len(t)), rcond=None)[0] / scale
    return float(alpha), float(beta)


class _Fitting:
    """The samples with their tasks, and the problems found so far."""

    def __init__(self, tasks: Sequence[Task], samples: Mapping[str, Sample], max_spread: float) -> None:
        self.found = [(t, samples[t.key]) for t in tasks if t.key in samples]
        self.max_spread = max_spread
        # Noise differs from one measurement to the next. Who accepts more than usual within one accepts it between two.
        self.accepted = max_spread if max_spread > _USUAL_SPREAD else 0.0
        self.problems: list[str] = []
        self.doubtful: list[str] = []
        self.smoothed: dict[str, float] = {}
        self.notes: list[str] = []
        for t, s in self.found:
            if not (math.isfinite(s.seconds) and s.seconds > 0):
                self.problems.append(f"{t.key}: {s.seconds!r} s is not a valid time; measure again (--fresh)")
            elif s.spread > max_spread and t.op != "dispatch" and not t.witness:
                self.problems.append(
                    f"{t.key}: the spread is {s.spread:.0%} of the median, over {max_spread:.0%}; stop other programs "
                    f"and run again (only doubtful samples are measured again), or raise --max-spread"
                )
                self.doubtful.append(t.key)

    def of(self, *ops: str, dtype: str | None = None) -> list[tuple[Task, Sample]]:
        return [
            (t, s)
            for t, s in self.found
            if t.op in ops and not t.witness and dtype in (None, t.dtype) and s.seconds > 0
        ]

    def curve(self, what: str, found: Sequence[tuple[Task, Sample]], each: int | None) -> Curve | None:
        """Returns a non-decreasing curve through the mean of each size's samples; None if there are too few sizes.

        each: the number of samples that a size must have; None accepts any number.
        """
        by_size: dict[float, list[Sample]] = {}
        for task, sample in found:
            by_size.setdefault(float(task.nbytes), []).append(sample)
        points = {n: _mean(s) for n, s in by_size.items() if each is None or len(s) == each}
        sizes = sorted(points)
        if len(sizes) < 2:
            self.problems.append(
                f"{what}: {len(sizes)} size was measured, but a curve needs two; raise --budget and run again"
            )
            return None
        t = np.array([points[n][0] for n in sizes])
        s = np.array([points[n][1] for n in sizes])
        best, change, at = smoothed(t)
        self.smoothed[what] = change
        if change > max(2 * s[at], _SLACK, self.accepted):
            self.problems.append(
                f"{what}: not monotone beyond its spread at {sizes[at]:g} bytes ({t[at]:.3g} s measured, "
                f"{best[at]:.3g} s would be monotone, spread {s[at]:.0%}); run again on a quiet machine with --fresh"
            )
            off = np.abs(np.log(best / t)) > math.log1p(_SLACK)
            self.doubtful += [x.key for n, o in zip(sizes, off, strict=True) if o for x in by_size[n]]
        return Curve(nbytes=tuple(map(float, sizes)), seconds=tuple(map(float, best)))


def _mean(samples: Sequence[Sample]) -> tuple[float, float]:
    return float(np.mean([s.seconds for s in samples])), max(s.spread for s in samples)


def _matmul_table(work: _Fitting, dtype: str) -> MatmulTable | None:
    """Returns the matmul table on the finest grid that has few missing points; times are means over the three forms."""
    forms: dict[tuple[int, int, int], list[Sample]] = {}
    for t, s in work.of(*FORMS, dtype=dtype):
        if t.extents[0] == 1:
            _, m, n, k = t.extents
            forms.setdefault((m, n, k), []).append(s)
    points = {p: _mean(s) for p, s in forms.items() if len(s) == len(FORMS)}
    if not points:
        return None
    largest = max(max(p) for p in points)
    known = sorted({e for p in points for e in p})
    grids = []
    for step in (2, 4, 16, 1 << 30):
        grid = [e for e in known if e in (SMALLEST_EXTENT, largest) or _is_power_of_step(e, step)]
        cube = [(m, n, k) for m in grid for n in grid for k in grid]
        missing = [p for p in cube if p not in points]
        grids.append((grid, cube, missing))
    grid, cube, missing = next(
        (g for g in grids if len(g[2]) <= _FILLED_AT_MOST * len(g[1])), min(grids, key=lambda g: len(g[2]))
    )
    if len(missing) > _FILLED_AT_MOST * len(cube):
        work.problems.append(
            f"matmul {dtype}: {len(missing)} of {len(cube)} points of even the coarsest grid are missing; raise "
            f"--budget and run again"
        )
        return None
    if missing:
        work.notes.append(
            f"matmul {dtype}: {len(missing)} of {len(cube)} points were too slow to measure; they are assumed to run "
            f"at the rate of their nearest neighbour"
        )
    logs = {p: np.log(p) for p in points}
    seconds, spreads = [], []
    for p in cube:
        q = p if p in points else min(points, key=lambda o: float(np.abs(logs[o] - np.log(p)).sum()))
        seconds.append(points[q][0] * math.prod(p) / math.prod(q))
        spreads.append(points[q][1])
    shape = (len(grid),) * 3
    best, change, at = smoothed(np.reshape(seconds, shape))
    work.smoothed[f"matmul {dtype}"] = change
    if change > max(2 * spreads[at], _SMALL_PRODUCT_SLACK, work.accepted):
        work.problems.append(
            f"matmul {dtype}: not monotone at m, n, k = {cube[at]}: {seconds[at]:.3g} s measured, but "
            f"{best.ravel()[at]:.3g} s would be monotone; run again on a quiet machine with --fresh"
        )
        off = np.abs(np.log(best.ravel() / np.array(seconds))) > math.log1p(_SMALL_PRODUCT_SLACK / 2)
        work.doubtful += [s.key for p, o in zip(cube, off, strict=True) if o and p in forms for s in forms[p]]
    rates = 2 * np.prod(np.array(cube, float), axis=1) / best.ravel()
    table = MatmulTable(
        dtype=dtype, m=tuple(grid), n=tuple(grid), k=tuple(grid), flops_per_s=tuple(map(float, rates))
    )
    top = rates[-1]
    raw = 2 * np.prod(np.array(cube, float), axis=1) / np.array(seconds)
    if raw.max() > max(_TOO_FAST, work.accepted) * top:
        p = cube[int(raw.argmax())]
        work.problems.append(
            f"matmul {dtype}: {raw.max():.3g} FLOP/s at m, n, k = {p}, over {_TOO_FAST:g} times the largest product's "
            f"{top:.3g}: the timer is wrong or the compiler removed the work; please report it"
        )
    return table


def _is_power_of_step(extent: int, step: int) -> bool:
    """Whether an extent is SMALLEST_EXTENT times a power of the step."""
    ratio = extent // SMALLEST_EXTENT
    while ratio > 1 and ratio % step == 0:
        ratio //= step
    return ratio == 1


def _memory_curve(work: _Fitting) -> Curve | None:
    return work.curve("memory-bound ops", work.of("elementwise", "reduction"), each=2)


def _light_efficiency(work: _Fitting, bytes_per_s: float) -> float | None:
    """Returns the fraction of the memory bandwidth that light ops between matrix products reach, at most 1."""
    light = [s.seconds for _, s in work.of("light")]
    if not light:
        return None
    return min(1.0, max(LIGHT_BYTES / bytes_per_s / light[0], _LEAST_LIGHT))


def _window_efficiency(work: _Fitting, vector_flops: float) -> float | None:
    """Returns the fraction of the vector rate that sliding windows reach in forward and backward, at most 1."""
    rates = [t.work / s.seconds / vector_flops for t, s in work.of("window")]
    return min(1.0, float(np.exp(np.mean(np.log(rates))))) if rates else None


def _host(work: _Fitting) -> Host | None:
    """Returns the host's time per launch, or None unless both kinds of launch were measured."""
    program, op = ([s for _, s in work.of(f"host.{kind}")] for kind in ("program", "op"))
    if not program or not op:
        work.notes.append(
            "the host's launches were not measured: step times of eager programs use default launch times"
        )
        return None
    for key, s in (("a program", program[0]), ("an op", op[0])):
        if s.seconds > _SLOWEST_LAUNCH_S:
            work.problems.append(
                f"the host's launch of {key}: {s.seconds:.3g} s, over the limit of {_SLOWEST_LAUNCH_S:g} s; run again "
                f"on a quiet machine with --fresh"
            )
            work.doubtful.append(s.key)
    return Host(program_s=program[0].seconds, op_s=op[0].seconds)


def _collectives(work: _Fitting, joined: bool) -> tuple[CollectiveCurve, ...]:
    """Returns the curves of all collectives.

    joined: reduce-scatters run as all-reduces, so both get one curve through the samples of both.
    """
    found: dict[tuple[str, tuple[int, ...]], list[tuple[Task, Sample]]] = {}
    for t, s in work.of(*COLLECTIVE_OPS):
        found.setdefault((t.op, t.ways), []).append((t, s))
    out = []
    for (op, ways), own in found.items():
        twin = {"all_reduce": "reduce_scatter", "reduce_scatter": "all_reduce"}.get(op) if joined else None
        curve = work.curve(f"{op} over {list(ways)}", [*own, *found.get((twin or "", ways), [])], each=None)
        if curve is not None:
            out.append(CollectiveCurve(kind=op, ways=ways, curve=curve))  # type: ignore[arg-type]
    return tuple(sorted(out, key=lambda c: (c.kind, c.ways)))


def _links(work: _Fitting, levels: tuple[Level, ...], curves: Sequence[CollectiveCurve]) -> list[LinkLevel]:
    """Returns each level's latency and bandwidth, from its all-gather under the assumption of a ring."""
    out = []
    for i, level in enumerate(levels):
        ways = tuple(l.ways if j == i else 1 for j, l in enumerate(levels))
        curve = next((c.curve for c in curves if c.kind == "all_gather" and c.ways == ways), None)
        if curve is None:
            continue
        alpha, beta = fit_line(curve.nbytes, curve.seconds)
        largest, slowest = curve.nbytes[-1], curve.seconds[-1]
        # The times do not decrease, so the slope is at least zero but for rounding.
        if beta * largest < _FLAT * slowest:
            alpha, beta = 0.0, slowest / largest
            work.notes.append(
                f"link level '{level.name}': its all-gather takes as long for {largest:g} bytes as for "
                f"{curve.nbytes[0]:g}, so its bandwidth is a lower bound; raise --budget to measure larger sizes"
            )
        if alpha < -max(0.2, work.accepted) * curve.seconds[0]:
            work.problems.append(
                f"link level '{level.name}': its all-gather gives a latency of {alpha:.3g} s, but a latency cannot be "
                f"negative; run again on a quiet machine with --fresh"
            )
            work.doubtful += [s.key for t, s in work.of("all_gather") if t.ways == ways]
            continue
        w = level.ways
        out.append(
            LinkLevel(
                name=level.name,
                ways=0 if i == len(levels) - 1 else w,
                latency_s=max(alpha, 0.0) / (w - 1),
                bandwidth_bytes_per_s=(w - 1) / w / beta,
                topology=level.topology,
            )
        )
    return out


def _conv_efficiency(work: _Fitting, table: MatmulTable | None, on_cpu: bool) -> float | None:
    """Returns the rate of convolutions relative to the table's matmuls of the same extents.

    It is at most 1, except on a CPU, where direct convolutions may be faster than thin matmuls.
    """
    if table is None:
        return None
    ratios = []
    for t, s in work.of(*CONV_OPS, dtype=table.dtype):
        images, side, c_in, c_out, window = t.extents
        m, n, k = images * side * side, c_out, c_in * window * window
        if t.op == "conv.input":
            n, k = c_in, c_out * window * window
        if t.op == "conv.filter":
            m, n, k = c_in * window * window, c_out, images * side * side
        rate = float(matmul_flops_per_s(table, *(np.array([float(x)]) for x in (m, n, k)))[0])
        ratios.append(t.work / rate / s.seconds)
    return min(_FASTEST_CONV if on_cpu else 1.0, float(np.exp(np.mean(np.log(ratios))))) if ratios else None


def _checks(work: _Fitting, tables: Sequence[MatmulTable]) -> dict[str, float]:
    """Returns predicted / measured time of each witness; the measured time is the mean over its three forms."""
    sums: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    for t, s in work.found:
        if t.witness:
            sums.setdefault((t.dtype, t.extents), []).append(s.seconds)
    out = {}
    for (dtype, extents), seconds in sums.items():
        table = next((x for x in tables if x.dtype == dtype), None)
        if table is not None and len(seconds) == len(FORMS):
            batch, m, n, k = map(float, extents)
            rate = matmul_flops_per_s(table, np.array([m * batch]), np.array([n]), np.array([k]))[0]
            predicted = 2 * batch * m * n * k / rate
            out[f"matmul {dtype} {'x'.join(map(str, extents))}"] = float(predicted / np.mean(seconds))
    return out


@dataclass(frozen=True, kw_only=True)
class Believed:
    """Which samples are believed.

    ceilings: rates above these are rejected. max_spread: so is a sample whose spread exceeds this fraction of its
    median.
    """

    ceilings: Ceilings = Ceilings()
    max_spread: float = _USUAL_SPREAD


def fit(
    tasks: Sequence[Task],
    samples: Mapping[str, Sample],
    *,
    name: str,
    device_name: str,
    memory_bytes: int,
    levels: tuple[Level, ...],
    provenance: Mapping[str, str],
    believed: Believed = Believed(),
) -> Fitted:
    """Fits a machine to the samples.

    tasks: the tasks of the suite. samples: the measured samples by task key.
    name, device_name, memory_bytes, levels, provenance: fields of the machine file.
    believed: which samples are rejected.

    Raises Refused with all problems found.
    """
    work = _Fitting(tasks, samples, believed.max_spread)
    dtypes = list(dict.fromkeys(t.dtype for t, _ in work.of(*FORMS)))
    tables = [t for t in (_matmul_table(work, d) for d in dtypes) if t is not None]
    memory = _memory_curve(work)
    vector = [t.work * s for t, s in ((t, 1 / s.seconds) for t, s in work.of("vector"))]
    launch = [s.seconds for _, s in work.of("launch")]
    on_cpu = provenance.get("platform") == "cpu"
    curves = _collectives(work, joined=on_cpu)
    links = _links(work, levels, curves)
    host = _host(work)
    _check_physics(work, tables, memory, curves, believed.ceilings)
    if work.problems:
        raise Refused(work.problems, work.doubtful)
    assert memory is not None
    rate = memory.nbytes[-1] / memory.seconds[-1]
    efficiency = _efficiency(work, tables[0], rate, vector[0] if vector else None, on_cpu)
    if not links:
        # A single device has no links, but a machine file must have a level. Its memory stands in for one.
        links = [LinkLevel(name="memory", ways=0, latency_s=launch[0], bandwidth_bytes_per_s=rate)]
        work.notes.append(
            "there is one device, so no link was measured; the only level is the device's memory"
        )
    habits, sources = _habits(provenance, host)
    sources = _sources(provenance, bool(curves)) | sources
    sources["levels.ways"] = "the layout of the devices when measured; the last level: any number"
    machine = Machine(
        name=name,
        title=f"{device_name}, measured",
        device=Device(
            name=device_name,
            peak_flops={t.dtype: max(t.flops_per_s) for t in tables},
            memory_bytes=memory_bytes,
            memory_bandwidth_bytes_per_s=rate,
            efficiency=efficiency,
            vector_flops=vector[0] if vector else None,
            launch_s=launch[0] if launch else 0.0,
            matmul_tables=tuple(tables),
            memory_curve=memory,
            memory_tile=_XLA_TILE if provenance.get("platform") == "tpu" else (),
        ),
        levels=tuple(links),
        collectives=curves,
        **habits,
        sources=sources,
        provenance=dict(provenance),
    )
    return Fitted(
        machine=machine, smoothed=work.smoothed, checks=_checks(work, tables), notes=tuple(work.notes)
    )


def _check_physics(
    work: _Fitting,
    tables: Sequence[MatmulTable],
    memory: Curve | None,
    curves: Sequence[CollectiveCurve],
    ceilings: Ceilings,
) -> None:
    """Adds a problem for each missing table, and for each rate above the ceilings."""
    if not tables:
        work.problems.append(
            "there is no matmul table, because too few matmuls were measured; raise --budget and run again"
        )
    for table in tables:
        top = max(table.flops_per_s)
        if top > ceilings.flops_per_s:
            work.problems.append(
                f"matmul {table.dtype}: {top:.3g} FLOP/s, but {ceilings.source} gives at most "
                f"{ceilings.flops_per_s:.3g}: not physical; please report it"
            )
    if memory is not None:
        rate = memory.nbytes[-1] / memory.seconds[-1]
        if rate > ceilings.memory_bytes_per_s:
            work.problems.append(
                f"memory-bound ops: {rate:.3g} bytes/s at {memory.nbytes[-1]:g} bytes, but {ceilings.source} gives at "
                f"most {ceilings.memory_bytes_per_s:.3g}: not physical; please report it"
            )
    for c in curves:
        rate = c.curve.nbytes[-1] / c.curve.seconds[-1]
        if rate > ceilings.memory_bytes_per_s:
            work.problems.append(
                f"{c.kind} over {list(c.ways)}: {rate:.3g} bytes/s, above the device's memory bandwidth: not physical"
            )


def _efficiency(
    work: _Fitting, table: MatmulTable, rate: float, vector_flops: float | None, on_cpu: bool
) -> dict[str, float]:
    """Returns the fractions of the peak rates that other work reaches. rate: memory bandwidth in bytes/s."""
    conv = _conv_efficiency(work, table, on_cpu)
    if conv is None:
        work.notes.append("convolutions were not measured: they are priced as matmuls of the same extents")
    # Other compilers fuse light ops into kernels; on a CPU, each one reads and writes memory separately.
    light = _light_efficiency(work, rate) if on_cpu else None
    window = _window_efficiency(work, vector_flops) if vector_flops else None
    found = {"conv": conv, "memory": light, "window": window}
    return {name: part for name, part in found.items() if part is not None}


def _measured(provenance: Mapping[str, str]) -> str:
    return f"measured: pase calibrate, {provenance.get('date', 'undated')}"


def _sources(provenance: Mapping[str, str], collectives: bool) -> dict[str, str]:
    """Returns the sources of the numbers that every machine has."""
    measured = _measured(provenance)
    sources = {"device": measured, "levels": f"{measured}; from all-gather, assumed to be a ring"}
    sources["device.memory_bytes"] = provenance.get("memory", "as the device reports it")
    if collectives:
        sources["collectives"] = measured
    return sources


def _habits(provenance: Mapping[str, str], host: Host | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns (machine fields that describe the platform's compiler and the host, the sources of these fields)."""
    habits: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if provenance.get("platform") == "cpu":
        habits |= {"bucket_bytes": 0.0, "sums_readers": False}
        sources["bucket_bytes"] = "XLA's CPU pipeline combines no collectives, as seen in compiled programs"
    if provenance.get("platform") == "tpu":
        habits["fuses_products"] = True
        sources["device.memory_tile"] = (
            "XLA (openxla.org/xla/tiled_layout), as seen in programs compiled for TPU"
        )
    if host is not None:
        habits["host"] = host
        launches = f"launches from {provenance.get('framework', 'JAX')}"
        sources["host"] = f"{_measured(provenance)}; while the host runs ahead of its devices, {launches}"
    return habits, sources
