"""Strategies on a network: step times predicted on its calibrated machine file, and measured."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.netlab.jobs import calibrated, results_of
from bench.netlab.models import BATCHES
from bench.netlab.net import Network, Topology
from bench.netlab.session import Session
from bench.netlab.steps import PIPELINE, ROUNDS, planned

if TYPE_CHECKING:
    from pase.backends.jax.spmd.lower import Lowering

__all__ = ["FULL", "LOWERINGS", "QUICK", "RACKS", "STAGED", "beside", "measure", "staged", "summary"]

FULL = tuple(Topology(racks=(hosts,), host_mbit=mbit) for hosts in (2, 4) for mbit in (1000.0, 200.0))
RACKS = Topology(racks=(2, 2), host_mbit=1000.0, uplink_mbit=200.0)
"""Two levels of links, on which two models are measured."""
STAGED = (Topology(racks=(4,), host_mbit=200.0), RACKS)
"""Networks on which pipelines are compared with other strategies: all links slow, or only that between two racks."""
QUICK = (Topology(racks=(2,), host_mbit=200.0),)
LOWERINGS: tuple[Lowering, ...] = ("annotated", "manual")
_NOISE = 0.05
COMPILE_S = 1.2
"""Seconds to compile a program on hosts that share two cores, from runs of this laboratory."""


def measure(
    topology: Topology,
    models: Sequence[str],
    batches: Sequence[int],
    session: Session,
    on_rows: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    lowerings: Sequence[Lowering] = ("annotated",),
) -> list[dict[str, Any]]:
    """Returns a row for every strategy of every model and batch on this network. batches: 0: the small one, 1: the
    large.

    on_rows: called with all rows so far, as they come. lowerings: each strategy is measured in all of these, in turn.
    """
    with Network(topology) as network:
        machine = calibrated(network, session)
        stamp = session.stamp(machine)
        made = session.folder / f"plans_{topology.slug}"
        made.mkdir(parents=True, exist_ok=True)
        cells = []
        began = time.time()
        for model in models:
            for which in batches:
                for cell in planned(model, BATCHES[model][which], topology.hosts, machine, made, stamp):
                    repeats = min(15, max(3, int(1.5 / max(cell.predicted_s, 1e-3))))
                    for lowering in lowerings:
                        key = _key(model, cell.batch, cell.strategy, lowering)
                        how = dataclasses.asdict(cell) | {"lowering": lowering}
                        cells.append({"key": key, "cell": how, "repeats": repeats})
        run = [c for c in cells if not c["cell"]["same_as"]]
        session.say(
            f"{topology.name}: {len(cells)} strategies planned in {time.time() - began:.0f} s, {len(run)} differ; "
            f"about {_expected_s(run, topology.hosts) / 60:.0f} minutes to measure"
        )

        def rows(found: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
            made = [_row(topology, c, found) for c in cells]
            return [r | {"commit": session.commit} for r in made if r is not None]

        found = results_of(
            network,
            session,
            f"steps_{'_'.join(lowerings)}_{topology.slug}",
            run,
            stamp=stamp,
            timeout_s=60.0 + 40.0 * len(cells),
            on_row=lambda found: on_rows(rows(found)),
        )
    return rows(found)


def _key(model: str, batch: int, strategy: str, lowering: Lowering) -> str:
    return f"{model} {batch} {strategy} {lowering}"


def _expected_s(cells: Sequence[Mapping[str, Any]], hosts: int) -> float:
    """Returns the seconds to start, compile on two cores, warm up by two steps, and run the steps."""
    steps = sum((2 + ROUNDS * -(-c["repeats"] // ROUNDS)) * c["cell"]["predicted_s"] for c in cells)
    return 8.0 + COMPILE_S * hosts * len(cells) + 1.2 * steps


def _row(
    topology: Topology, item: Mapping[str, Any], found: Mapping[str, dict[str, Any]]
) -> dict[str, Any] | None:
    cell = item["cell"]
    key = _key(cell["model"], cell["batch"], cell["same_as"] or cell["strategy"], cell["lowering"])
    got = found.get(key, {"left_out": "not yet"})
    if "left_out" in got:
        return None
    row = {
        "network": topology.name,
        "hosts": topology.hosts,
        "model": cell["model"],
        "batch": cell["batch"],
        "strategy": cell["strategy"],
        "same_as": cell["same_as"],
        "lowering": cell["lowering"],
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
        "cpu_s": got["cpu_s"],
    }


def beside(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the comparison of the manual and the annotated lowering of the same plans, and ``summary`` of each."""
    once = [r for r in rows if not r["same_as"]]
    by = {(r["network"], _key(r["model"], r["batch"], r["strategy"], r["lowering"])): r for r in once}
    pairs = []
    for r in (r for r in once if r["lowering"] == "manual" and "measured_s" in r):
        other = by.get((r["network"], _key(r["model"], r["batch"], r["strategy"], "annotated")), {})
        if "measured_s" in other:
            pairs.append((r["measured_s"] / other["measured_s"], max(_NOISE, r["spread"], other["spread"])))
    return {
        "pairs": len(pairs),
        "manual_over_annotated": {
            "median": statistics.median(ratio for ratio, _ in pairs),
            "least": min(ratio for ratio, _ in pairs),
            "most": max(ratio for ratio, _ in pairs),
        },
        "slower_beyond_noise": sum(ratio > 1 + noise for ratio, noise in pairs),
        **{how: summary([r for r in rows if r["lowering"] == how]) for how in LOWERINGS},
    }


def staged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compares the best pipeline of each cell with the best strategy without stages, as predicted and as measured.

    A prediction holds if the strategy that was predicted to be faster is faster, or within the noise of both.
    """
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for r in rows:
        if "measured_s" in r:
            cells[r["network"], r["model"], r["batch"]].append(r)
    found = []
    for (network, model, batch), members in cells.items():
        parts = [
            [r for r in members if r["strategy"].startswith(PIPELINE) is with_stages]
            for with_stages in (True, False)
        ]
        if not all(parts):
            continue
        (piped, plain), (first, other) = (
            [min(part, key=lambda r, key=key: r[key]) for part in parts]
            for key in ("predicted_s", "measured_s")
        )
        predicted = plain["predicted_s"] / piped["predicted_s"]
        # A user would run the pipeline with the fastest prediction; it is compared with the fastest other strategy.
        measured = other["measured_s"] / piped["measured_s"]
        noise = max(_NOISE, (other["spread"] + piped["spread"]) / 2)
        found.append(
            {
                "network": network,
                "model": model,
                "batch": batch,
                "pipeline": piped["strategy"],
                "fastest_pipeline": first["strategy"],
                "best_without": other["strategy"],
                "best_without_predicted": plain["strategy"],
                "predicted_speed_over_best_without": predicted,
                "measured_speed_over_best_without": measured,
                "as_predicted": (predicted > 1) == (measured > 1) or abs(measured - 1) <= noise,
            }
        )
    won = [c for c in found if c["predicted_speed_over_best_without"] > 1]
    return {
        "cells": found,
        "pipeline_predicted": len(won),
        "of_these_measured_faster": sum(c["measured_speed_over_best_without"] > 1 for c in won),
        "as_predicted": sum(c["as_predicted"] for c in found),
        **{k: v for k, v in summary(rows).items() if not k.startswith("ours")},
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns orders and errors over all rows that ran; identical strategies count once."""
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
