"""Loops and branches of TensorFlow."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")
from pase.frontends.tf.frontend import trace
from tests.frontends.tf.graphs import frozen, lstm
from tests.ir.graphs import flops

BATCH = {"batch": 4}


def test_lstm_is_a_loop_whose_body_is_lowered() -> None:
    """2·4·(in + hidden)·hidden FLOPs per layer and time step, plus the classifier, for every form of the model."""
    model = lstm(vocabulary=50, width=8, steps=6)
    wanted = 4 * (2 * 6 * 2 * 4 * (8 + 8) * 8 + 2 * 8 * 50)
    live = trace(model, dims=BATCH)
    assert flops(live.graph, "matmul") == wanted
    assert {op.times for n in live.graph.nodes for op in n.ops if op.kind == "matmul"} == {1, 6}
    assert sum(n.kind == "carry" for n in live.graph.nodes) == 4
    for form in ("lstm", "lstm v1"):
        assert flops(trace(frozen(form), dims=BATCH).graph, "matmul") == wanted
