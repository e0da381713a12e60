"""Changes a measured graph by a number: another network, faster ops, a faster host, more ranks, or no stragglers."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pase.errors import Infeasible, PaseError, did_you_mean
from pase.replay.changes.balance import balanced
from pase.replay.changes.rewrite import Rewrite, Rewritten
from pase.replay.graph import EDGE, DataflowGraph
from pase.replay.simulation.collective_cost import split_cost
from pase.replay.simulation.contention import relieved
from pase.replay.types import COLLECTIVE, KINDS, OPERATIONS, Timeline, on_stream

__all__ = ["apply", "by_knob"]

_HOST_KINDS = (KINDS.index("host"), KINDS.index("runtime"))


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A number that a what-if changes. name=value or name:pattern=value; wire_bytes_per_s: see ``split_cost``."""

    name: str
    value: float
    pattern: str = ""
    wire_bytes_per_s: float | None = None


_Change = Callable[[DataflowGraph, Knob], DataflowGraph]
_CHANGES: dict[str, tuple[str, _Change]] = {}
"""Name of a knob -> (its help, what it does)."""


def _changes(help_text: str) -> Callable[[_Change], _Change]:
    """Registers what a knob does. help_text: an example and its meaning; it begins with the knob's name."""

    def add(turn: _Change) -> _Change:
        _CHANGES[re.split("[:=]", help_text)[0]] = help_text, turn
        return turn

    return add


def apply(g: DataflowGraph, text: str, wire_bytes_per_s: float | None = None) -> DataflowGraph:
    """Returns the graph under a change such as "bandwidth=2" or "op:gemm=0.5".

    Raises PaseError if the text is not a knob, if it matches no op, or if the numbers of ranks are unknown. Raises
    Infeasible if the change cannot be predicted from the trace.
    """
    k = parse_knob(text, wire_bytes_per_s)
    return _CHANGES[k.name][1](g, k)


def by_knob(text: str, wire_bytes_per_s: float | None = None) -> Rewrite:
    """Returns ``apply`` as a what-if, in which faster collectives also leave the device's memory to other ops."""
    k = parse_knob(text, wire_bytes_per_s)

    def change(t: Timeline, g: DataflowGraph) -> Rewritten:
        made = _CHANGES[k.name][1](g, k)
        if k.name in ("bandwidth", "latency", "ranks", "data"):
            made = relieved(t, g, made)
        return Rewritten(graph=made, of_ranks=int(k.value) if k.name in ("ranks", "data") else 0)

    return change


def parse_knob(text: str, wire_bytes_per_s: float | None = None) -> Knob:
    """Raises PaseError if the text is not a knob.

    >>> k = parse_knob("op:gemm=0.5")
    >>> k.name, k.pattern, k.value
    ('op', 'gemm', 0.5)
    """
    head, eq, value = text.rpartition("=")
    name, _, pattern = head.partition(":")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    whole = name not in ("ranks", "data") or (number >= 1 and number == int(number))
    if (
        not eq
        or name not in _CHANGES
        or not whole
        or not 0 < number < float("inf")
        or (name == "op") != bool(pattern)
    ):
        others = (
            "stages=P: P pipeline stages; tensor=N: tensor parallelism over N devices; "
            "bucket-plan=POLICY: gradients sent by that policy; strategy=LAYOUT: another strategy"
        )
        if name in _CHANGES and number <= 0:
            raise PaseError(
                f"{value} is no factor: a time is multiplied or divided by a number above 0",
                where=f"what-if '{text}'",
                fix="give a small number instead, such as 0.001",
            )
        raise PaseError(
            f"not a known change{did_you_mean(name, _CHANGES)}",
            where=f"what-if '{text}'",
            fix=f"give one of {'; '.join(said for said, _ in _CHANGES.values())}; {others}",
        )
    if name == "op":
        try:
            re.compile(pattern)
        except re.error as e:
            raise PaseError(
                f"'{pattern}' is not a regular expression ({e})", where=f"what-if '{text}'"
            ) from e
    return Knob(name=name, value=number, pattern=pattern, wire_bytes_per_s=wire_bytes_per_s)


@_changes("bandwidth=2: collectives send bytes twice as fast")
def _bandwidth(g: DataflowGraph, k: Knob) -> DataflowGraph:
    parts = split_cost(g, k.wire_bytes_per_s)
    return replace(g, duration_ns=g.duration_ns + parts.link_ns * (1 / k.value - 1))


