"""What device ops wait for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.cases.timelines import ImaginedRun, simulate
from pase.replay.graph import EDGES
from pase.replay.measurement.model import estimate
from tests.replay.runs import COMM_BOUND, measured


def test_no_wait_is_invented(tmp_path: Path) -> None:
    run = simulate(ImaginedRun(ranks=2, **COMM_BOUND))
    m = measured(tmp_path, run)
    g = estimate(m, [1, 2, 3])
    waits = np.flatnonzero(g.edge_kind == EDGES.index("wait"))
    # Each rank has one wait per bucket and one for the optimizer.
    assert len(waits) == 2 * (4 + 1)
