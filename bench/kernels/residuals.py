"""The residuals of prices by kind of work, of which the error bars of ``pase.plan.error_bar`` are made.

A kind's shared part is the root mean square of its tables' median errors, and its own part that of their spreads (half
the width around a table's median that contains 68%), of the rows that are not kept back. A spread of few rows is
widened to what a new row's interval needs (Student's distribution: by 17% for eight rows). Light ops are of several
families (norms, sums, lookups), whose kernels have little in common but who wrote them: their shared part is that of
the means of all families of a source, and what a source's families differ by is a part of its own. The kept rows test
them: four of five are to lie in the interval.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from bench.kernels.links import ASSUMED
from bench.kernels.rows import KernelRows
from pase.ir.precision import HIGHEST

__all__ = ["error_kind", "residuals"]

_STARTS = {
    "product bfloat16": "product",
    "batched product bfloat16": "product",
    "product fp8": "product in 8 bits",
    "product nvfp4": "product in 4 bits",
    f"product {HIGHEST}": "product of all bits",
    f"batched product {HIGHEST}": "product of all bits",
    "product float32": "product in 32 bits",
    "batched product float32": "product in 32 bits",
    "attention": "attention",
    "convolution": "convolution",
    "all_": "collective",
    "reduce_scatter": "collective",
    "permute": "collective",
    "dispatch": "exchange of tokens",
    "combine": "exchange of tokens",
    ASSUMED: "assumed",
    "experts": "experts",
    "grouped": "experts",
}
"""How the name of a table's rows begins -> their kind. Rows of other names are light ops. Error bars do not use all."""
_SOURCES = ("XLA", "in a model", "PCIe cards")
"""How the name of a light op's rows ends -> tables of one source, on each card."""
_ONE_SIGMA, _FOUR_OF_FIVE = 0.6827, 1.2816


def error_kind(name: str) -> str:
    """Returns the kind of work, in the words of ``pase.plan.error_bar``, of rows of this name.

    >>> error_kind("all_reduce among 8, from 16 MB"), error_kind("softmax bfloat16")
    ('large collective', 'light')
    """
    kind = next((k for start, k in _STARTS.items() if name.startswith(start)), "light")
    return f"{'large' if 'from' in name else 'small'} collective" if kind == "collective" else kind


def residuals(found: Iterable[tuple[KernelRows, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Returns kind -> {"shared", "family", "own"}, standard deviations of the logarithm of predicted over measured, and
    "kept_inside", the part of the "kept" rows inside the 80% interval. Tables count alike, whatever their length.

    found: rows of machines with a model of products, with the relative errors of their prices.
    """
    tables: dict[str, list[_Table]] = defaultdict(list)
    for rows, errors in found:
        if rows.machine.device.products is not None:
            logs, kind = np.log1p(errors), error_kind(rows.kind)
            source = next((s for s in _SOURCES if rows.kind.endswith(s)), "")
            tables[kind].append(
                _Table(
                    source=f"{source}, {rows.machine.device.name}",
                    fitted=logs[~rows.kept],
                    kept=logs[rows.kept],
                )
            )
    return {kind: _residual(kind, parts) for kind, parts in sorted(tables.items())}


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Logarithms of predicted over measured. source: who measured them, on which card."""

    source: str
    fitted: np.ndarray
    kept: np.ndarray


def _residual(kind: str, tables: list[_Table]) -> dict[str, float]:
    medians: dict[str, list[float]] = defaultdict(list)
    for t in tables:
        if len(t.fitted):
            medians[t.source if kind == "light" else str(len(medians))].append(float(np.median(t.fitted)))
    shared = _rms([float(np.mean(m)) for m in medians.values()])
    family = _rms([x - float(np.mean(m)) for m in medians.values() for x in m])
    own = _rms(
        [
            float(np.quantile(np.abs(t.fitted - np.median(t.fitted)), _ONE_SIGMA)) * _of_few(len(t.fitted))
            for t in tables
            if len(t.fitted) > 3
        ]
    )
    far = _FOUR_OF_FIVE * math.hypot(shared, family, own)
    inside = [np.mean(np.abs(t.kept) <= far) for t in tables if len(t.kept)]
    return {
        "shared": round(shared, 3),
        "family": round(family, 3),
        "own": round(own, 3),
        "kept": sum(len(t.kept) for t in tables),
        "kept_inside": round(float(np.mean(inside)), 2) if inside else math.nan,
    }


def _of_few(rows: int) -> float:
    """How much wider the interval of a new row is for a deviation that so many rows gave."""
    return float(student.ppf(0.9, rows - 1)) / _FOUR_OF_FIVE * math.sqrt(1 + 1 / rows)


def _rms(values: list[float]) -> float:
    return math.sqrt(np.mean(np.square(values))) if values else math.nan
