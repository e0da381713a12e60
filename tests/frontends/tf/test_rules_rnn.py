"""Fused recurrent layers: 2·gates·(inputs + state)·state FLOPs per layer, direction and time step."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

from pase.errors import PaseError
from pase.frontends.tf.frontend import trace
from tests.frontends.tf.graphs import graph
from tests.ir.graphs import flops

STEPS, BATCH, WIDE, HIDDEN = 5, 4, 6, 8


def layer(mode: str, layers: int, ways: int = 1, batch: int = BATCH) -> Any:
    zeros = [
        (
            name,
            "Const",
            [],
            {"value": tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(1.0, "float32", shape))},
        )
        for name, shape in (
            ("h", (layers * ways, batch, HIDDEN)),
            ("c", (layers * ways, batch, HIDDEN)),
            ("p", (99,)),
        )
    ]
    attributes = {"rnn_mode": mode, "direction": "bidirectional" if ways == 2 else "unidirectional"}
    made = [("r", "CudnnRNNV2", ["x", "h", "c", "p"], {**attributes, "T": tf.float32})]
    return trace(graph(*zeros, *made, ("o", "Neg", ["r:0"], {"T": tf.float32}), shape=(STEPS, BATCH, WIDE)))


@pytest.mark.parametrize(("mode", "gates"), [("lstm", 4), ("gru", 3), ("rnn_relu", 1)])
@pytest.mark.parametrize(("layers", "ways"), [(1, 1), (2, 1), (3, 2)])
def test_a_layer_is_its_gates_products(mode: str, gates: int, layers: int, ways: int) -> None:
    made = layer(mode, layers, ways).graph
    entering = [WIDE] + [ways * HIDDEN] * (layers - 1)
    assert flops(made, "opaque") == sum(
        2 * gates * ways * (n + HIDDEN) * HIDDEN * STEPS * BATCH for n in entering
    )
    (node,) = (n for n in made.nodes if n.kind == "opaque")
    assert [d.size for d in node.space if d.kind == "parallel"] == [BATCH]
    assert made.tensors[made.outputs[0]].shape == (STEPS, BATCH, ways * HIDDEN)


def test_a_state_of_another_batch_or_kind_is_refused() -> None:
    with pytest.raises(PaseError, match="does not fit an input"):
        layer("lstm", 1, batch=3)
    with pytest.raises(PaseError, match="'peephole' is not one of lstm, gru"):
        layer("peephole", 1)
