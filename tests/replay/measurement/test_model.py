"""Times of one iteration, estimated from a simulator's traces, and traces that have nothing to estimate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate
from pase.errors import PaseError
from pase.replay import align, measure
from pase.replay.simulation.predict import held_out
from pase.replay.traces.ingest import load
from tests.replay.runs import COMM_BOUND, GPU_BOUND, HOST_BOUND, measured
from tests.replay.traces.files import kernel, trace_file


@pytest.mark.parametrize("shape", [GPU_BOUND, HOST_BOUND, COMM_BOUND])
def test_noise_averages_out(tmp_path: Path, shape: dict) -> None:
    run = simulate(ImaginedRun(ranks=2, iterations=9, noise=0.05, **shape))
    m = measured(tmp_path, run)
    predictions = held_out(m, list(range(1, 9)))
    for rank in (0, 1):
        replayed = np.median([p.replayed_ns for p in predictions if p.rank == rank])
        truth = np.median(run.iteration_us[rank][1:]) * 1e3
        assert abs(replayed / truth - 1) < 0.01


def test_a_trace_without_device_ops_says_what_to_record(tmp_path: Path) -> None:
    call = kernel(0, cat="cpu_op", name="aten::add")
    with pytest.raises(PaseError, match="no device op") as e:
        measure(align(load(trace_file(tmp_path, [call]))))
    assert "CUDA, XPU or MTIA" in e.value.fix


def test_a_trace_that_is_cut_before_its_device_ops_says_so(tmp_path: Path) -> None:
    calls = [kernel(0, cat="cpu_op", name="aten::add"), kernel(9, cat="cpu_op", name="aten::mul")]
    path = trace_file(tmp_path, [*calls, kernel(20)])
    text = path.read_text()
    path.write_text(text[: text.rindex("{")])
    with pytest.raises(PaseError, match=r"no device op.*is cut or damaged after 2 events") as e:
        measure(align(load(path)))
    assert e.value.fix.startswith("mend that first")
