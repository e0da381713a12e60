"""Strategies on a network: step times predicted on its calibrated machine file, and measured."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.netlab.jobs import calibrated, results_of
from bench.netlab.models import BATCHES
from bench.netlab.net import Network, Topology
from bench.netlab.steps import plans

__all__ = ["FULL", "QUICK", "RACKS", "measure", "summary"]

FULL = tuple(Topology(racks=(hosts,), host_mbit=mbit) for hosts in (2, 4) for mbit in (1000.0, 200.0))
RACKS = Topology(racks=(2, 2), host_mbit=1000.0, uplink_mbit=200.0)
"""Two levels of links: measured on two models."""
QUICK = (Topology(racks=(2,), host_mbit=200.0),)
_NOISE = 0.05


def measure(
    topology: Topology, models: Sequence[str], batches: int, folder: Path, calibrate_s: float
) -> list[dict[str, Any]]:
    """A row for every strategy of every model and batch on this network."""
    with Network(topology) as network:
        machine = calibrated(network, folder, calibrate_s)
        cells = []
        for model in models:
            for batch in BATCHES[model][:batches]:
                for cell in plans(model, batch, topology.hosts, machine, folder / _made(folder, topology)):
                    key = f"{model} {batch} {cell.strategy}"
                    repeats = min(7, max(3, int(2.0 / max(cell.predicted_s, 1e-3))))
                    cells.append({"key": key, "cell": dataclasses.asdict(cell), "repeats": repeats})
        print(f"{topology.name}: {len(cells)} cells", file=sys.stderr, flush=True)
        found = results_of(
            network, folder, f"steps_{topology.slug}", [c for c in cells if not c["cell"]["same_as"]],
            timeout_s=60.0 + 40.0 * len(cells),
        )  # fmt: skip
    return [row for c in cells if (row := _row(topology, c, found)) is not None]


def _made(folder: Path, topology: Topology) -> str:
    name = f"plans_{topology.slug}"
    (folder / name).mkdir(parents=True, exist_ok=True)
    return name


def _row(topology: Topology, item: Mapping[str, Any], found: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    cell = item["cell"]
    key = f"{cell['model']} {cell['batch']} {cell['same_as'] or cell['strategy']}"
    got = found[key]
    row = {
        "network": topology.name,
        "hosts": topology.hosts,
        "model": cell["model"],
        "batch": cell["batch"],
        "strategy": cell["strategy"],
        "same_as": cell["same_as"],
        "mesh": list(cell["mesh"]),
        "predicted_s": cell["predicted_s"],
        "predicted_compute_s": cell["predicted_compute_s"],
    }
    if "failed" in got:
        return row | {"failed": got["failed"]}
    steps = got["steps_s"]
    low, _, high = statistics.quantiles(steps, n=4)
    middle = statistics.median(steps)
    return row | {
        "measured_s": middle,
        "spread": (high - low) / middle,
        "steps": len(steps),
        "compile_s": got["compile_s"],
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Orders and errors over all rows that ran; a strategy that is another one counts once."""
    from scipy.stats import kendalltau

    ran = [r for r in rows if "measured_s" in r]
    once = [r for r in ran if not r["same_as"]]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for r in ran:
        groups[r["network"], r["model"], r["batch"]].append(r)
    fastest, within, regret, taus = 0, 0, [], []
    for members in groups.values():
        ours = next((r for r in members if r["strategy"] == "ours"), None)
        best = min(members, key=lambda r: r["measured_s"])
        if ours is not None:
            noise = max(_NOISE, (ours["spread"] + best["spread"]) / 2)
            regret.append(ours["measured_s"] / best["measured_s"] - 1)
            fastest += ours["measured_s"] <= best["measured_s"]
            within += ours["measured_s"] <= best["measured_s"] * (1 + noise)
        different = [r for r in members if not r["same_as"]]
        if len(different) > 2:
            taus.append(
                float(
                    kendalltau(
                        [r["predicted_s"] for r in different], [r["measured_s"] for r in different]
                    ).statistic
                )
            )
    errors = sorted(abs(r["predicted_s"] / r["measured_s"] - 1) for r in once)
    bias = [math.log(r["predicted_s"] / r["measured_s"]) for r in once]
    t = kendalltau([r["predicted_s"] for r in once], [r["measured_s"] for r in once]).statistic
    return {
        "rows": len(once),
        "failed": sum("failed" in r for r in rows),
        "kendall_tau_over_all": float(t),
        "median_kendall_tau_within_a_group": statistics.median(taus) if taus else None,
        "median_error": statistics.median(errors),
        "errors_below_15_percent": sum(e < 0.15 for e in errors) / len(errors),
        "median_predicted_over_measured": math.exp(statistics.median(bias)),
        "groups": len(regret),
        "ours_without_communication": sum(
            r["strategy"] == "ours" and r["predicted_compute_s"] >= r["predicted_s"] * (1 - 1e-6) for r in ran
        ),
        "ours_fastest": fastest,
        "ours_fastest_or_within_noise": within,
        "ours_median_regret": statistics.median(regret),
        "ours_worst_regret": max(regret),
    }
