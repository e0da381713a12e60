"""Iterations that a program does not mark, from the repetition of its ops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.replay.traces.ingest import load
from pase.replay.traces.repeats import repeats
from tests.needs import SHARED
from tests.replay.traces.files import kernel, trace_file

LAYERED = [0, *[1, 2, 3] * 12, 4, *[5, 6, 7, 8] * 12, 9, 9, 10]
"""A step with an embedding, 12 layers forward, a loss, 12 layers backward and an optimizer."""


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=30),
    st.integers(2, 6),
    st.integers(2, 9),
)
def test_the_parts_of_any_repeated_step_are_found(body: list[int], layers: int, steps: int) -> None:
    step = [100, *body * layers, 101]
    ops = np.array(step * steps)
    found = repeats(ops, np.arange(len(ops)))
    assert found is not None
    assert found.starts == tuple(range(0, len(ops), len(step))) and all(found.complete)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=30), st.integers(2, 40))
def test_the_layers_of_one_step_are_no_steps(body: list[int], layers: int) -> None:
    ops = np.array([100, *body * layers, 101])
    assert repeats(ops, np.arange(len(ops))) is None


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_profile_that_begins_within_a_step_has_that_step_cut(cut: int) -> None:
    ops = np.array((LAYERED * 4)[cut:])
    places = np.arange(len(LAYERED) * 4)
    start = places * 10 + 500 * (places // len(LAYERED))  # a pause between steps
    found = repeats(ops, start[cut:])
    assert found is not None
    assert found.starts == (0, *[k * len(LAYERED) - cut for k in (1, 2, 3)])
    assert found.complete == (False, True, True, True)


def test_an_evaluation_between_two_steps_does_not_hide_them() -> None:
    step = [0, *range(1, 200), 0, 200]
    ops = np.array(step * 6)
    ops[777] = 999
    found = repeats(ops, np.arange(len(ops)))
    assert found is not None and len(found.starts) == 6


def test_iterations_of_a_trace_without_marks(tmp_path: Path) -> None:
    """The CPU launches ahead, so the kernels of a step begin long after its calls."""
    events = []
    for i in range(12):
        name = ("embed", "gemm", "gemm", "adam")[i % 4]
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
        events.append({**launch, "ts": i * 2.0, "dur": 1.0, "args": {"correlation": i}})
        own = {"stream": 7, "correlation": i}
        events.append(kernel(i, name=name, ts=30.0 + 10 * i, dur=9.0, args=own))
    t = load(trace_file(tmp_path, events))
    assert [m.iteration for m in t.marks] == [0, 1, 2]
    by_iteration = [t["iteration"][t["correlation"] == i].tolist() for i in range(12)]
    assert by_iteration == [[i // 4] * 2 for i in range(12)]
    assert any("repetition of its kernels" in p.what for p in t.problems)


@pytest.mark.some(3)
@pytest.mark.data("gpu_h100/traces")
@pytest.mark.parametrize("path", sorted((SHARED / "gpu_h100/traces").glob("*.gz")), ids=lambda p: p.name[:9])
def test_each_execution_of_a_step_on_a_gpu_is_an_iteration(path: Path) -> None:
    from pase.replay.measurement.model import measure
    from pase.replay.reports.trust import Run

    t = load(path)
    assert len(t.marks) == 3
    run = Run(measured=measure(t))
    assert run.iterations == [1, 2]  # nothing shows where the first one begins
    assert run.unexplained < 0.02 and abs(run.replayed_ns / run.measured_ns - 1) < 1e-3
    model = path.name.split(".")[0].replace("_batch_", "?batch=")
    rows = [line.split(",") for line in (SHARED / "gpu_h100/steps.csv").read_text().splitlines()]
    stated = next(row for row in rows if row[0] == model)
    # The clock's own steps differ between runs without and with a profiler.
    assert run.measured_ns / 1e9 == pytest.approx(float(stated[1]), rel=0.02)
