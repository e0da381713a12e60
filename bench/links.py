"""Collectives that others measured, priced: NCCL by card, group and size, RCCL, sends, DeepEP, and NCCL's own model.

    python -m bench links [FILE ...] [--machine NAME] [--json] [-o bench/results/links.json]

Without a file, all tables of the shared folder are read. ``bench/kernels/links.py`` says which tables are known, and
``bench/kernels/comparison.py`` what the result has. --machine prices every row by this machine file instead of the
table's own card.
"""

from __future__ import annotations

from bench.kernels.comparison import compare
from bench.kernels.links import LINKS

__all__ = ["main"]


def main() -> None:
    """Compares, prints and writes."""
    compare("links", __doc__, LINKS)
