"""The model on traces whose dependencies are all known, from a simulator that shares no code with pase."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate, write
from pase.replay.changes.whatif import apply
from pase.replay.graph import EDGES
from pase.replay.measurement.clocks import align
from pase.replay.measurement.model import estimate, measure
from pase.replay.simulation.predict import held_out
from pase.replay.simulation.steady import evaluate
from pase.replay.traces.ingest import load

GPU_BOUND = {"kernel_us": 300.0, "between_us": 4.0}
HOST_BOUND = {"kernel_us": 12.0, "between_us": 60.0}
COMM_BOUND = {"kernel_us": 60.0, "bucket_bytes": 64 << 20}


def _measured(tmp_path: Path, run: ImaginedRun):
    return measure(align(load(write(run, tmp_path / "traces"))))


@pytest.mark.parametrize("shape", [GPU_BOUND, HOST_BOUND, COMM_BOUND])
@pytest.mark.parametrize("ranks", [1, 3])
def test_error_below_half_a_percent(tmp_path: Path, shape: dict, ranks: int) -> None:
    run = simulate(ImaginedRun(ranks=ranks, **shape))
    m = _measured(tmp_path, run)
    predictions = held_out(m, [1, 2, 3, 4])
    assert len(predictions) == 4 * ranks
    for p in predictions:
        truth = run.iteration_us[p.rank][p.iteration] * 1e3
        assert abs(p.replayed_ns / truth - 1) < 0.005, (p, truth)


@pytest.mark.parametrize("shape", [GPU_BOUND, HOST_BOUND, COMM_BOUND])
def test_noise_averages_out(tmp_path: Path, shape: dict) -> None:
    run = simulate(ImaginedRun(ranks=2, iterations=9, noise=0.05, **shape))
    m = _measured(tmp_path, run)
    predictions = held_out(m, list(range(1, 9)))
    for rank in (0, 1):
        replayed = np.median([p.replayed_ns for p in predictions if p.rank == rank])
        truth = np.median(run.iteration_us[rank][1:]) * 1e3
        assert abs(replayed / truth - 1) < 0.01


@pytest.mark.parametrize("shape", [GPU_BOUND, HOST_BOUND, COMM_BOUND])
def test_every_dependency_is_found(tmp_path: Path, shape: dict) -> None:
    run = simulate(ImaginedRun(ranks=2, **shape))
    m = _measured(tmp_path, run)
    for (rank, iteration), p in m.programs.items():
        buckets = [i for i, n in enumerate(p.name) if "AllReduce" in n]
        label = {i: p.name[i] for i in range(len(p.name))} | {b: f"bucket_{k}" for k, b in enumerate(buckets)}
        kinds: dict[str, set] = {k: set() for k in EDGES}
        for (a, b), k in p.edges.items():
            kinds[EDGES[k]].add((label[a], label[b]))
        assert run.true_waits <= kinds["wait"], (rank, iteration, run.true_waits - kinds["wait"])
        ops = [i for i, d in enumerate(p.device) if d[1] == "stream"]
        launched = {b for (_, b), k in p.edges.items() if EDGES[k] == "launch"}
        assert set(ops) <= launched
        # The main thread starts the autograd thread, awaits it, and awaits the device at the end.
        assert len(kinds["handoff"]) == 2
        assert ("adam_2", "cudaStreamSynchronize") in kinds["sync"]
        order = [p.name[i] for i in ops if p.device[i][0] == "7"]
        chain = {(p.name[a], p.name[b]) for (a, b), k in p.edges.items() if EDGES[k] == "stream"}
        assert set(itertools.pairwise(order)) <= chain


def test_a_thread_that_works_on_after_it_has_answered_is_still_awaited(tmp_path: Path) -> None:
    """The autograd thread frees memory for 60 µs after its work, but the main thread resumes after 25 µs."""
    run = simulate(ImaginedRun(ranks=1, **HOST_BOUND))
    marks = sorted((e for e in run.events[0] if e["name"].startswith("ProfilerStep")), key=lambda e: e["ts"])
    for m in marks:
        inside = [e for e in run.events[0] if e["tid"] == 2 and m["ts"] <= e["ts"] < m["ts"] + m["dur"]]
        end = max(e["ts"] + e["dur"] for e in inside)
        run.events[0].append(
            {**inside[0], "name": "free", "cat": "cpu_op", "ts": end, "dur": 60.0, "args": {}}
        )
    m = _measured(tmp_path, run)
    for p in m.programs.values():
        assert sum(EDGES[k] == "handoff" for k in p.edges.values()) == 2
    slower = max(evaluate(apply(estimate(m, [1, 2, 3]), [("host", "", 2.0)])).values())
    # The autograd thread begins later, because the main thread is slower.
    truth = simulate(ImaginedRun(ranks=1, kernel_us=12.0, between_us=120.0, launch_us=12.0))
    assert slower == pytest.approx(truth.iteration_us[0][2] * 1e3, rel=0.03)


def test_no_wait_is_invented(tmp_path: Path) -> None:
    run = simulate(ImaginedRun(ranks=2, **COMM_BOUND))
    m = _measured(tmp_path, run)
    g = estimate(m, [1, 2, 3])
    waits = np.flatnonzero(g.edge_kind == EDGES.index("wait"))
    # Each rank has one wait per bucket and one for the optimizer.
    assert len(waits) == 2 * (4 + 1)


@pytest.mark.parametrize(
    ("knob", "change"),
    [
        (("bandwidth", "", 2.0), {"bandwidth_bytes_per_us": 120_000.0}),
        (("bandwidth", "", 0.25), {"bandwidth_bytes_per_us": 15_000.0}),
        (("host", "", 0.5), {"between_us": 2.0, "launch_us": 3.0}),
    ],
)
def test_what_if_agrees_with_a_run_under_the_change(tmp_path: Path, knob: tuple, change: dict) -> None:
    base = ImaginedRun(ranks=2, kernel_us=100.0, between_us=4.0, bucket_bytes=48 << 20, collective_us=1e-9)
    m = _measured(tmp_path, simulate(base))
    g = estimate(m, [1, 2, 3, 4])
    predicted = max(evaluate(apply(g, [knob])).values())
    other = simulate(ImaginedRun(**{**_fields(base), **change}))
    truth = max(np.median(t[1:]) for t in other.iteration_us) * 1e3
    # A single bucket size cannot separate latency from bandwidth. The error comes from the assumed 20 µs per
    # collective.
    assert abs(predicted / truth - 1) < 0.02, (predicted, truth)


def _fields(run: ImaginedRun) -> dict:
    keep = (
        "ranks",
        "kernel_us",
        "between_us",
        "launch_us",
        "bucket_bytes",
        "collective_us",
        "bandwidth_bytes_per_us",
    )
    return {k: getattr(run, k) for k in keep}


def test_a_straggler_shows_as_waiting_of_the_others(tmp_path: Path) -> None:
    run = simulate(ImaginedRun(ranks=3, slow_rank=1, slow_by=1.3, **GPU_BOUND))
    m = _measured(tmp_path, run)
    from pase.replay.measurement.breakdown import breakdowns

    g = estimate(m, [1, 2, 3])
    waiting = {b.rank: b.mean_ns("rank") for b in breakdowns(m)}
    assert waiting[1] < 0.02 * waiting[0]
    assert waiting[1] < 0.02 * waiting[2]
    balanced = max(evaluate(apply(g, [("balance", "", 1.0)])).values())
    even = simulate(ImaginedRun(ranks=3, **GPU_BOUND))
    assert abs(balanced / (np.median(even.iteration_us[0][1:]) * 1e3) - 1) < 0.01


def test_long_runs_are_held_out_in_folds(tmp_path: Path) -> None:
    m = _measured(tmp_path, simulate(ImaginedRun(ranks=1, iterations=12, noise=0.02)))
    iterations = list(range(12))
    single, folded = held_out(m, iterations, folds=12), held_out(m, iterations, folds=3)
    assert [p.iteration for p in folded] == [p.iteration for p in single] == iterations
    # All iterations of a fold have one prediction. With one fold per iteration, each is predicted from the other
    # eleven.
    assert len({p.replayed_ns for p in folded}) == 3
    assert len({p.replayed_ns for p in single}) > 3
