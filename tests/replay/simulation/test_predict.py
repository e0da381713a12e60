"""Iterations predicted from the others, compared with the truth of an independent simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cases.timelines import ImaginedRun, simulate
from pase.replay.simulation.predict import held_out
from tests.replay.runs import COMM_BOUND, GPU_BOUND, HOST_BOUND, measured


@pytest.mark.parametrize("shape", [GPU_BOUND, HOST_BOUND, COMM_BOUND])
@pytest.mark.parametrize("ranks", [1, 3])
def test_error_below_half_a_percent(tmp_path: Path, shape: dict, ranks: int) -> None:
    run = simulate(ImaginedRun(ranks=ranks, **shape))
    m = measured(tmp_path, run)
    predictions = held_out(m, [1, 2, 3, 4])
    assert len(predictions) == 4 * ranks
    for p in predictions:
        truth = run.iteration_us[p.rank][p.iteration] * 1e3
        assert abs(p.replayed_ns / truth - 1) < 0.005, (p, truth)


def test_long_runs_are_held_out_in_folds(tmp_path: Path) -> None:
    m = measured(tmp_path, simulate(ImaginedRun(ranks=1, iterations=12, noise=0.02)))
    iterations = list(range(12))
    single, folded = held_out(m, iterations, folds=12), held_out(m, iterations, folds=3)
    assert [p.iteration for p in folded] == [p.iteration for p in single] == iterations
    # All iterations of a fold have one prediction. With one fold per iteration, each is predicted from the other
    # eleven.
    assert len({p.replayed_ns for p in folded}) == 3
    assert len({p.replayed_ns for p in single}) > 3
