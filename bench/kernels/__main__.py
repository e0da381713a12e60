"""Kernels that others measured, priced: products, attention, norms, experts, convolutions.

    python -m bench kernels [FILE ...] [--machine NAME] [--json] [-o bench/results/kernels.json]

Without a file, all tables of the shared folder are read. ``bench/kernels/rows.py`` says which tables are known, and
``bench/kernels/comparison.py`` what the result has. --machine prices every row by this machine file instead of the
table's own card.
"""

from __future__ import annotations

from bench.kernels.comparison import compare
from bench.kernels.rows import READERS

__all__ = ["main"]


def main() -> None:
    """Compares, prints and writes."""
    compare("kernels", __doc__, READERS)
