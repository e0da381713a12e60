"""Zero-bubble schedules take the published time at equal stages, with the published memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.pipeline.registry import schedule
from pase.pipeline.simulate import peak_bytes
from tests.pipeline.timing import period_s, step_s, whole


@given(w=whole, f=whole, i=whole, p=st.integers(1, 6), more=st.integers(0, 7))
def test_zero_bubble(w, f, i, p, more):
    """If weight gradients take no longer than the other actions, they fill the drain of each rank."""
    f, i, m = max(f, w), max(i, w), 2 * p + more
    assert step_s("zb-h1", p, m, 1, f, i, w) == m * (f + i + w) + (p - 1) * (f + i - w)
    assert period_s("zb-h2", p, m, 1, f, i, w) == m * (f + i + w) + (p - 1) * (f + i - 2 * w)


@pytest.mark.parametrize("p", [1, 2, 4, 6])
def test_activations_of_zero_bubble_schedules(p):
    """A rank holds whole micro-batches, and parts of those that still need their weight gradients."""
    m = 4 * p
    kept, left = np.ones(p), np.full(p, 0.25)
    h1, h2 = (peak_bytes(schedule(name, p, m), kept, left) for name in ("zb-h1", "zb-h2"))
    for r in range(p):
        assert h1[r] == (p - r) + r * 0.25
        assert h2[r] == (2 * (p - r) - 1) + 2 * r * 0.25
    assert (peak_bytes(schedule("zb-v", p, m, 2), np.ones(2 * p)) <= 2 * p).all()
    assert (peak_bytes(schedule("dualpipev", p, m, 2), np.ones(2 * p)) <= 2 * p + 1).all()
