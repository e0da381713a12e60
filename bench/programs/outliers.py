"""Reasons why FLOPs or memory of programs are far from XLA's, which ``tests/house/test_programs.py`` requires."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, Literal

__all__ = ["BOUNDS", "REASONS", "Figure", "outliers", "reason"]

Figure = Literal["flops", "memory"]

BOUNDS: Mapping[Figure, tuple[float, float]] = {"flops": (0.5, 2.0), "memory": (0.5, 2.0)}
"""Bounds of our value over XLA's within which no reason is needed."""

_LAPACK = "factorizations and triangular solves are calls of LAPACK, which XLA counts at nothing"
_STACKS = (
    "JAX saves for backward what products read, gathered, and XLA keeps that whole for all turns, where pase counts "
    "the parts (seen in equinox.gru: f32[12,16,32] beside f32[12,2,32])"
)
_CONSTANT_KEY = (
    "the key is a constant of the program, so that each device makes the random bits of a dropout whole and takes its "
    "part: in linen.dropout_mlp four arrays of u32[32,64], where pase counts the part"
)
_AGAIN = "functions of a point in a row: XLA computes them again in backward, where pase counts them as kept"
REASONS: Mapping[Figure, Mapping[str, str]] = {
    "flops": dict.fromkeys(
        ("learning.sinkhorn", "probability.full_gaussian", "probability.lower_upper_affine"), _LAPACK
    ),
    "memory": {
        "losses.ntxent": "XLA fuses a product into its sum for TPUs, not for CPUs: docs/evidence/memory.md",
        "equimo.vssd": "XLA for CPUs makes the weights' gradient of a depthwise convolution between all channels, and "
        "selects the diagonal: s32[288,288,4] and more of that size",
        **dict.fromkeys(
            ("*gru", "*lstm", "*lstm_unrolled", "*stacked_cells", "plain.switch_in_scan"), _STACKS
        ),
        "science.diffrax_adaptive": _STACKS,
        **dict.fromkeys(
            (
                "linen.dropout_mlp",
                "keras_layers.alpha_dropout",
                "keras_layers.dropout",
                "keras_layers.gaussian_noise",
            ),
            _CONSTANT_KEY,
        ),
        "learning.soft_sort": "a solver of lineax, one op that is not split: pase counts its 36 operands as "
        "held at once and whole; XLA inlines it, and most are parts on each device",
        **dict.fromkeys(
            (
                "keras_layers.group_normalization",
                "probability.negative_binomial",
                "probability.quasiseparable",
                "science.jax_md_energy",
            ),
            _AGAIN,
        ),
    },
}
"""Figure -> pattern of names -> the reason. The first match counts."""


def outliers(row: Mapping[str, Any]) -> list[Figure]:
    """Returns the figures of a program's row that are out of bounds."""
    return [figure for figure, (low, high) in BOUNDS.items() if not low <= row[figure] <= high]


def reason(name: str, figure: Figure) -> tuple[str, str] | None:
    """Returns the first pattern that matches a program's name, and its reason; None if there is none."""
    return next(((p, why) for p, why in REASONS[figure].items() if fnmatch(name, p)), None)
