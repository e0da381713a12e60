"""Values along lines: the error that is allowed is that of rounding."""

from __future__ import annotations

import numpy as np

from pase.plan.gradient_lines import Scatter, judged
from pase.plan.gradient_steps import POINTS, AlongLine


def test_the_allowed_error_is_that_of_rounding():
    """Of two thousand lines without an error none disagrees; an error of twenty times their scatter always does."""
    rng, scatter = np.random.default_rng(1), Scatter()

    def line(extra: float) -> AlongLine:
        s = np.linspace(0, 1, POINTS)
        f = 1 + 0.01 * s + 0.001 * s**2 + rng.normal(size=POINTS) * 1e-6 + extra * s
        slopes = 0.01 + 0.002 * s
        return AlongLine(
            losses=f, slopes=slopes[:, None], reach=np.array([0.01]), loss_eps=2.0**-52, slope_eps=2.0**-52
        )

    assert sum(judged(line(0.0), scatter).disagrees for _ in range(2_000)) == 0
    assert all(judged(line(2e-5), scatter).disagrees for _ in range(100))
