"""Collectives as sends and receives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.replay.simulation.fine import best_parts, sync_ns


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 10**6))
@settings(max_examples=30)
def test_ring_replay_is_the_closed_form(ranks: int, parts: int, nbytes: int) -> None:
    """A ring takes 2(n−1) steps of nbytes/n, and parts are sent in sequence."""
    ns = sync_ns(float(nbytes), parts, ranks=ranks, latency_ns=100.0, bytes_per_ns=2.0)
    assert ns == pytest.approx(parts * 2 * (ranks - 1) * (100.0 + nbytes / parts / ranks / 2.0))


def test_parts_help_parameter_servers_and_not_rings() -> None:
    shape = {"ranks": 4, "latency_ns": 1000.0, "bytes_per_ns": 10.0}
    assert best_parts(1e8, scheme="ring", **shape)[0] == 1
    k, ns = best_parts(1e8, scheme="ps", **shape)
    assert k > 1
    assert ns < 0.6 * sync_ns(1e8, 1, scheme="ps", **shape)
    assert best_parts(10.0, scheme="ps", **shape)[0] == 1
