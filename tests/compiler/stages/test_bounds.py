"""The bound on stages, against random splits and cuts."""

from __future__ import annotations

import numpy as np
import pytest

from pase.compiler.stages.bounds import StageBounds
from pase.compiler.stages.menu import FIRST, MIDDLE, StageRole
from pase.compiler.stages.search import StageMenu
from pase.pipeline.registry import schedule
from pase.pipeline.simulate import simulate
from tests.compiler.stages.staged import SCANNED, tables_of


@pytest.mark.some(1)
@pytest.mark.parametrize(("limited", "slow"), [(False, 1.0), (True, 1.0), (False, 0.15), (True, 0.15)])
def test_no_splits_and_no_cuts_beat_the_bound(limited, slow):
    """Random splits of every stage and random cuts under a schedule, priced as for a plan, do not beat the bound.

    If only the schedule with the lowest bound gets more rounds, the least bound is as high as if all of them did.
    """
    tried = (("hoisted", False), ("each", False), ("each", True))
    ways = [tables_of(SCANNED, 4, weights, again, slow) for weights, again in tried]
    rng, closest = np.random.default_rng(0), 0.0
    most = 0.9 * ways[0].cheapest(FIRST, 4).nbytes(4, 2)
    menu = StageMenu(ways, 2, 4, most if limited else np.inf)
    bounds, fewer = (StageBounds(tables=ways, ranks=2, limit=menu.limits) for _ in range(2))
    every = [schedule(name, 2, 4, v) for name, v in (("1f1b", 1), ("interleaved", 2), ("zb-v", 2))]
    together, alone = fewer.least_of(every, np.inf), list[float]()
    for s, low in zip(every, together, strict=True):
        roles = [StageRole(first=k == 0, last=k == s.stages - 1) for k in range(s.stages)]
        prices = [p * ways[0].least_s(MIDDLE, 4) / most for p in (0.0, 0.1, 3.0)]
        splits = [
            [t.cheapest(r, 8 / s.stages, p, 2, step) for t in ways for p in prices for step in t.steps]
            for r in roles
        ]
        alone.append(bounds.least_s(s))
        least, seen = max(alone[-1], low), 0
        for _ in range(40):
            problem = menu.problem(s, tuple(w[rng.integers(len(w))] for w in splits))
            counts = 1 + rng.multinomial(8 - s.stages, np.ones(s.stages) / s.stages)
            rows, room = problem.memory_rows
            if not limited or (rows @ counts <= room).all():
                step = simulate(s, problem.times(counts)).step_s
                assert step >= least * (1 - 1e-6)
                seen, closest = seen + 1, max(closest, least / step)
        assert seen
    assert closest > 0.8 and min(together) >= min(alone) * (1 - 5e-3)
