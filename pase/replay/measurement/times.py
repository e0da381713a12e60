"""Estimates the durations of tasks and the lags between them, as medians over iterations of the same program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pase.errors import PaseError
from pase.replay.graph import EDGE
from pase.replay.measurement.tasks import RankProgram

__all__ = ["UNSEEN_NS", "Edges", "RankTimes", "rank_times"]

_INTO_OP = (EDGE["launch"], EDGE["stream"], EDGE["wait"])
_DEFAULT_LAG_NS = {EDGE["launch"]: 8_000.0, EDGE["stream"]: 1_000.0, EDGE["wait"]: 4_000.0}
"""Typical values in V100 and A100 traces; used only if a trace has no instance of the kind."""
_PLAIN_NS = 50_000.0
"""A launch, a stream or an event suffices to explain delays up to this one."""
UNSEEN_NS = 1_000_000.0
"""Longer delays are waits for something that is not in the trace; this holds between threads, too."""
_ALIKE = 0.9
"""Iterations that share a smaller fraction of their tasks run different programs, so their tasks are not paired."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Edges:
    """Edges of a template as columns. carried: whether the source belongs to the previous iteration."""

    src: np.ndarray
    dst: np.ndarray
    kind: np.ndarray
    carried: np.ndarray

    def only(self, keep: np.ndarray) -> Edges:
        return Edges(src=self.src[keep], dst=self.dst[keep], kind=self.kind[keep], carried=self.carried[keep])


@dataclass(frozen=True, kw_only=True, eq=False)
class RankTimes:
    """The estimated iteration of a rank: the tasks of ``template`` with durations, and its edges with lags, in ns."""

    template: RankProgram
    duration: np.ndarray
    own: np.ndarray
    """Duration of each task in each iteration, float64 [iterations, tasks]; NaN if an iteration lacks the task."""
    numbers: tuple[int, ...]
    """The numbers of these iterations: those of the chosen ones that run this program."""
    edges: Edges
    lag: np.ndarray
    own_lag: np.ndarray
    """The delay of each edge in each iteration in which the edge determines the task's start, else ``lag``; float64
    [iterations, edges]."""
    plain_lag: np.ndarray
    """The same, without delays that some other iteration shows to be unnecessary; their cause is not in the trace."""
    release: np.ndarray
    free: dict[str, float]


def rank_times(
    all_programs: dict[tuple[int, int], RankProgram],
    wait_ns: dict[int, float],
    measured_ns: dict[tuple[int, int], float],
    rank: int,
    chosen: Sequence[int],
) -> RankTimes:
    """Returns the times of one rank from the ``chosen`` iterations; see ``model.estimate``."""
    programs = [all_programs[(rank, i)] for i in chosen if (rank, i) in all_programs]
    if not programs:
        raise PaseError(f"it has none of the iterations {list(chosen)}", where=f"rank {rank}")
    template, programs = _template(programs, measured_ns)
    row = {k: i for i, k in enumerate(template.keys)}
    n = len(row)
    edges = _edges(template, programs, row)
    start, end, own, before = (np.full((len(programs), n), np.nan) for _ in range(4))
    apart = np.zeros((len(programs), len(edges.src)), dtype=bool)
    for k, p in enumerate(programs):
        to, of = _rows(p, row)
        s, e = np.array(p.start, dtype=float), np.array(p.end, dtype=float)
        work = e - s
        for call, done in p.blocked.items():
            work[call] = e[call] - max(done, s[call])
        for i, event in enumerate(p.event):
            if event in wait_ns:
                work[i] -= wait_ns[event]
        start[k, to], end[k, to], own[k, to] = s[of], e[of], work[of]
        apart[k] = _not_in(p, row, n, edges)
        # This iteration begins when the previous one ends. That end is known even if it is not predicted.
        earlier = all_programs.get((rank, p.iteration - 1))
        if earlier is not None and _alike(_ops(earlier), _ops(template)):
            to, of = _rows(earlier, row)
            before[k, to] = np.array(earlier.end, dtype=float)[of] + (earlier.zero_ns - p.zero_ns)
    delay = start[:, edges.dst] - np.where(edges.carried, before[:, edges.src], end[:, edges.src])
    late = end[:, edges.dst] - np.where(edges.carried, before[:, edges.src], end[:, edges.src])
    keep = ~_contradicted(edges, delay, late)
    edges, delay, apart = edges.only(keep), delay[:, keep], apart[:, keep]
    delay = np.where(apart, np.nan, delay)
    lag, happened, sample = _lags(template, start, delay, edges)
    duration = _match_sums(template, np.maximum(_median(own), 0.0), own)
    has_pred = np.zeros(n, dtype=bool)
    has_pred[edges.dst[~edges.carried]] = True
    release = np.where(has_pred, -np.inf, np.maximum(_median(start), 0.0))
    streams = {d for d, k in template.device if k == "stream"}
    return RankTimes(
        template=template,
        duration=duration,
        own=own,
        numbers=tuple(p.iteration for p in programs),
        edges=edges,
        lag=lag,
        own_lag=np.where(np.isfinite(happened), happened, lag),
        plain_lag=np.where(np.isfinite(sample), sample, lag),
        release=release,
        free={d: float(np.median([p.busy_until.get(d, 0) for p in programs])) for d in streams},
    )


