"""The synchronized tensors of a graph, and which of them can be sent as one message."""

from __future__ import annotations

from dataclasses import replace

from pase.replay.changes.coarse import coarsen
from pase.replay.graph import build_graph
from pase.replay.simulation.simulate import replay_graph
from pase.replay.types import COLLECTIVE, OPERATIONS


def test_fusing_past_a_matrix_product_that_may_need_the_result_is_refused() -> None:
    """The consumer of a forward all-gather runs before the next producer, so no bucket may contain both."""
    kind = {"kind": COLLECTIVE, "operation": OPERATIONS.index("all_gather"), "nbytes": 1000}
    tasks = [
        {"device": (0, "stream 7"), "duration_ns": 10, "name": "elementwise"},
        {"device": (0, "link"), "duration_ns": 10, "name": "all-gather.1", **kind},
        {"device": (0, "stream 7"), "duration_ns": 10, "name": "gemm"},
        {"device": (0, "link"), "duration_ns": 10, "name": "all-gather.2", **kind},
    ]
    g = build_graph(tasks, [(0, 1), (1, 2), (2, 3)])
    c = coarsen(g, replay_graph(g))
    assert not c.may_join([0, 1])
    light = replace(g, names=tuple("copy" if n == "gemm" else n for n in g.names))
    assert coarsen(light, replay_graph(light)).may_join([0, 1])