@_changes("latency=0.5: the fixed part of a collective halves")
def _latency(g: DataflowGraph, k: Knob) -> DataflowGraph:
    parts = split_cost(g, k.wire_bytes_per_s)
    return replace(g, duration_ns=g.duration_ns + parts.fixed_ns * (k.value - 1))


@_changes("ranks=128: collectives over 128 ranks, by the rules of a ring")
def _ranks(g: DataflowGraph, k: Knob) -> DataflowGraph:
    fixed = split_cost(g, k.wire_bytes_per_s).fixed_ns
    more, steps = _ring_growth(g, k.value)
    grown = fixed * steps + (g.duration_ns - fixed) * more
    return replace(g, duration_ns=np.where(g.kind == COLLECTIVE, grown, g.duration_ns))


@_changes("data=128: 128 data-parallel ranks, each with as many examples as now")
def _data(g: DataflowGraph, k: Knob) -> DataflowGraph:
    _check_one_group(g)
    return _ranks(g, k)


@_changes("host=0.5: CPU work and driver calls take half the time")
def _host(g: DataflowGraph, k: Knob) -> DataflowGraph:
    on_host, c = np.isin(g.kind, _HOST_KINDS), g.carried
    handed, handed_on = g.edges_of("handoff"), c.kind == EDGE["handoff"]
    return replace(
        g,
        duration_ns=np.where(on_host, g.duration_ns * k.value, g.duration_ns),
        lag_ns=np.where(handed, g.lag_ns * k.value, g.lag_ns),
        carried=replace(c, lag_ns=np.where(handed_on, c.lag_ns * k.value, c.lag_ns)),
    )


@_changes("op:REGEX=0.5: device ops whose name matches take half the time")
def _op(g: DataflowGraph, k: Knob) -> DataflowGraph:
    device = on_stream(g.kind)
    mine = g.named(re.compile(k.pattern).search) & device
    if not mine.any():
        raise PaseError(
            "no device op has a name that matches",
            where=f"what-if op:{k.pattern}",
            fix=f"give a regular expression that matches a name in the trace{_longest(g, device)}",
        )
    return replace(g, duration_ns=np.where(mine, g.duration_ns * k.value, g.duration_ns))


@_changes("balance=1: no rank is later or slower than the median rank")
def _balance(g: DataflowGraph, k: Knob) -> DataflowGraph:
    return balanced(g)


def _longest(g: DataflowGraph, among: np.ndarray) -> str:
    """An example for a message: the three names that take longest in all. among: which tasks count."""
    total = np.bincount(g.name[among], g.duration_ns[among], len(g.names))
    order = [k for k in np.argsort(-total, kind="stable")[:3].tolist() if total[k]]
    names = ", ".join(f"'{textwrap.shorten(g.names[k], 60)}'" for k in order)
    return f", such as {names}" if names else ""


def _check_one_group(g: DataflowGraph) -> None:
    """Raises Infeasible if collectives have different numbers of ranks, because some are then not over replicas."""
    ways = np.unique(g.ways[(g.kind == COLLECTIVE) & (g.ways > 1)])
    if len(ways) > 1:
        raise Infeasible(
            f"the run's collectives have groups of {', '.join(map(str, ways))} ranks, and the trace does not show "
            "which of them are replicas",
            where="what-if data",
            fix="give ranks= to change all of them",
        )


def _ring_growth(g: DataflowGraph, ranks: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the factors of the bytes' part and of the fixed part if a collective's group changes to ``ranks`` ranks.

    A ring sends n−1 of n chunks (twice in an all-reduce), in n−1 steps. The larger buffer of an all-gather or a
    reduce-scatter keeps its size.
    """
    more, steps = np.ones(len(g)), np.ones(len(g))
    mine = g.ways > 1
    n = np.where(mine, g.ways, 2).astype(np.float64)
    if (g.kind == COLLECTIVE).any() and not mine.any():
        raise PaseError(
            "the trace does not have the number of ranks of any collective", where="what-if ranks"
        )
    ring = mine & np.isin(g.operation, [OPERATIONS.index(o) for o in OPERATIONS[1:5]])
    more[ring] = ((ranks - 1) / ranks) / ((n[ring] - 1) / n[ring])
    steps[ring] = (ranks - 1) / (n[ring] - 1)
    return more, steps
