"""Send times, and problems that make no sense."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cases.schedules import link
from pase.errors import PaseError
from pase.schedule import (
    problem_from_times,
)
from pase.schedule.types import SendTime


@given(
    st.lists(
        st.tuples(st.integers(1, 10**6), st.floats(0, 1)), min_size=1, max_size=6, unique_by=lambda x: x[0]
    )
)
def test_a_curve_and_its_inverse(points: list[tuple[int, float]]) -> None:
    c = SendTime.table([p[0] for p in points], [p[1] for p in points])
    x = np.linspace(0, 2e6, 101)[1:]
    s = c.seconds_of(x)
    assert (np.diff(s) >= -1e-12).all()
    assert (c.bytes_within(s) >= x * (1 - 1e-9)).all()
    assert (c.best_rates(x) <= s / x * (1 + 1e-12)).all()


NET = (link("net", alpha_s=1e-4, beta=1e-9),)


def test_times_outside_the_iteration_are_named() -> None:
    with pytest.raises(PaseError) as e:
        problem_from_times(name="x", forward_s=1.0, backward_s=2.0, tensors=[("a", 1, 9.0, 0.0)], links=NET)
    assert "'a'" in e.value.where and "ready_s is 9.0" in e.value.what
