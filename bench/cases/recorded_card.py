"""A card whose ops were timed once: an H100's, as a calibration times them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.cases import csv_rows
from pase.calibrate.card_ops import CardOp

__all__ = ["RecordedCard", "recorded_card"]

_FORMS = {
    ("elementwise", "x+y"): "add",
    ("elementwise", "x*2+1"): "scale",
    ("softmax", ""): "softmax",
    ("layer norm", "forward"): "norm",
    ("reduce rows", "sum"): "sum rows",
}
_LONGEST = 8192
"""Longer rows are read several times, which the rule of local work knows and an op alone does not."""


@dataclass(frozen=True, kw_only=True)
class RecordedCard:
    """Implements ``KernelClock`` for the ops of a table. An op costs a second of its own clock."""

    times: dict[CardOp, float]
    asked: list[CardOp] = field(default_factory=list)

    def now(self) -> float:
        """The seconds that have passed."""
        return float(len(self.asked))

    @property
    def ops(self) -> list[CardOp]:
        """The table's ops, of all kinds from the start."""
        out = sorted(self.times, key=lambda op: op.label)
        np.random.default_rng(0).shuffle(out)  # type: ignore[arg-type]
        return out

    def seconds(self, ops: Sequence[CardOp]) -> list[float | None]:
        self.asked.extend(ops)
        return [self.times[op] for op in ops]


def recorded_card(file: Path) -> RecordedCard:
    """The card of a table with the columns kind, dtype, shape, note and device_s: its products, convolutions and light
    ops that a calibration has, too."""
    times: dict[CardOp, float] = {}
    for r in csv_rows(file):
        shape, dtype = [int(x) for x in r["shape"].split("x")], r["dtype"]
        op = None
        if r["kind"] == "matmul" and r["note"] == "nn":
            op = CardOp(kind="matmul", dtype=dtype, extents=(1, *shape))
        elif r["kind"] == "conv" and r["note"] == "forward" and shape[-1] == 1:
            op = CardOp(kind="conv", dtype=dtype, extents=tuple(shape[:-1]))
        elif form := _FORMS.get((r["kind"], r["note"])):
            op = CardOp(kind="memory", dtype=dtype, extents=(1, *shape)[-2:], form=form)
        if op is not None and not (op.form in ("norm", "softmax") and op.extents[-1] > _LONGEST):
            times[op] = float(r["device_s"])
    return RecordedCard(times=times)
