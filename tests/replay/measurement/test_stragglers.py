"""Ranks that the others wait for, and what made them late."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate
from pase.replay.changes.whatif import apply
from pase.replay.reports.diagnose import diagnose_run
from pase.replay.simulation.steady import evaluate
from tests.replay.runs import measured


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_late_by_hand_is_named_and_balance_helps(tmp_path: Path, rank: int, ranks: int) -> None:
    """The rank's host works 5 ms longer before the first launch of each step."""
    late = 5000.0
    run = simulate(
        ImaginedRun(ranks=ranks, iterations=6, slow_rank=rank, late_us=late, kernel_us=200.0, between_us=4.0)
    )
    m = measured(tmp_path, run)
    d = diagnose_run(m)
    f = next(f for f in d.findings if f.kind == "straggler")
    assert f"wait for rank {rank}" in f.title and f.measured_ns > 0.8 * late * 1e3
    assert all(s.where == "host" for s in d.stragglers if s.rank == rank and s.caused_ns > 1e6)
    balanced = max(evaluate(apply(d.run.graph, "balance=1")).values())
    assert balanced < d.run.replayed_ns
    even = simulate(ImaginedRun(ranks=ranks, iterations=6, kernel_us=200.0, between_us=4.0))
    assert balanced == pytest.approx(np.median(even.iteration_us[0][1:]) * 1e3, rel=0.02)
