"""MG-WFBP does what its paper says."""

from __future__ import annotations

from bench.cases.schedules import chain, link
from pase.schedule import (
    Options,
    get_policy,
)


def test_mg_wfbp_merges_what_would_wait_anyway() -> None:
    """With a startup of 3 s, the second gradient is ready 1 s after the first, before the first could be sent."""
    slow = chain([1.0] * 3, [1.0, 9.0, 1.0], [1, 1, 1], link(alpha_s=3.0))
    assert [len(m.pieces) for m in get_policy("mg_wfbp").make(slow, Options()).messages] == [1, 2]
    cheap = chain([1.0] * 3, [1.0, 9.0, 1.0], [1, 1, 1], link(alpha_s=0.0))
    assert [len(m.pieces) for m in get_policy("mg_wfbp").make(cheap, Options()).messages] == [1, 1, 1]
