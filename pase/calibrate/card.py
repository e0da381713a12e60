"""Fits the figures of a GPU's machine file to a few dozen ops, which are chosen as the measurement goes on.

The form of the prediction is that of the file of the same card (``costmodels/products.py``: waves of squares over the
units, starts, divided contractions, memory beside arithmetic). A measurement changes its figures: rates of products by
dtype, aligned and not, the part of the memory's rate that products and light ops reach, the rate of convolutions. So
sixty ops say more than a grid of thousands, of which each point stands for itself.

A fifth of the ops is never fitted. What the file predicts for them, over what they took, is its accuracy on this card.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pase.calibrate.card_ops import CardOp, card_ops
from pase.calibrate.figures import RateKind, figures, fitted, prices
from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.machine import CostModel, Machine

__all__ = ["CardFit", "KernelClock", "TimedOp", "calibrate_card", "card_facts", "card_file", "card_lines"]

_CHECKED = 5
"""Every fifth op is kept from the fit."""
_FIRST = 30
"""Ops of the first round, of all kinds and sizes."""
_MORE = 10
"""Ops of each further round, of the kinds whose predictions are off the most."""


class KernelClock(Protocol):
    """Times ops on the card."""

    def seconds(self, ops: Sequence[CardOp]) -> list[float | None]:
        """Returns the time of each op's kernels, in s, without the gaps between them; None if an op cannot run."""


@dataclass(frozen=True, kw_only=True)
class TimedOp:
    """An op, what it took, and what the fitted file predicts, in s. fitted: whether the fit used it. before: what the
    base file predicts."""

    op: CardOp
    measured_s: float
    predicted_s: float
    before_s: float
    fitted: bool


@dataclass(frozen=True, kw_only=True)
class CardFit:
    """The fitted machine. changed: figure → (before, after). left_out: ops that could not run."""

    machine: Machine
    timed: tuple[TimedOp, ...]
    changed: dict[str, tuple[float, float]]
    left_out: tuple[str, ...]
    seconds: float

    def error(self, *, fitted: bool, kind: str = "") -> float | None:
        """The median relative error of the ops that were fitted, or of those that were not; None without such ops."""
        found = [
            abs(t.predicted_s / t.measured_s - 1)
            for t in self.timed
            if t.fitted == fitted and kind in ("", t.op.kind)
        ]
        return statistics.median(found) if found else None


