"""Clock alignment as in dPRO agrees with the alignment by ends."""

from __future__ import annotations

import numpy as np

from pase.replay.measurement.clocks import align
from tests.replay.runs import collectives


def test_dpro_form_agrees_within_what_ordering_leaves() -> None:
    t = collectives(3, [0.0, 3e6, -4e6], [0.0] * 3)
    ends, dpro = align(t), align(t, "dpro")
    for r in (1, 2):
        assert (
            abs(ends.clock(r).to_global(np.array([4e8]))[0] - dpro.clock(r).to_global(np.array([4e8]))[0])
            < 4.5e5
        )
        assert dpro.clock(r).uncertainty_ns < 4.5e5
