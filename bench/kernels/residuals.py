"""The residuals of prices by kind of work, of which the error bars of ``pase.plan.error_bar`` are made.

A kind's shared part is the root mean square of its tables' median errors, and its own part that of their spreads (half
the width around a table's median that contains 68%), of the rows that are not kept back. The kept rows test them: four
of five are to lie in the interval.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from bench.kernels.links import ASSUMED
from bench.kernels.rows import KernelRows

__all__ = ["error_kind", "residuals"]

_STARTS = {
    "product bfloat16": "product",
    "batched product bfloat16": "product",
    "product fp8": "product in 8 bits",
    "product nvfp4": "product in 4 bits",
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
_ONE_SIGMA, _FOUR_OF_FIVE = 0.6827, 1.2816


def error_kind(name: str) -> str:
    """Returns the kind of work, in the words of ``pase.plan.error_bar``, of rows of this name.

    >>> error_kind("all_reduce among 8, from 16 MB"), error_kind("softmax bfloat16")
    ('large collective', 'light')
    """
    kind = next((k for start, k in _STARTS.items() if name.startswith(start)), "light")
    return f"{'large' if 'from' in name else 'small'} collective" if kind == "collective" else kind


def residuals(found: Iterable[tuple[KernelRows, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Returns kind -> {"shared", "own"}, standard deviations of the logarithm of predicted over measured, and
    "kept_inside", the part of the kept rows inside the 80% interval. Tables count alike, whatever their length.

    found: rows of machines with a model of products, with the relative errors of their prices.
    """
    tables: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    for rows, errors in found:
        if rows.machine.device.products is not None:
            logs = np.log1p(errors)
            tables[error_kind(rows.kind)].append((logs[~rows.kept], logs[rows.kept]))
    return {kind: _residual(parts) for kind, parts in sorted(tables.items())}


def _residual(tables: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    medians = [np.median(fitted) for fitted, _ in tables if len(fitted)]
    widths = [
        np.quantile(np.abs(fitted - np.median(fitted)), _ONE_SIGMA) for fitted, _ in tables if len(fitted) > 3
    ]
    shared, own = (math.sqrt(np.mean(np.square(x))) if x else math.nan for x in (medians, widths))
    far = _FOUR_OF_FIVE * math.hypot(shared, own)
    inside = [np.mean(np.abs(kept) <= far) for _, kept in tables if len(kept)]
    return {
        "shared": round(shared, 3),
        "own": round(own, 3),
        "kept_inside": round(float(np.mean(inside)), 2) if inside else math.nan,
    }
