"""Common code for XLA traces: module executions as iterations, container ops, overlapping ops, and HLO facts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pase.replay.traces.builder import is_sound
from pase.replay.traces.hlo import HloFacts
from pase.replay.traces.repeats import repeats
from pase.replay.types import BESIDE, COLLECTIVE, OPERATIONS, Group, Lane, Mark, Timeline, on_stream

__all__ = ["Executions", "describe", "untangle"]

_CONTAINER = re.compile(r"^(while|call|conditional|async-start)(\.\d+)*( \(.*\))?$")
"""An op whose name several programs have is followed by its own in brackets (``programs``)."""
_MOST_LANES = 16
_SMALL = 0.01
"""Programs that take less than this share of a device's time (drawing keys, printing the loss) divide no steps."""


class Executions:
    """Collects the executions of modules, by (device, module, run).

    Profilers of GPUs record no runs. There, a step is one repetition of the ops (``repeats``) on the stream of the
    device that is busy longest.
    """

    def __init__(self) -> None:
        self.spans: dict[tuple[int, str, str], list[int]] = {}
        self._symbols: dict[str, int] = {}
        self._held: dict[tuple[int, str, str], int] = defaultdict(int)
        """(device, module, run) → its ops, a bit for each. Programs may share a name, and some profiles number none."""
        self._ops: dict[tuple[int, str], dict[str, list[tuple[int, int, int]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        """(device, module) → stream → (start, end, symbol) of the ops without a run."""

    def add(self, device: int, module: str, run: str, start: int, end: int, stream: str, op: str) -> None:
        """Adds an op, if its times are sound. run: empty if it is not recorded."""
        if not is_sound(start, end - start):
            return
        span = self.spans.setdefault((device, module, run), [start, end, 0])
        span[0], span[1] = min(span[0], start), max(span[1], end)
        span[2] += end - start
        symbol = self._symbols.setdefault(op, len(self._symbols))
        if run:
            self._held[device, module, run] |= 0 if module.endswith(")") else 1 << symbol
        else:
            self._ops[device, module][stream].append((start, end, symbol))

    def main(self, device: int | None = None) -> str:
        """Returns the module that ran longest, of those that ran more than once if any; "" if nothing ran.

        device: the device on which it ran; None for all of them.
        """
        total: dict[str, int] = defaultdict(int)
        runs: dict[str, set[str]] = defaultdict(set)
        for (d, module, run), span in self.spans.items():
            if device in (None, d):
                total[module] += span[2]
                runs[module].add(run)
        return max(total, key=lambda m: (len(runs[m]) > 1, total[m]), default="")

    def marks(self, rank: int) -> list[tuple[int, Mark]]:
        """Returns (device, mark) for every step of each device. The first one is often cut by the profiler.

        A step may execute several programs, and one program several times: gradients and their update, micro-batches,
        the stages of a pipeline. So a step is one repetition of the device's sequence of programs or, if that does not
        repeat, one execution of the device's main program.
        """
        out = []
        for device in sorted({d for d, _, _ in self.spans}):
            for i, (start, end, whole) in enumerate(self._steps(device)):
                mark = Mark(
                    rank=rank, iteration=i, start_ns=start, end_ns=max(end, start + 1), complete=whole
                )
                out.append((device, mark))
        return out

    def _steps(self, device: int) -> list[tuple[int, int, bool]]:
        """Returns (start, end, whether it is complete) of each step of a device."""
        busy: dict[str, int] = defaultdict(int)
        for (d, module, _), span in self.spans.items():
            if d == device:
                busy[module] += span[2]
        long = [m for m, ns in busy.items() if ns >= _SMALL * sum(busy.values())]
        programs: dict[tuple[str, int], int] = {}
        runs = np.array(
            sorted(
                (start, end, programs.setdefault((m, self._held[d, m, run]), len(programs)))
                for (d, m, run), (start, end, _) in self.spans.items()
                if d == device and run and m in long
            ),
            dtype=np.int64,
        ).reshape(-1, 3)
        found = repeats(runs[:, 2], runs[:, 0]) if len(programs) > 1 else None
        if found is not None:
            firsts = list(found.starts)
            ends = np.maximum.reduceat(runs[:, 1], firsts).tolist()
            return list(zip(runs[firsts, 0].tolist(), ends, found.complete, strict=True))
        main = self.main(device)
        executed = [
            (start, end, True)
            for (d, m, run), (start, end, _) in self.spans.items()
            if (d, m) == (device, main) and run
        ]
        if executed:
            return sorted(executed)
        return (len(long) > 1 and self._repeated(device, long)) or self._repeated(device, [main]) or []

    def _repeated(self, device: int, modules: list[str]) -> list[tuple[int, int, bool]]:
        """Returns (start, end, whether it is complete) of each repetition of the modules' ops on a device; of one
        module, all of its ops if they do not repeat."""
        streams: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for k, module in enumerate(modules):
            for stream, some in self._ops[device, module].items():
                streams[stream] += [(start, end, symbol * len(modules) + k) for start, end, symbol in some]
        if not streams:
            return []
        busiest = max(streams, key=lambda s: sum(end - start for start, end, _ in streams[s]))
        ops = np.array(sorted(streams[busiest]), dtype=np.int64)
        every = [x for s in streams.values() for x in s]
        first, last = min(x[0] for x in every), max(x[1] for x in every)
        found = repeats(ops[:, 2], ops[:, 0])
        if found is None:
            return [] if len(modules) > 1 else [(first, last, True)]
        starts = [first, *ops[list(found.starts[1:]), 0].tolist()]
        return list(zip(starts, [*starts[1:], last], found.complete, strict=True))


def describe(t: Timeline, facts: HloFacts, kernels: Mapping[str, str] | None = None) -> Timeline:
    """Returns the timeline with kinds, bytes, groups and data flow from the HLO of its main module.

    kernels: op → the kernel that runs it.
    """
    nbytes, group = t["nbytes"].copy(), t["group"].copy()
    kind, operation = t["kind"].copy(), t["operation"].copy()
    sends = {k: OPERATIONS.index(facts.kinds[n]) for k, n in enumerate(t.names) if n in facts.kinds}
    sent = np.isin(t["name"], list(sends)) & on_stream(kind)
    kind[sent] = COLLECTIVE
    operation[sent] = [sends[k] for k in t["name"][sent].tolist()]
    groups = list(t.groups)
    if (group[sent] < 0).any():
        whole = Group(name="")
        groups += [] if whole in groups else [whole]
        group[sent & (group < 0)] = groups.index(whole)
    known = {g.ranks: i for i, g in enumerate(groups)}
    for i in np.flatnonzero(kind == COLLECTIVE).tolist():
        name = t.names[int(t["name"][i])]
        if name not in facts.nbytes:
            continue
        nbytes[i] = facts.nbytes[name]
        ranks = next((r for r in facts.groups.get(name, ()) if int(t.rank_of[i]) in r), ())
        if ranks:
            if ranks not in known:
                known[ranks] = len(groups)
                groups.append(Group(name=f"replicas {ranks}", ranks=ranks))
            group[i] = known[ranks]
    columns = {**t.columns, "nbytes": nbytes, "group": group, "kind": kind, "operation": operation}
    compiled = {n: replace(op, kernel=(kernels or {}).get(n, "")) for n, op in facts.ops.items()}
    return replace(t, columns=columns, groups=tuple(groups), dataflow=dict(facts.reads), compiled=compiled)


def untangle(t: Timeline) -> Timeline:
    """Removes ops that only contain others (loops, calls), and moves ops that overlap on a device to separate lanes."""
    device = on_stream(t["kind"])
    container = t.named(_CONTAINER.match) & device
    if container.any():
        t = t.select(~container)
        device = device[~container]
    lane = t["lane"].copy()
    lanes = list(t.lanes)
    for number, info in enumerate(t.lanes):
        mine = np.flatnonzero(device & (t["lane"] == number))
        if not info.device or len(mine) < 2:
            continue
        start, end = t["start_ns"][mine].tolist(), t.end_ns[mine].tolist()
        if all(b >= a for a, b in zip(end, start[1:], strict=False)):
            continue
        free = [-(1 << 62)]
        extra: dict[int, int] = {0: number}
        for e, s, f in zip(mine.tolist(), start, end, strict=True):
            slot = next((k for k, x in enumerate(free) if x <= s), len(free))
            if slot == len(free) and slot < _MOST_LANES:
                free.append(f)
                extra[slot] = len(lanes)
                lanes.append(Lane(rank=info.rank, name=f"{info.name}{BESIDE}{slot + 1}", device=True))
            slot = min(slot, len(free) - 1)
            free[slot] = max(free[slot], f)
            lane[e] = extra[slot]
    if len(lanes) == len(t.lanes):
        return t
    order = np.lexsort((-t["duration_ns"], t["start_ns"], lane))
    columns = {**{k: v[order] for k, v in t.columns.items()}, "lane": lane[order]}
    return replace(t, columns=columns, lanes=tuple(lanes))
