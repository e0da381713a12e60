"""Interleaved and circular schedules take the published time, with the published activations in flight."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pase.pipeline.registry import schedule
from pase.pipeline.simulate import peak_bytes
from tests.pipeline.timing import step_s, whole


@given(f=whole, b=whole, v=st.integers(2, 4), p=st.integers(1, 5), k=st.integers(1, 4))
def test_interleaved_and_circular(f, b, v, p, k):
    m = p * k
    assert step_s("interleaved", p, m, v, f, b, 0.0) == v * m * (f + b) + (p - 1) * (f + b)
    assert step_s("circular", p, m, v, f, b, 0.0) == (m * v + p - 1) * (f + b)
    # Published, in stages of v chunks: p (1 + (p - 1) / (p v)), but at most all micro-batches.
    first = peak_bytes(schedule("interleaved", p, m, v), np.ones(p * v))[0]
    assert first == min(p * v + p - 1, m * v)
    assert (peak_bytes(schedule("circular", p, m, v), np.ones(p * v)) == m * v + p - 1).all()
