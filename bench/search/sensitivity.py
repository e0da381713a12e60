"""Does a strategy stay the best if the machine file is off by a factor of 2?

    python -m bench search.sensitivity

For each model and each quantity of the H100's machine file, the strategy found with the stated figures is priced at
half and at twice the figure, and compared with a new search there and with the baselines. Writes
bench/results/sensitivity.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from bench.runner import Benchmark
from pase.machine.scale import QUANTITIES
from pase.questions.sensitivity import sensitivity

MODELS = ("zoo:gpt2", "zoo:gpt_1_3b", "zoo:llama3_8b", "zoo:bert_base", "zoo:alexnet", "zoo:transformer")
DEVICES = 32


def points(model: str) -> Iterator[dict[str, Any]]:
    """Yields a row for each changed figure of the machine."""
    for quantity in QUANTITIES:
        for p in sensitivity(model, devices=DEVICES, vary=[f"{quantity}=0.5,2"]):
            yield {"model": model, **asdict(p), "regret": p.regret, "winner": p.winner}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the largest regret, and at how many points the strategy beats every baseline."""
    return {
        "devices": DEVICES,
        "worst_regret": max(r["regret"] for r in rows),
        "ahead_of_every_method": sum(r["winner"] == "pase" for r in rows),
        "points": len(rows),
    }


BENCH = Benchmark(
    "sensitivity",
    MODELS,
    points,
    named="{model}",
    head=summary,
    line=lambda name, r: f"{r['model']} {r['factors']} regret {r['regret']:.2%}, best: {r['winner']}",
)
