"""Compares the prices of kernels and collectives with tables of what others measured.

JSON: {"rows", "median_error", "p90_error", "by": {kind and machine: {"rows", "median_error", "p90_error", "bias",
"kept_median_error"}}, "residuals": {kind: {"shared", "own", "kept_inside"}}}. Errors are absolute, relative to the
measured time; the bias is the median error with its sign. A third of the rows, by the checksum of their shapes, is kept
back from every fit of a machine file: "kept_median_error" is theirs. ``bench/kernels/residuals.py`` says what the
residuals are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases import SHARED
from bench.kernels.residuals import residuals
from bench.kernels.rows import KernelRows, TableReader, read
from bench.runner import RESULTS, option, parser, save
from pase import machine
from pase.costmodels.analytic import Analytic
from pase.errors import PaseError
from pase.machine import Machine

__all__ = ["compare", "compared", "summary", "tables"]


def compared(rows: KernelRows, of: Machine | None = None) -> np.ndarray:
    """Returns each row's relative error, float [rows]: predicted / measured - 1."""
    model = Analytic(of or rows.machine, steady=rows.steady)
    return np.asarray(rows.price(model)) / rows.seconds - 1


def summary(found: list[tuple[KernelRows, np.ndarray]]) -> dict[str, Any]:
    """Returns the errors of all rows and by kind and machine."""
    by: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for rows, errors in found:
        by.setdefault(f"{rows.kind}, {rows.machine.name}", []).append((errors, rows.kept))
    joined = {name: tuple(map(np.concatenate, zip(*parts, strict=True))) for name, parts in by.items()}
    every = np.concatenate([errors for errors, _ in joined.values()])
    return {
        "rows": len(every),
        "median_error": float(np.median(np.abs(every))),
        "p90_error": float(np.quantile(np.abs(every), 0.9)),
        "by": {name: _errors(*parts) for name, parts in sorted(joined.items())},
        "residuals": residuals(found),
    }


def _errors(errors: np.ndarray, kept: np.ndarray) -> dict[str, Any]:
    held = np.abs(errors[kept])
    return {
        "rows": len(errors),
        "median_error": round(float(np.median(np.abs(errors))), 4),
        "p90_error": round(float(np.quantile(np.abs(errors), 0.9)), 4),
        "bias": round(float(np.median(errors)), 4),
        "kept_median_error": round(float(np.median(held)), 4) if len(held) else None,
    }


def tables(readers: Mapping[str, TableReader]) -> list[Path]:
    """Returns the tables of the shared folder that these readers know."""
    folders = [SHARED / "measured", SHARED / "gpu_h100"]
    return sorted({f for d in folders for p in readers for f in d.rglob(p)})


def compare(name: str, doc: str | None, readers: Mapping[str, TableReader]) -> None:
    """Prints the errors by kind and machine, as text or JSON; writes them with -o, or without any file to read.

    name: of the result file. doc: what --help prints.
    """
    args = parser(
        doc,
        "",
        option("files", nargs="*", type=Path, metavar="FILE"),
        option("--machine", metavar="NAME", help="price every row by this machine file"),
        option("--json", action="store_true"),
        option("-o", "--out", type=Path, help="write the result here"),
    ).parse_args()
    files = args.files or tables(readers)
    out = args.out or (None if args.files else RESULTS / f"{name}.json")
    try:
        if not files:
            raise PaseError("there is no table to compare with", where=str(SHARED), fix="name a file")
        of = None if args.machine is None else machine.load(args.machine)
        found = [(rows, compared(rows, of)) for file in files for rows in read(file, readers)]
    except PaseError as e:
        print(f"Error: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    result = summary(found)
    if out is not None:
        save(result, out)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, e in result["by"].items():
        head = f"{name[:56]:56s} {e['rows']:6d}"
        print(f"{head} {e['median_error']:6.1%} {e['p90_error']:5.0%} {e['bias']:+5.0%}")
    print(f"{result['rows']} rows: median {result['median_error']:.1%}, p90 {result['p90_error']:.1%}")
