"""Ranks that are copies of traced ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cases.timelines import ImaginedRun
from bench.cases.timelines import simulate as simulate_data_parallel
from bench.cases.timelines import write as write_data_parallel
from pase.replay import align, load, measure
from pase.replay.reports.trust import Run
from pase.replay.simulation.chance import with_ranks
from pase.replay.simulation.steady import evaluate


def test_ranks_that_are_copies_replay_as_the_traced_ones_do(tmp_path: Path) -> None:
    run = simulate_data_parallel(ImaginedRun(ranks=2, iterations=3))
    g = Run(measured=measure(align(load(write_data_parallel(run, tmp_path))))).graph
    many = with_ranks(g, 5)
    assert many is not None and len(many.graph.ranks) == 5
    assert max(evaluate(many.graph).values()) == pytest.approx(max(evaluate(g).values()), rel=1e-6)
    alone = simulate_data_parallel(ImaginedRun(ranks=1, iterations=3))
    g = Run(measured=measure(align(load(write_data_parallel(alone, tmp_path / "one"))))).graph
    assert with_ranks(g, 2) is None
