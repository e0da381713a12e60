"""The compiled kernel against the one in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from pase.pipeline.registry import schedule
from pase.pipeline.simulate import simulate
from pase.pipeline.types import StageTimes
from tests.pipeline.timing import CASES


def test_both_kernels_come_to_the_same_bits():
    rng = np.random.default_rng(3)
    for name, v in CASES:
        s = schedule(name, 4, 8, v)
        t = StageTimes.of(
            rng.random(4 * v),
            rng.random(4 * v),
            rng.random(4 * v),
            ranks=4,
            recompute=rng.random(4 * v),
            send=rng.random(4 * v - 1),
            before=rng.random(4),
            after=rng.random(4),
        )
        one, two = (simulate(s, t, kernel=k) for k in ("numba", "numpy"))
        assert one.end.tobytes() == two.end.tobytes() and one.step_s == two.step_s
        assert (one.path.runs == two.path.runs).all() and (one.path.crossed == two.path.crossed).all()
        if not s.lockstep:
            assert one.path.seconds(t) == pytest.approx(one.step_s)
