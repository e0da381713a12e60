"""Lower bounds, against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from pase.schedule.bound import jackson_s


@pytest.mark.parametrize("n", [1, 5, 100])
def test_jackson_is_the_windows_maximum(n: int) -> None:
    """Jackson's bound is the maximum over (R, Q) of R + work released at R or later with a tail of at least Q + Q."""
    g = np.random.default_rng(n)
    r, p, q = g.integers(0, 50, n) * 1.0, g.integers(1, 9, n) * 1.0, g.integers(0, 50, n) * 1.0
    windows = max(a + p[(r >= a) & (q >= b)].sum() + b for a in r for b in q if ((r >= a) & (q >= b)).any())
    assert jackson_s(r, p, q) == windows
