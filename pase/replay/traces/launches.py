"""Finds the op of a compiled program that each kernel of a CUDA graph runs.

XLA for GPUs puts runs of ops into CUDA graphs (command buffers), and the profiler records only which graph a kernel is
in. Kernels run in the order of the program's ops. A fusion's kernel has the name of the fusion, or of an equal fusion;
a library's kernel has its own name, and an op may launch several. So the names are found by aligning the kernels of
one execution with the ops of the program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pase.replay.kernels import work_of
from pase.replay.traces.hlo import HloFacts
from pase.replay.traces.programs import of_program, program_of
from pase.replay.types import Timeline, on_stream

__all__ = ["Kernels", "align_kernels", "graph_kernel", "in_graph", "named"]

_IN_GRAPH = "command_buffer kernel "
_EXACT, _STEM, _KIND = 6.0, 4.0, 3.0
"""How well a kernel fits an op: by the op's name, by the name of a fusion of its kind, by the kind of work."""
_SKIPPED = 0.5
"""What an op without a kernel costs."""
_BLOCK, _AHEAD = 1024, 2048
"""Kernels that are aligned at a time, and the ops beyond as many that they may reach."""
_NUMBER = re.compile(r"_\d+$")


def in_graph(op: str) -> bool:
    """Whether the profiler's name of an op is that of a CUDA graph."""
    return op.startswith("command_buffer")


def graph_kernel(kernel: str) -> str:
    """Returns the name that a kernel of a CUDA graph has until ``named`` finds its op: no op has such a name."""
    return _IN_GRAPH + kernel


class Kernels:
    """The kernel that takes longest of those that run an op."""

    def __init__(self) -> None:
        self.longest: dict[str, str] = {}
        self._duration: dict[str, int] = {}

    def add(self, op: str, kernel: str, duration_ns: int) -> None:
        if duration_ns > self._duration.get(op, -1):
            self.longest[op], self._duration[op] = kernel, duration_ns


def named(t: Timeline, facts: Mapping[str, HloFacts], kernels: Kernels) -> Timeline:
    """Returns the timeline with the programs' ops in place of the kernels of their CUDA graphs, execution by execution.

    An event whose op the profiler recorded keeps it, whatever the order: ops that do not depend on each other run in
    any order on several threads or streams. A kernel without an op, or of a program that is not among ``facts``, gets
    its own name. Names have their program before and after (``of_program``). Adds the kernels to ``kernels``.
    """
    keyed = [program_of(n) for n in t.names]
    anonymous = np.array([op.startswith(_IN_GRAPH) for op, _ in keyed], dtype=bool)[t["name"]]
    if not anonymous.any():
        return t
    names, numbers = list(t.names), {n: i for i, n in enumerate(t.names)}
    column = t["name"].copy()

    def rename(event: int, to: str) -> None:
        column[event] = numbers.setdefault(to, len(numbers))
        if len(numbers) > len(names):
            names.append(to)

    programs = {p: k for k, p in enumerate(dict.fromkeys(p for _, p in keyed))}
    program = np.array([programs[p] for _, p in keyed], dtype=np.int32)[t["name"]]
    aligned: dict[bytes, list[str]] = {}
    device = np.flatnonzero(on_stream(t["kind"]))
    rank = t.rank_of[device]
    for r in t.ranks:
        mine = device[rank == r]
        mine = mine[np.argsort(t["start_ns"][mine], kind="stable")]
        starts = sorted(m.start_ns for m in t.marks if m.rank == r)
        for part in np.split(mine, np.searchsorted(t["start_ns"][mine], starts)):
            for name, number in programs.items():
                ran = part[program[part] == number]
                if not anonymous[ran].any():
                    continue
                texts = [keyed[n][0].removeprefix(_IN_GRAPH) for n in t["name"][ran].tolist()]
                key = t["name"][ran].tobytes()
                if key not in aligned:
                    known = (~anonymous[ran]).tolist()
                    found = facts.get(name)
                    aligned[key] = [""] * len(ran) if found is None else align_kernels(texts, found, known)
                for e, kernel, op in zip(ran.tolist(), texts, aligned[key], strict=True):
                    if anonymous[e]:
                        rename(e, of_program(op or kernel, name))
                        if op:
                            kernels.add(of_program(op, name), kernel, int(t["duration_ns"][e]))
    return replace(t, columns={**t.columns, "name": column}, names=tuple(names))


