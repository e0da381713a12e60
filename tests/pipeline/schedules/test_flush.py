"""GPipe, 1F1B and eager 1F1B take the published time, with the published activations in flight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.pipeline.registry import schedule
from pase.pipeline.simulate import peak_bytes
from tests.pipeline.timing import sizes, step_s, whole


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
@given(f=whole, b=whole, **sizes)
def test_one_stage_a_rank(name, p, m, f, b):
    assert step_s(name, p, m, 1, f, b, 0.0) == (m + p - 1) * (f + b)
    held = {
        "gpipe": lambda r: m,
        "1f1b": lambda r: min(m, p - r),
        "eager-1f1b": lambda r: min(m, 2 * (p - r) - 1),
    }
    peak = peak_bytes(schedule(name, p, m), np.ones(p))
    assert peak.tolist() == [held[name](r) for r in range(p)]


@given(p=st.integers(2, 6), m=st.integers(1, 20), f=whole, b=whole)
def test_transfers_cost_1f1b_at_every_micro_batch_and_eager_only_on_the_way(p, m, f, b):
    c = min(f, b) / 8  # much shorter than compute
    m *= p
    assert step_s("gpipe", p, m, 1, f, b, 0.0, c) == (m + p - 1) * (f + b) + 2 * c * (p - 1)
    assert step_s("eager-1f1b", p, m, 1, f, b, 0.0, c) == (m + p - 1) * (f + b) + 2 * c * (p - 1)
    if f == b:
        plain = step_s("1f1b", p, m, 1, f, b, 0.0, c) - (m + p - 1) * (f + b)
        assert plain == 2 * c * ((p - 1) * m // p + p - 2) or p == 2
