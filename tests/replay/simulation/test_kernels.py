"""The compiled event simulation gives what the one in plain Python gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from pase.replay.graph import DataflowGraph
from pase.replay.simulation.simulate import replay_graph
from tests.replay.simulation.graphs import graphs
from tests.replay.simulation.twin import replayed


@given(graphs())
def test_numba_is_python(g: DataflowGraph) -> None:
    a, b = replay_graph(g), replayed(g)
    for field in ("start_ns", "finish_ns", "ready_ns", "cause", "latest", "order"):
        assert np.array_equal(getattr(a, field), getattr(b, field)), field


@given(graphs(gangs=False))
def test_numba_is_python_with_priorities(g: DataflowGraph) -> None:
    a, b = replay_graph(g), replayed(g)
    assert np.array_equal(a.start_ns, b.start_ns)
    assert np.array_equal(a.cause, b.cause)