def align_kernels(kernels: Sequence[str], facts: HloFacts, known: Sequence[bool] | None = None) -> list[str]:
    """Returns the op that each kernel runs, "" if none is known. kernels: of one execution, in order.

    known: which of them are the names of ops instead, which stay as they are; default: none.

    Maximizes how well the pairs fit, in the order of both. A kernel without an op of its own belongs to the op beside
    it: a fill to the next one, whose output it clears, and others to the library's op before.
    """
    ops = list(facts.launched)
    given = [False] * len(kernels) if known is None else list(known)
    out = [""] * len(kernels)
    at = 0
    for begin in range(0, len(kernels), _BLOCK):
        end = begin + 2 * _BLOCK
        block = list(zip(kernels[begin:end], given[begin:end], strict=True))
        within = ops[at : at + len(block) + _AHEAD]
        if not within:
            break
        found = _aligned(block, within, facts)
        kept = min(_BLOCK, len(block))
        for k in range(kept):
            if found[k] >= 0:
                out[begin + k] = within[found[k]]
        at += max(found[:kept], default=-1) + 1
    out = [name if is_op else op for name, is_op, op in zip(kernels, given, out, strict=True)]
    _adopt(kernels, out, facts)
    return out


def _aligned(kernels: list[tuple[str, bool]], ops: list[str], facts: HloFacts) -> list[int]:
    """Returns the op's index for each kernel, increasing; −1 for none. Ops at the end may be left over for free.

    kernels: the name of each, and whether it is that of its op.
    """
    m = len(ops)
    safe = np.array([_safe(o) for o in ops])
    stem = np.array([_NUMBER.sub("", s) for s in safe])
    fused = {*safe.tolist(), *stem.tolist()}
    work = np.array([facts.ops[o].work if o in facts.ops else "" for o in ops])
    library = np.array(["fusion" not in s and not s.startswith("wrapped_") for s in safe])
    library |= work == "copy"  # a fusion that only takes or puts a slice is a copy of the runtime's
    fills = np.array(["broadcast" in s for s in safe])
    names = np.array(ops)
    # An op that the profiler recorded needs no kernel of the graph, wherever it ran.
    places = np.cumsum(np.where(np.isin(names, [k for k, is_op in kernels if is_op]), 0.0, _SKIPPED))
    score = np.zeros((len(kernels) + 1, m + 1), dtype=np.float32)
    score[0, 1:] = -places
    fit: dict[tuple[str, bool], np.ndarray] = {}
    for k, (kernel, is_op) in enumerate(kernels):
        if is_op:
            fit.setdefault((kernel, True), np.where(names == kernel, _EXACT, 0.0).astype(np.float32))
        elif (kernel, False) not in fit:
            own = _safe(kernel)
            exact = np.where((names == kernel) | (safe == own), _EXACT, 0.0)
            kind = np.where(library & (work == work_of(kernel)), _KIND, 0.0) if own not in fused else 0.0
            if kernel.startswith("Memset"):
                kind = np.where(fills, _KIND, 0.0)
            alike = np.where(stem == _NUMBER.sub("", own), _STEM, 0.0)
            fit[kernel, False] = np.maximum(np.maximum(exact, kind), alike).astype(np.float32)
        gain = fit[kernel, is_op]
        matched = np.where(gain > 0, score[k, :-1] + gain, -np.inf)
        best = np.maximum(score[k, 1:], matched)
        # An op that is passed over costs the same wherever it is, so the best place before is a running maximum.
        score[k + 1, 0] = score[k, 0]
        reach = np.maximum.accumulate(np.concatenate(([score[k, 0]], best + places)))
        score[k + 1, 1:] = reach[1:] - places
    out = [-1] * len(kernels)
    i = int(score[-1].argmax())
    for k in range(len(kernels) - 1, -1, -1):
        gain = fit[kernels[k]]
        while i > 0:
            here = score[k + 1, i]
            if gain[i - 1] > 0 and abs(here - (score[k, i - 1] + gain[i - 1])) < 1e-3:
                out[k] = i - 1
                i -= 1
                break
            if abs(here - score[k, i]) < 1e-3:
                break
            i -= 1
    return out


def _adopt(kernels: Sequence[str], out: list[str], facts: HloFacts) -> None:
    """Gives each kernel without an op that of a neighbour, if that is a library's op."""

    def is_library(op: str) -> bool:
        return bool(op) and op in facts.ops and "fusion" not in op and facts.ops[op].work != "elementwise"

    fills = [k.lower().startswith(("memset", "memcpy")) for k in kernels]
    following = range(len(out) - 2, -1, -1)
    for beside, places in (
        (1, [k for k in following if fills[k]]),
        (-1, range(1, len(out))),
        (1, following),
    ):
        for k in places:
            if not out[k] and is_library(out[k + beside]):
                out[k] = out[k + beside]


def _safe(name: str) -> str:
    """The name that a fusion's kernel has.

    >>> _safe("loop_add_fusion.4"), _safe("wrapped_convert.kd")
    ('loop_add_fusion_4', 'wrapped_convert')
    """
    return name.removesuffix(".kd").replace(".", "_").replace("-", "_")
