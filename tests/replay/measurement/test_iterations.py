"""The length of iterations, and which of them measure the steady run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.cases.timelines import ImaginedRun, simulate, write
from pase.replay.changes.whatif import apply
from pase.replay.measurement.iterations import Iteration, warm_up
from pase.replay.measurement.model import measure
from pase.replay.reports.trust import Run
from pase.replay.simulation.steady import evaluate
from pase.replay.traces.ingest import load
from tests.replay.runs import running_ahead


def test_a_cpu_that_runs_ahead_does_not_change_what_is_measured(tmp_path: Path) -> None:
    path, truth = running_ahead(tmp_path)
    m = measure(load(path))
    assert list(m.left_out) == [0] and "nothing shows where the previous iteration ended" in m.left_out[0]
    assert [m.measured_ns[0, i] / 1e6 for i in m.steady()] == pytest.approx(truth, rel=1e-6)
    run = Run(measured=m)
    assert not run.doubts
    assert run.replayed_ns / 1e6 == pytest.approx(truth[0], rel=2e-3)
    assert run.error(worst=True) < 2e-3
    # A faster CPU changes nothing, and faster kernels change the whole iteration.
    assert max(evaluate(apply(run.graph, "host=1.5")).values()) == pytest.approx(run.replayed_ns, rel=0.01)
    faster = max(evaluate(apply(run.graph, "op:gemm=0.8")).values())
    assert faster == pytest.approx(0.8 * run.replayed_ns, rel=0.01)


def test_iterations_that_are_left_out() -> None:
    """Warm-up at the beginning and a checkpoint in the middle are left out; a later one that is 7% longer is not."""
    lengths = [1120, 1070, 1000, 1010, 1070, 1500, 990, 1000]
    of = {
        (0, k): Iteration(rank=0, number=k, begin_ns=10**6 * k, end_ns=10**6 * k + n, ops=9)
        for k, n in enumerate(lengths)
    }
    assert list(warm_up(of)) == [0, 1, 5] and "longer than the others" in warm_up(of)[5]


def test_a_cut_file_leaves_its_last_iteration_out(tmp_path: Path) -> None:
    folder = write(simulate(ImaginedRun(ranks=1, iterations=4)), tmp_path / "x")
    path = folder / "rank0.json.gz"
    with gzip.open(path, "rt") as f:
        document = json.load(f)
    last = max(e["ts"] for e in document["traceEvents"] if e["cat"] == "kernel")
    kept = [e for e in document["traceEvents"] if e["cat"] != "kernel" or e["ts"] < last - 3000]
    with gzip.open(path, "wt") as f:
        json.dump({**document, "traceEvents": kept}, f)
    m = measure(load(folder))
    assert 3 in m.left_out and "no device op" in m.left_out[3]
