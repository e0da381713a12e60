"""ZB-V and DualPipeV take the published time at equal stages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.timing import period_s, step_s, whole


@given(t=whole, p=st.integers(1, 5), more=st.integers(0, 7))
def test_vees(t, p, more):
    m = 2 * p + more
    assert period_s("zb-v", p, m, 2, t, t, t) == 2 * m * 3 * t
    # The step also has the last rank's fill. In the period, the next step's first forwards cover it.
    assert step_s("zb-v", p, m, 2, t, t, t) == 2 * m * 3 * t + (p - 1) * t


@given(w=whole, f=whole, p=st.integers(1, 6), more=st.integers(0, 7))
def test_dualpipev_with_forward_and_backward_one_after_the_other(w, f, p, more):
    f, m = max(f, w), 2 * p + more
    assert step_s("dualpipev", p, m, 2, f, f, w) == 2 * m * (f + f + w) + (p - 1) * (f + f - w)