def _template(
    programs: list[RankProgram], measured_ns: dict[tuple[int, int], float]
) -> tuple[RankProgram, list[RankProgram]]:
    """Returns the program with the most common set of tasks and the median length, and all that run the same program.

    A task is identified by its position among tasks of its name. In an iteration with different ops, the same position
    is a different task, so such iterations are excluded.
    """
    sets = [frozenset(p.keys) for p in programs]
    common = Counter(sets).most_common(1)[0][0]
    alike = [p for p, s in zip(programs, sets, strict=True) if s == common]
    # Prefer iterations whose previous iteration is in the trace: only these show what they wait for in it.
    alike = [p for p in alike if p.carried] or alike
    alike.sort(key=lambda p: measured_ns[(p.rank, p.iteration)])
    template = alike[(len(alike) - 1) // 2]
    return template, [p for p in programs if _alike(_ops(p), _ops(template))]


def _ops(p: RankProgram) -> frozenset[tuple[object, ...]]:
    return frozenset(k for k in p.keys if k[0] == "op") or frozenset(p.keys)


def _alike(a: frozenset[tuple[object, ...]], b: frozenset[tuple[object, ...]]) -> bool:
    return len(a & b) >= _ALIKE * max(len(a), len(b))


def _rows(p: RankProgram, row: dict[tuple[object, ...], int]) -> np.ndarray:
    """Returns two rows: the template's tasks that ``p`` has, and the corresponding tasks of ``p``."""
    spot = [(row[key], i) for i, key in enumerate(p.keys) if key in row]
    return np.array(spot, dtype=np.int64).reshape(-1, 2).T


def _edges(template: RankProgram, programs: list[RankProgram], row: dict[tuple[object, ...], int]) -> Edges:
    """Returns the template's edges, and waits seen in other iterations only.

    A wait is not visible in an iteration in which the awaited task had already ended. If the template began the two
    tasks in the other order, neither waits for the other: short ops of a host's threads take turns.
    """
    found = dict.fromkeys((a, b, k, 0) for (a, b), k in template.edges.items())
    found |= dict.fromkeys((row[a], b, k, 1) for (a, b), k in template.carried.items() if a in row)
    pairs = set(template.edges)
    for p in programs:
        place = [row.get(key, -1) for key in p.keys]
        for (a, b), k in p.edges.items():
            x, y = place[a], place[b]
            in_order = x >= 0 and y >= 0 and (template.start[x], x) < (template.start[y], y)
            if k == EDGE["wait"] and in_order and (x, y) not in pairs:
                found[x, y, k, 0] = None
        for (key, b), k in p.carried.items():
            if key in row and place[b] >= 0:
                found[row[key], place[b], k, 1] = None
    every = np.array(list(found), dtype=np.int64).reshape(-1, 4)
    return Edges(
        src=every[:, 0], dst=every[:, 1], kind=every[:, 2].astype(np.uint8), carried=every[:, 3].astype(bool)
    )


def _not_in(p: RankProgram, row: dict[tuple[object, ...], int], n: int, edges: Edges) -> np.ndarray:
    """Returns a mask of launch and stream edges that ``p`` lacks although it has both tasks.

    In ``p``, these tasks are other ops of the same name.
    """
    place = np.full(len(p.keys) + 1, -1, dtype=np.int64)
    to, of = _rows(p, row)
    place[of] = to
    mine = np.array(list(p.edges), dtype=np.int64).reshape(-1, 2)
    known = (place[mine] >= 0).all(axis=1)
    codes = place[mine[known, 0]] * n + place[mine[known, 1]]
    bound = ~edges.carried & np.isin(edges.kind, (EDGE["launch"], EDGE["stream"]))
    return bound & ~np.isin(edges.src * n + edges.dst, codes)


def _median(x: np.ndarray) -> np.ndarray:
    """Returns the median of each column over its finite entries, of which every column must have one."""
    if len(x) == 1:
        return x[0]
    ordered = np.sort(x, axis=0)
    count = np.isfinite(x).sum(axis=0)
    at = np.arange(x.shape[1])
    return 0.5 * (ordered[(count - 1) // 2, at] + ordered[count // 2, at])


def _match_sums(p: RankProgram, duration: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Scales the work of each thread and stream so that its sum equals the median of the measured sums.

    Noise is skewed, so a sum of medians is below the median of sums, by several percent on a launch-bound thread.
    """
    whole = np.isfinite(own).all(axis=0)
    device = _numbered(p.device)
    out = duration.copy()
    for d in np.unique(device):
        mine = whole & (device == d)
        total = float(duration[mine].sum())
        if total > 0 and len(own) > 1:
            target = float(np.median(np.maximum(own[:, mine], 0.0).sum(axis=1)))
            out[device == d] *= min(max(target / total, 0.8), 1.25)
    return out


def _numbered(things: list[tuple[str, str]]) -> np.ndarray:
    """Returns a number for each thing; equal things have equal numbers."""
    numbers: dict[tuple[str, str], int] = {}
    return np.array([numbers.setdefault(x, len(numbers)) for x in things])


def _contradicted(edges: Edges, delay: np.ndarray, late: np.ndarray) -> np.ndarray:
    """Returns a mask of inferred waits that any measured iteration contradicts.

    delay, late: the time from the end of the source to the start and to the end of the destination, [iterations, edges]
    in ns.
    """
    inferred = np.isin(edges.kind, (EDGE["wait"], EDGE["depth"], EDGE["sync"]))
    inferred |= edges.carried & (edges.kind == EDGE["handoff"])
    seen = np.where(np.isin(edges.kind, (EDGE["wait"], EDGE["handoff"])), delay, late)
    return inferred & np.nan_to_num(seen < -1000.0, nan=False).any(axis=0)


def _lags(
    p: RankProgram, start: np.ndarray, delay: np.ndarray, edges: Edges
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the lag of each edge, the binding delays, and the samples among them.

    delay: [iterations, edges] in ns; NaN if an iteration lacks the edge. The binding delays and the samples are arrays
    of the same shape; NaN if another edge was binding.

    An edge is binding if it determines the start of its op. Only binding edges are samples. The lag of a launch edge is
    the time from the begin of the call to the start of the op on an idle stream. The lag of a stream edge is the gap
    between two consecutive ops. The lag of a wait edge is the cost of an event. An edge that is never binding gets the
    typical lag of its kind, but at most the shortest delay that was measured. If an iteration lacks a predecessor of an
    op (for example because it ran on another stream), the binding edge is unknown, and the iteration is not a sample.
    """
    dst, kind = edges.dst, edges.kind
    into = np.isin(kind, _INTO_OP)
    lag = np.zeros(len(dst))
    other = ~into & (kind == EDGE["handoff"])
    if other.any():
        lag[other] = np.maximum(np.nan_to_num(_median(delay[:, other])), 0.0)
    handed = np.where(other, np.maximum(delay, 0.0), np.nan)
    usual = np.where(handed <= np.maximum(3 * lag, UNSEEN_NS), handed, np.nan)
    if not into.any():
        return lag, handed, usual
    stream = _numbered(p.device)[dst]
    typical = np.zeros(len(dst))
    for k in _INTO_OP:
        these = into & (kind == k)
        # A stream without samples uses those of all streams; if there are none, the default.
        overall = _typical(delay, these, into, dst)
        overall = _DEFAULT_LAG_NS[k] if overall is None else overall
        for s in np.unique(stream[these]):
            mine = these & (stream == s)
            own = _typical(delay, mine, into & (stream == s), dst)
            typical[mine] = overall if own is None else own
    # The binding edge of each op and iteration: the one that predicts the latest start.
    predicted = np.where(into & np.isfinite(delay), start[:, dst] - delay + typical, -np.inf)
    bound = np.full((len(start), start.shape[1]), -np.inf)
    for k in range(len(start)):
        np.maximum.at(bound[k], dst, predicted[k])
    lacking = np.zeros(start.shape, dtype=bool)
    for k in range(len(start)):
        np.logical_or.at(lacking[k], dst, into & ~np.isfinite(delay[k]))
    binding = into & ~lacking[:, dst] & (predicted >= bound[:, dst]) & np.isfinite(predicted)
    # If some iteration shows that an edge needs no long delay, its long delays had a cause that is not in the trace.
    happened = np.where(binding, np.maximum(delay, 0.0), np.nan)
    plain = binding & (delay <= np.maximum(3 * typical, _PLAIN_NS))
    binding &= plain | ~plain.any(axis=0)
    sample = np.where(binding, np.maximum(delay, 0.0), np.nan)
    seen = binding.any(axis=0)
    at_most = np.where(np.isfinite(delay), np.maximum(delay, 0.0), np.inf).min(axis=0)
    lag = np.where(into, np.minimum(typical, at_most), lag)
    if seen.any():
        lag[seen] = _median(sample[:, seen])
    return lag, np.where(other, handed, happened), np.where(other, usual, sample)


def _typical(delay: np.ndarray, these: np.ndarray, group: np.ndarray, dst: np.ndarray) -> float | None:
    """Returns the median delay of the edges ``these`` when they were the last to be satisfied; None if they never were.

    Delays of ``UNSEEN_NS`` and more are left out.
    """
    if not these.any():
        return None
    nearest = np.full((len(delay), int(dst.max()) + 1), np.inf)
    for k in range(len(delay)):
        np.minimum.at(nearest[k], dst[group], np.nan_to_num(delay[k, group], nan=np.inf))
    mine = delay[:, these]
    last = np.isfinite(mine) & (mine <= nearest[:, dst[these]])
    values = np.maximum(mine[last & (mine < UNSEEN_NS)], 0.0)
    return float(np.median(values)) if len(values) else None
