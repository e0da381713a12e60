"""Published runs compared with our configuration under the same price.

    python -m bench published.ours [--file FILE.csv] [--only TEXT] [--minutes M] [--resume] [-o FILE]

Each row's configuration is priced as ``bench/published/steps.py`` prices it, and then changed one degree at a time as
long as that is cheaper and fits (``pase.stated.better``). Executor, precision, batch, model and devices stay the same.
The search starts at the published configuration, so its answer is never more expensive, unless the published one does
not fit by the price: then it looks for one that fits. The rows of all sources are taken in turn, so that a run that
``--minutes`` ends has some of each. Writes bench/results/published_ours.json, with the changes in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import numpy as np

from bench.cases import SHARED
from bench.published.cards import card
from bench.published.models import graph_of
from bench.published.rows import PublishedRow, read
from bench.published.steps import is_old, price_row, program_of
from bench.runner import Benchmark, option
from pase import costmodels
from pase.stated.better import better, changes
from pase.stated.price import Priced, price_strategy
from pase.stated.strategy import Strategy


def ours(row: PublishedRow) -> dict[str, Any] | None:
    """Returns the row's configuration and ours; None if the row has no price."""
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
        return price_strategy(graph, s, program, model, batch, doubled=at_once == 1)

    found = better(published, price)
    return {
        "published_s": published.step_s,
        "published_fits": published.fits,
        "ours_s": found.priced.step_s,
        "changes": changes(published.strategy, found.priced.strategy),
        "tried": found.tried,
    }


def _in_turn(rows: Iterable[PublishedRow]) -> list[PublishedRow]:
    """Returns the rows of all sources in turn, so that a run that is stopped early has some of each."""
    by: dict[str, list[PublishedRow]] = {}
    for r in rows:
        by.setdefault(r.source, []).append(r)
    return [r for group in zip_longest(*by.values()) for r in group if r is not None]


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns how much less time ours takes if the published one fits, how often they are the same, and the most
    frequent changes."""
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


BENCH = Benchmark(
    "published_ours",
    lambda given: {row.id: row for row in _in_turn(read(given.file))},
    ours,
    at="runs",
    head=summary,
    options=[option("--file", default=str(SHARED / "published_steps" / "given.csv"))],
)
