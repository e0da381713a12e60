"""What-ifs compared with an independent simulation of the changed run.

    python -m bench replay.whatif [--only TEXT]

A what-if gets only eight traced iterations of the unchanged run (four ranks unless stated otherwise, 2% noise). It is
compared with the mean of 200 iterations of the changed run with other noise (``bench/cases/timelines.py``, which shares
no code with the replay): a replay predicts a mean, which includes the waiting for one another that noise causes.
``quiet_ms`` is the changed run without noise. The changes are of links, kernels, launches, fused kernels, other
buckets, and a rank that is no longer late or slow. Writes bench/results/replay_whatif.json.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.cases.timelines import ImaginedRun, bucketed, simulate, write
from bench.runner import Benchmark
from pase.bridges.replan import replan
from pase.bridges.trace_profile import problem_from_timeline
from pase.replay import align, load, measure, optimize_graph
from pase.replay.changes.whatif import apply
from pase.replay.reports.trust import Run
from pase.replay.simulation.steady import evaluate
from pase.schedule import BucketPlan, whole

SHAPES: dict[str, dict[str, Any]] = {
    "device-bound": {"kernel_us": 300.0, "between_us": 4.0},
    "launch-bound": {"kernel_us": 12.0, "between_us": 60.0},
    "communication-bound": {"kernel_us": 60.0, "bucket_bytes": 64 << 20},
}
LONG, OTHER_SEED = 200, 1
"""The number of iterations of the changed run, and the seed of its noise."""
Predict = Callable[[Run], float]
"""Predicts the time of an iteration under the change, in ns, from a measured run."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A what-if. traced: the run that is traced. changed: the same run with the change."""

    name: str
    traced: ImaginedRun
    changed: ImaginedRun
    predict: Predict


def knob(text: str) -> Predict:
    """Returns a predictor by a change of ``pase replay``."""
    return lambda run: run.changed_ns(apply(run.graph, text))


def fused(run: Run) -> float:
    """Predicts the run with each sequence of elementwise kernels fused, as ``pase optimize`` proposes it."""
    return optimize_graph(run.graph, passes=["op-fusion"]).after_ns


def rebucketed(together: int) -> Predict:
    """Returns a predictor that sends this many of the run's buckets as one."""

    def predict(run: Run) -> float:
        p = problem_from_timeline(run.measured.timeline)
        groups = [range(k, k + together) for k in range(0, len(p.tensors), together)]
        plan = BucketPlan(policy="fused", messages=tuple(whole(p, list(g)) for g in groups))
        return max(evaluate(replan(run.graph, p, plan).graph).values())

    return predict


def questions() -> Iterator[WhatIf]:
    """Yields all what-ifs."""
    for name, shape in SHAPES.items():
        base: dict[str, Any] = {"ranks": 4, "iterations": 8, "bucket_growth": 0.3, "noise": 0.02, **shape}
        plain = ImaginedRun(**base)
        changes: tuple[tuple[str, Predict, dict[str, float]], ...] = (
            ("bandwidth=2", knob("bandwidth=2"), {"bandwidth_bytes_per_us": 120_000.0}),
            ("bandwidth=0.5", knob("bandwidth=0.5"), {"bandwidth_bytes_per_us": 30_000.0}),
            ("half the latency", knob("latency=0.5"), {"collective_us": 10.0}),
            (
                "kernels twice as long",
                knob("op:fwd_|bwd_|adam_=2"),
                {"kernel_us": 2 * plain.kernel_us},
            ),
            (
                "launches twice as long",
                knob("host=2"),
                {"between_us": 2 * plain.between_us, "launch_us": 2 * plain.launch_us},
            ),
        )
        for what, predict, change in changes:
            yield _asked(f"{name}: {what}", predict, base, change)
        yield _asked(f"{name}: four light kernels a layer fused", fused, base | {"light": 4}, {"fused": True})
    for mib in (0.5, 8.0, 40.0):
        for together in (2, 4):
            yield WhatIf(
                name=f"buckets of {mib:g} MiB: {together} sent as one",
                traced=bucketed(1, mib, ranks=4, iterations=8, noise=0.02),
                changed=bucketed(together, mib, ranks=4, iterations=8, noise=0.02),
                predict=rebucketed(together),
            )
    for ranks in (2, 4):
        base = {"ranks": ranks, "iterations": 8, "kernel_us": 200.0, "between_us": 4.0, "noise": 0.02}
        for what, slow in (("5 ms late", {"late_us": 5000.0}), ("1.4 times slower", {"slow_by": 1.4})):
            even = {"slow_rank": -1, "late_us": 0.0, "slow_by": 1.0}
            rank = {"slow_rank": ranks - 1, **slow}
            yield _asked(f"one of {ranks} ranks {what}: balance=1", knob("balance=1"), base | rank, even)


def _asked(name: str, predict: Predict, base: dict[str, Any], change: dict[str, Any]) -> WhatIf:
    return WhatIf(
        name=name, traced=ImaginedRun(**base), changed=ImaginedRun(**base | change), predict=predict
    )


def answered(q: WhatIf) -> dict[str, Any]:
    """Returns the row of a what-if: the unchanged run, the prediction, and the changed run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(measured=measure(align(load(write(simulate(q.traced), Path(folder))))))
    want, quiet = (
        true_ns(replace(q.changed, **x)) for x in ({"iterations": LONG, "seed": OTHER_SEED}, {"noise": 0.0})
    )
    got = q.predict(run)
    return {
        "now_ms": run.replayed_ns / 1e6,
        "held_out_error": run.error(),
        "predicted_ms": got / 1e6,
        "true_ms": want / 1e6,
        "error": got / want - 1,
        "quiet_ms": quiet / 1e6,
        "error_to_quiet": got / quiet - 1,
        "refused": bool(run.doubts),
    }


def true_ns(run: ImaginedRun) -> float:
    """Returns the mean iteration of a run in ns: of the slowest rank in each iteration, without the first."""
    return statistics.fmean(list(map(max, zip(*simulate(run).iteration_us, strict=True)))[1:]) * 1e3


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the number of questions, and the median and worst errors."""
    errors, to_quiet = ([abs(r[k]) for r in rows] for k in ("error", "error_to_quiet"))
    return {
        "what_ifs": len(rows),
        "median": statistics.median(errors),
        "worst": max(errors),
        "median_to_quiet": statistics.median(to_quiet),
        "worst_to_quiet": max(to_quiet),
    }


BENCH = Benchmark(
    "replay_whatif", {q.name: q for q in questions()}, answered, named="{what_if}", head=summary
)
