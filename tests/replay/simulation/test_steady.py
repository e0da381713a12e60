"""Consecutive iterations, and replays in the order of another graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pase.replay.graph import DataflowGraph, build_graph
from pase.replay.simulation.simulate import replay_graph
from pase.replay.simulation.steady import steady
from tests.replay.simulation.graphs import graphs


@given(graphs(), st.data())
def test_faster_ops_only_help_in_the_order_of_before(g: DataflowGraph, data: st.DataObject) -> None:
    shorter = [data.draw(st.integers(0, int(d))) for d in g.duration_ns]
    less = replace(g, duration_ns=np.array(shorter, dtype=np.float64))
    before, after = (steady(x, before=b).replay.finish_ns for x, b in ((g, None), (less, g)))
    assert (after <= before).all()


def test_less_to_do_takes_longer_only_in_another_order() -> None:
    """Graham's anomaly: with a shorter copy, 'short' is ready before 'long' and runs first."""
    tasks = [
        {"device": (0, "copies"), "duration_ns": 3, "name": "copy"},
        {"device": (0, "first"), "duration_ns": 2, "name": "start"},
        {"device": (0, "link"), "duration_ns": 9, "name": "long"},
        {"device": (0, "link"), "duration_ns": 9, "name": "short"},
        {"device": (0, "last"), "duration_ns": 20, "name": "end"},
    ]
    g = build_graph(tasks, [(0, 3), (1, 2), (2, 4)])
    less = replace(g, duration_ns=np.array([1.0, 2, 9, 9, 20]))
    assert replay_graph(less).makespan_ns > replay_graph(g).makespan_ns
    assert steady(less, before=g).replay.makespan_ns == replay_graph(g).makespan_ns
