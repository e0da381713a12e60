"""What-ifs of other degrees of parallelism, compared with a simulation.

    python -m bench replay.degrees [--only TEXT]

A GPT of four layers (``bench/cases/transformers.py``) is simulated at one degree and traced on one rank, with 1% noise.
The what-ifs are pipeline stages, tensor parallelism (with the kernels of a short run at that degree, or by the roofline
alone), and more replicas whose hosts are late at random (``bench/cases/timelines.py``, four ranks traced). They are
compared with an independent simulation of the changed run. Writes bench/results/replay_degrees.json.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.cases import timelines
from bench.cases.transformers import ImaginedTransformer, simulate, write
from bench.runner import Benchmark
from pase.bridges.degrees import by_stages, by_tensor, kernel_times
from pase.replay import align, load, measure
from pase.replay.changes.whatif import apply
from pase.replay.reports.trust import Run
from pase.replay.simulation.chance import mean_iteration_ns, spreads
from pase.replay.simulation.steady import evaluate

MODEL = "zoo:gpt2?batch=2&seq=128&layers=4&vocab=1021&context=128&dtype=float32"
BASE: dict[str, Any] = {"layers": 4, "micro_batches": 4, "data": 2, "iterations": 6, "noise": 0.01}
BOUND: dict[str, dict[str, Any]] = {"device-bound": {}, "launch-bound": {"between_us": 30.0}}
LATE: dict[str, Any] = {"noise": 0.02, "iterations": 40, "layers": 6}
Row = dict[str, Any]


def measured(**shape: Any) -> Run:
    """Returns a simulated and traced run as the replay measures it."""
    with tempfile.TemporaryDirectory() as folder:
        return Run(
            measured=measure(align(load(write(simulate(ImaginedTransformer(**BASE | shape)), Path(folder)))))
        )


def truth_ns(**shape: Any) -> float:
    """Returns the time of an iteration of the run without noise, in ns."""
    return simulate(ImaginedTransformer(**BASE | shape | {"noise": 0.0})).iteration_us[-1] * 1e3


def compared(run: Run, predicted_ns: float, true_ns: float, **more: Any) -> Row:
    """Returns a row with the predicted and the true time."""
    return {
        "now_ms": run.replayed_ns / 1e6,
        "predicted_ms": predicted_ns / 1e6,
        "true_ms": true_ns / 1e6,
        "error": predicted_ns / true_ns - 1,
        **more,
    }


def stages(bound: str, many: int) -> Row:
    """Returns the row of a run that is cut into stages."""
    run = measured(**BOUND[bound])
    made = by_stages(many)(run.measured.timeline, run.graph)
    return compared(run, max(evaluate(made.graph).values()), truth_ns(stages=many, **BOUND[bound]))


def tensor(bound: str, now: int, then: int, shapes: bool) -> Row:
    """Returns the row of another degree of tensor parallelism. shapes: use the kernels of two layers at that degree."""
    run = measured(tensor=now, **BOUND[bound])
    known = None
    if shapes:
        other = measured(tensor=then, layers=2, micro_batches=1, **BOUND[bound])
        known = kernel_times([(other.measured.timeline, other.graph)])
    change = by_tensor(then, model=MODEL, ran=f"tp={now}", measured=known)
    made = change(run.measured.timeline, run.graph)
    want, scaled = truth_ns(tensor=then, **BOUND[bound]), made.detail["scaled_by_roofline"]
    return compared(run, max(evaluate(made.graph).values()), want, scaled_by_roofline=scaled)


def chance(late_us: float, ranks: int) -> Row:
    """Returns the row of more replicas than the four traced ones, each late at random.

    ``error_of_medians`` is the error of a replay with the median times.
    """
    shape = LATE | {"kernel_us": 200.0, "between_us": 4.0, "chance_us": late_us}
    four = timelines.simulate(timelines.ImaginedRun(ranks=4, **shape))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(measured=measure(align(load(timelines.write(four, Path(folder))))))
    grown = (ranks - 1) / ranks / (3 / 4)
    more = {"collective_us": 20.0 * (ranks - 1) / 3, "bandwidth_bytes_per_us": 60_000.0 / grown}
    true = timelines.simulate(timelines.ImaginedRun(ranks=ranks, seed=1, **shape | more | {"iterations": 80}))
    want = 1e3 * statistics.mean(max(x) for x in list(zip(*true.iteration_us, strict=True))[1:])
    graph = apply(run.medians, f"data={ranks}")
    got = mean_iteration_ns(graph, spreads(run.measured, run.medians, run.measured.whole()), ranks)
    assert got is not None
    return compared(run, got, want, error_of_medians=max(evaluate(graph).values()) / want - 1)


def questions() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yields the name of each what-if and the function that measures it."""
    for bound in BOUND:
        for many in (2, 4):
            yield f"{bound}: stages={many}", partial(stages, bound, many)
        for now, then in ((1, 2), (1, 4), (2, 4), (2, 1)):
            for shapes in (True, False):
                how = "shapes measured" if shapes else "roofline"
                yield f"{bound}: tensor {now} to {then}, {how}", partial(tensor, bound, now, then, shapes)
    for late_us in (200.0, 1000.0):
        for ranks in (4, 8, 32):
            yield f"late by {late_us:g} µs: data={ranks}", partial(chance, late_us, ranks)


def summary(rows: list[Row]) -> Row:
    """Returns the number of questions, and the median and worst error of each kind."""
    groups = {"stages": "stages=", "shapes measured": "shapes", "roofline": "roofline", "chance": "late by"}
    errors = {k: [abs(r["error"]) for r in rows if text in r["what_if"]] for k, text in groups.items()}
    each = {k: {"median": statistics.median(v), "worst": max(v)} for k, v in errors.items() if v}
    return {"what_ifs": len(rows), "summary": each}


BENCH = Benchmark("replay_degrees", dict(questions()), lambda ask: ask(), named="{what_if}", head=summary)