def calibrate_card(
    base: Machine,
    clock: KernelClock,
    model: Callable[[Machine], CostModel],
    budget_s: float,
    say: Callable[[str, int, int], None],
    ops: Sequence[CardOp] | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> CardFit:
    """Times ops of the card and returns the base file with its figures fitted to them.

    base: the file of the same card. model: makes the cost model that prices an op that runs alone. budget_s: no round
    begins after this time. say: called with (what is timed, ops timed, of how many).

    Raises PaseError if the base file has no product kernels, or if too few ops ran.
    """
    if base.device.products is None:
        raise PaseError(
            "it has no [device.products], so nothing says how its kernels run",
            where=f"machine '{base.name}'",
            fix="measure the grid of products instead: --grid",
        )
    began, every = now(), tuple(card_ops() if ops is None else ops)
    todo = list(every)
    machine, measured = base, dict[CardOp, float]()
    changed: dict[str, tuple[float, float]] = {}
    left: list[str] = []
    batch = todo[:_FIRST]
    while batch:
        say(batch[0].label, len(measured), len(every))
        for op, seconds in zip(batch, clock.seconds(batch), strict=True):
            todo.remove(op)
            if seconds is None or not math.isfinite(seconds) or seconds <= 0:
                left.append(op.label)
            else:
                measured[op] = seconds
        _check_enough(measured, every)
        machine, changed = _fitted(base, model, measured, every)
        batch = _next(machine, model, measured, todo) if now() - began < budget_s else []
    before, after = (_predicted(m, model, measured) for m in (base, machine))
    kept = _kept(every)
    return CardFit(
        machine=machine,
        timed=tuple(
            TimedOp(op=op, measured_s=s, predicted_s=after[op], before_s=before[op], fitted=op not in kept)
            for op, s in measured.items()
        ),
        changed=changed,
        left_out=tuple(left),
        seconds=now() - began,
    )


def card_file(base: Machine, fit: CardFit, name: str, provenance: Mapping[str, str]) -> Machine:
    """Returns the machine file of a calibrated card: what was fitted, and all the rest as in the base file."""
    error, ops = fit.error(fitted=False), sum(t.fitted for t in fit.timed)
    told = "" if error is None else f"; median error of {len(fit.timed) - ops} others: {error:.1%}"
    how = f"fitted to {ops} ops timed by the profiler in {fit.seconds:.0f} s{told}"
    sources = {f"device.{figure.partition(' ')[0]}": f"pase calibrate: {how}" for figure in fit.changed}
    return replace(
        fit.machine,
        name=name,
        title=f"{base.title}, calibrated",
        sources={**base.sources, **sources},
        provenance={**provenance, "base": f"{base.name}, digest {base.digest}", "card": how},
    )


def card_facts(fit: CardFit) -> JsonObject:
    """What ``--json`` prints of a calibrated card."""
    kinds = dict.fromkeys(t.op.kind for t in fit.timed)
    return {
        "seconds": round(fit.seconds, 1),
        "figures": {name: {"before": a, "after": b} for name, (a, b) in fit.changed.items()},
        "not_fitted": {
            "ops": sum(not t.fitted for t in fit.timed),
            "median_error": fit.error(fitted=False),
            "by": {kind: fit.error(fitted=False, kind=kind) for kind in kinds},
        },
        "ops": [
            {
                "op": t.op.label,
                "measured_s": t.measured_s,
                "predicted_s": t.predicted_s,
                "base_predicted_s": t.before_s,
                "fitted": t.fitted,
            }
            for t in fit.timed
        ],
        "left_out": list(fit.left_out),
    }


def card_lines(card: JsonObject) -> Iterator[str]:
    """Yields what the command prints of ``card_facts``."""
    apart = card["not_fitted"]
    for figure, x in card["figures"].items():
        yield f"{figure}: {x['before']:.3g} -> {x['after']:.3g}"
    if apart["ops"]:
        by = ", ".join(f"{kind} {error:.0%}" for kind, error in apart["by"].items() if error is not None)
        yield (
            f"{len(card['ops'])} ops in {card['seconds']:.0f} s; {apart['ops']} of them were not fitted, and are "
            f"predicted with a median error of {apart['median_error']:.1%} ({by})"
        )
    yield from (f"left out, because it did not run: {what}" for what in card["left_out"])


def _kept(every: Sequence[CardOp]) -> frozenset[CardOp]:
    """The ops that are not fitted: every fifth of each kind and dtype."""
    seen: dict[tuple[str, str], int] = {}
    out = set()
    for op in every:
        seen[op.kind, op.dtype] = seen.get((op.kind, op.dtype), 0) + 1
        if seen[op.kind, op.dtype] % _CHECKED == 0:
            out.add(op)
    return frozenset(out)


def _check_enough(measured: dict[CardOp, float], every: Sequence[CardOp]) -> None:
    products = sum(op.kind == "matmul" for op in measured)
    light = sum(op.kind == "memory" for op in measured)
    if products < 4 or light < 2:
        raise PaseError(
            f"only {products} products and {light} light ops of {len(every)} ops ran on this card",
            where="the calibration",
            fix="stop other programs that hold the card's memory, and run it again",
        )


def _predicted(
    machine: Machine, model: Callable[[Machine], CostModel], measured: dict[CardOp, float]
) -> dict[CardOp, float]:
    """What a file predicts for kernels as the profiler times them."""
    found = prices(model(machine), [op.work for op in measured], _least_s(measured))
    return dict(zip(measured, found.tolist(), strict=True))


def _least_s(measured: dict[CardOp, float]) -> float:
    """The time of the smallest kernel: the fixed part of a light op, without the gap before it."""
    return min(s for op, s in measured.items() if op.kind == "memory")


def _fitted(
    base: Machine,
    model: Callable[[Machine], CostModel],
    measured: dict[CardOp, float],
    every: Sequence[CardOp],
) -> tuple[Machine, dict[str, tuple[float, float]]]:
    """The machine that is fitted to the ops that are not kept back, and figure → (before, after)."""
    kept = _kept(every)
    used = {op: s for op, s in measured.items() if op not in kept}
    works = [op.work for op in used]
    found = figures(base.device, works, throttled=False)
    times = np.array([*used.values()])
    machine, values = fitted(base, found, works, times, model, least_s=_least_s(measured))
    return machine, {f.name: (f.value, x) for f, x in zip(found, values, strict=True)}


def _next(
    machine: Machine,
    model: Callable[[Machine], CostModel],
    measured: dict[CardOp, float],
    todo: Sequence[CardOp],
) -> list[CardOp]:
    """The next ops: of the kinds that are predicted worst, those least like any that were timed."""
    predicted = _predicted(machine, model, measured)
    off: dict[RateKind, list[float]] = {}
    for op, s in measured.items():
        off.setdefault(op.work.rate_kind, []).append(abs(math.log(predicted[op] / s)))
    worst = max((statistics.fmean(v) for v in off.values()), default=1.0)

    def worth(op: CardOp, near: Iterable[CardOp]) -> float:
        like = [o for o in near if (o.kind, o.dtype, len(o.extents)) == (op.kind, op.dtype, len(op.extents))]
        far = min((_distance(op, o) for o in like), default=10.0)
        return far * statistics.fmean(off.get(op.work.rate_kind, [worst]))

    chosen: list[CardOp] = []
    rest = list(todo)
    while rest and len(chosen) < _MORE:
        best = max(rest, key=lambda op: worth(op, [*measured, *chosen]))
        rest.remove(best)
        chosen.append(best)
    return chosen


def _distance(a: CardOp, b: CardOp) -> float:
    """How unlike two ops of a kind are: the sum of their extents' ratios in octaves."""
    return sum(abs(math.log2(x / y)) for x, y in zip(a.extents, b.extents, strict=True)) + (a.form != b.form)
