"""The options that every bench of rows takes: which rows, and where the result file goes."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from bench.provenance import RESULTS

__all__ = ["parser", "wanted"]

T = TypeVar("T")


def parser(doc: str | None, result: str) -> argparse.ArgumentParser:
    """A parser with ``--only TEXT`` and ``-o FILE``; ``result`` names the file under bench/results by default."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--only", default="", metavar="TEXT", help="the rows whose name has this in it")
    made.add_argument(
        "-o", type=Path, default=RESULTS / f"{result}.json", metavar="FILE", help="the result file"
    )
    return made


def wanted(rows: Iterable[tuple[str, T]], only: str) -> list[T]:
    """Of (name, row) pairs, the rows whose name contains ``only``. SystemExit where none does.

    >>> wanted([("bert 32", 1), ("vgg16", 2)], "bert")
    [1]
    """
    every = list(rows)
    chosen = [row for name, row in every if only in name]
    if not chosen:
        raise SystemExit(
            f"no row has {only!r} in its name; there are: {', '.join(name for name, _ in every)}"
        )
    return chosen
