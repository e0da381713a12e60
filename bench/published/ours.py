"""Published runs beside our own configuration under the same price.

    python -m bench.published.ours [FILE.csv] [--only PREFIX] [--minutes M] [--resume] [-o FILE]

Each row's configuration, priced as ``bench/published/steps.py`` prices it, is changed one degree at a time as long as
that is cheaper and fits (``pase.stated.better``): executor, precision, batch, model and devices stay. As the search
begins with the published configuration, the answer is never above it, unless that does not fit by the price: then what
fits comes first. What changes is said in words. Rows of all sources in turn; --resume goes on with rows that the result
file lacks, for at most so many minutes of CPU. With --only, these rows are priced again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

if not __package__:  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from bench.cases import SHARED
from bench.provenance import RESULTS, save
from bench.published.cards import card
from bench.published.models import graph_of
from bench.published.rows import PublishedRow, read
from bench.published.steps import is_old, price_row, program_of
from pase import costmodels
from pase.stated.better import better, changes
from pase.stated.price import Priced, price_strategy
from pase.stated.strategy import Strategy


def ours(row: PublishedRow) -> dict[str, Any] | None:
    """The row's configuration and ours; None where the row has no price."""
    run = price_row(row)
    if run.priced is None:
        return None
    program, published = program_of(row), run.priced
    model = costmodels.get("analytic", card(row.text("gpu") or "?"))
    batch = row.whole("global_batch") or 0

    def price(s: Strategy) -> Priced:
        at_once = (s.micro or 1) * s.ranks
        samples = max(at_once, 2)
        graph = graph_of(row, samples, s.tensor, written_out=is_old(row))
        return price_strategy(graph, s, program, model, batch, share=at_once / samples)

    found = better(published, price)
    return {
        "published_s": published.step_s,
        "published_fits": published.fits,
        "ours_s": found.priced.step_s,
        "changes": changes(published.strategy, found.priced.strategy),
        "tried": found.tried,
    }


def _in_turn(rows: Iterable[PublishedRow]) -> list[PublishedRow]:
    """Rows of every source in turn, so that a run that is cut short has some of each."""
    by: dict[str, list[PublishedRow]] = {}
    for r in rows:
        by.setdefault(r.source, []).append(r)
    return [r for group in zip_longest(*by.values()) for r in group if r is not None]


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How much less ours takes where the published one fits, how often it is the published one, and what it changes
    most often."""
    less = [1 - r["ours_s"] / r["published_s"] for r in rows.values() if r["published_fits"]]
    words = Counter(c for r in rows.values() for c in r["changes"])
    return {
        "rows": len(rows),
        "published_fits": len(less),
        "the same": sum(not r["changes"] for r in rows.values()),
        "median_less": float(np.median(less)) if less else None,
        "most_less": max(less, default=None),
        "changed": dict(words.most_common()),
    }


def main() -> None:
    """Writes for each row its own step, ours under the same price, and what ours changes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", default=str(SHARED / "published_steps" / "given.csv"))
    parser.add_argument("--only", default="", help="rows whose id begins so")
    parser.add_argument("--minutes", type=float, default=30.0, help="of CPU, after which no new row is begun")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the result file has")
    parser.add_argument("-o", default=str(RESULTS / "published_ours.json"))
    args = parser.parse_args()
    done: dict[str, dict[str, Any]] = {}
    if args.resume and Path(args.o).exists():
        done = json.loads(Path(args.o).read_text(encoding="utf-8"))["runs"]
        if args.only:
            done = {k: v for k, v in done.items() if not k.startswith(args.only)}
    for row in _in_turn(r for r in read(args.file) if r.id.startswith(args.only) and r.id not in done):
        if time.process_time() > 60 * args.minutes:
            break
        found = ours(row)
        if found is None:
            continue
        done[row.id] = found
        save(summary(done) | {"runs": done}, args.o)
        less = 1 - found["ours_s"] / found["published_s"]
        print(f"{row.id:8s} {less:6.1%} less: {', '.join(found['changes']) or 'the same'}", flush=True)
    told = {k: v for k, v in summary(done).items() if k != "changed"}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
