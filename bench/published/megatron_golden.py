"""The peaks of memory that Megatron-Core's functional tests record, each priced as its own configuration.

    python -m bench published.megatron_golden [FILE.csv] [--json] [--only PREFIX] [-o OUT]

The rows are dense GPT models of 12 layers on four or eight devices, and the figure is what PyTorch's allocator handed
out at most on the last rank (megatron/training/training.py, mem-max-allocated-bytes), so the reserve of a price does
not count. What the tests' own files say besides degrees is in megatron_golden.csv. Rows of other models state why they
are not priced. JSON: {"of", "rows", "median_error", "p95_error", "bias", "by": {platform: {…}}, "why_not": {reason:
rows}}, where "of" counts all rows, and "rows" those that are priced.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases import SHARED, csv_rows
from bench.published.megatron_gpt import gpt, padded_vocabulary
from bench.runner import option, parser, save
from pase.costmodels.analytic import Analytic
from pase.errors import Infeasible, PaseError
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, named, simplify
from pase.machine import load
from pase.stated.price import price_strategy
from pase.stated.program import PROGRAMS
from pase.stated.strategy import Strategy

__all__ = ["main", "peak_bytes", "recorded", "workspace_bytes"]

_FACTS = Path(__file__).with_suffix(".csv")
_MIB = 1 << 20
_VOCABULARY = 50257
"""GPT-2's tokens (the tests' bpe/vocab.json)."""


def recorded(file: Path) -> list[dict[str, str]]:
    """Returns the rows that have a peak, each with what its test's own file says. Raises PaseError if it is no such
    table."""
    try:
        facts = {f"gpt/{r['case']}": r for r in csv_rows(_FACTS)}
        return [
            r | facts.get(r["case"], {}) | {"case": r["case"]} for r in csv_rows(file) if r["max_alloc_bytes"]
        ]
    except (OSError, KeyError, ValueError, csv.Error) as e:
        raise PaseError(f"this is no table of Megatron's peaks: {e}", where=str(file)) from e


def workspace_bytes(card: str, *, deterministic: bool, te: bool) -> int:
    """Returns the memory that cuBLAS works in.

    PyTorch gives 32 MiB on Hopper and 8.1 MiB on other cards to each handle (aten/src/ATen/cuda/CublasHandlePool.cpp;
    CUBLAS_WORKSPACE_CONFIG=:4096:8, 32 MiB, in deterministic tests), and the threads of forward and of backward have
    one each. Transformer Engine has its own: 32 MiB from Hopper on, before that 4 MiB (pytorch/module/base.py).
    """
    own = 32 * _MIB if deterministic or card == "h100x8" else 2 * 4 * _MIB + 8 * 16 * 1024
    return 2 * own + (0 if not te else 4 * _MIB if card == "a100x8" else 32 * _MIB)


def peak_bytes(row: Mapping[str, str]) -> float:
    """Returns the predicted peak on the last rank. Raises Infeasible for a row that this cannot price."""
    if not row.get("attention"):
        raise Infeasible("another model than a dense GPT")
    if row["other"]:
        raise Infeasible(row["other"])
    platform = row["platform"]
    card = "gb200_nvl72" if "gb200" in platform else "h100x8" if "h100" in platform else "a100x8"
    devices = 4 if row["case"].endswith("_1node") else 8
    tp, pp, cp, micro, layers = (int(row[k] or 1) for k in ("tp", "pp", "cp", "micro", "layers"))
    ranks = devices // (tp * pp * cp)
    if not ranks:
        raise Infeasible("it has more devices than a node")
    zero = bool(row["distopt"]) and ranks > 1
    s = Strategy(
        data=1 if zero else ranks,
        shard=ranks if zero else 1,
        zero=1 if zero else 0,
        tensor=tp,
        sequence=bool(row["sp"]) and tp > 1,
        context=cp,
        pipeline=pp,
        chunks=layers // pp // int(row["vpp"]) if row["vpp"] and pp > 1 else 1,
        micro=micro,
        remat="full" if row["recompute"] == "full" else "none",
    )
    deterministic, te = row["deterministic"] == "yes", row["transformer"] == "te"
    # Transformer Engine takes no kernel of fused attention that is not deterministic if a test allows none, and that of
    # the LTS images before November 2025 had no other.
    unfused = deterministic and te and platform in row["older"].split()
    graph = _graph(
        batch=micro * ranks,
        seq=int(row["seq"]),
        layers=layers,
        d=int(row["hidden"]),
        heads=int(row["heads"]),
        vocab=padded_vocabulary(_VOCABULARY, tp),
        dtype="bfloat16",
        attention="unfused" if unfused else row["attention"],
        drops=row["dropout"] == "yes",
        seeded=True,
    )
    # Megatron's own layers hand autograd an array that is freed after it.
    program = PROGRAMS["megatron"] if te else replace(PROGRAMS["megatron"], empty_gradient=0.0)
    priced = price_strategy(graph, s, program, Analytic(load(card)), int(row["gbs"]))
    return priced.stage_memory[-1].arrays + workspace_bytes(card, deterministic=deterministic, te=te)


@cache
def _graph(**shape: Any) -> Graph:
    return named(simplify(trace(*gpt(**shape)).graph))


def _errors(errors: list[float]) -> dict[str, Any]:
    off = np.abs(errors)
    return {
        "rows": len(off),
        "median_error": round(float(np.median(off)), 4),
        "p95_error": round(float(np.quantile(off, 0.95)), 4),
        "bias": round(float(np.median(errors)), 4),
    }


def main() -> None:
    """Prints each row's predicted and recorded peak, or JSON; with -o or without any choice, writes the summary."""
    args = parser(
        __doc__,
        "megatron_golden",
        option("file", nargs="?", type=Path, default=SHARED / "measured" / "megatron_golden" / "golden.csv"),
        option("--json", action="store_true"),
        option("--only", default="", help="the rows whose case begins with this"),
    ).parse_args()
    try:
        rows = [r for r in recorded(args.file) if r["case"].startswith(args.only)]
    except PaseError as e:
        print(f"Error: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    why_not: Counter[str] = Counter()
    by: dict[str, list[float]] = defaultdict(list)
    for r in rows:
        try:
            predicted, measured = peak_bytes(r), float(r["max_alloc_bytes"])
        except Infeasible as e:
            why_not[e.what] += 1
            continue
        error = predicted / measured - 1
        by[r["platform"]].append(error)
        if not args.json:
            told = f"{measured / 1e6:7.0f} MB, predicted {predicted / 1e6:7.0f} {error:+6.1%}"
            print(f"{r['case'][4:]:100s} {r['platform']:26s} {told}")
    every = [e for errors in by.values() for e in errors]
    result = {
        "of": len(rows),
        **(_errors(every) if every else {"rows": 0}),
        "by": {platform: _errors(errors) for platform, errors in sorted(by.items())},
        "why_not": dict(why_not.most_common()),
    }
    save(result, args.out)
    print(json.dumps(result, indent=1))
