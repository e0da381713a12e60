"""The LSTM against a loop of Flax's cells."""

from __future__ import annotations

from typing import Any

import flax.linen
import jax.numpy as jnp

from pase.zoo.rnn import lstm
from tests.zoo.helpers import close, draw


def test_lstm_is_a_loop_of_cells() -> None:
    d, hidden = 5, 7
    x = draw(4, 3, d)
    p = {"wx": draw(d, 4, hidden), "wh": draw(hidden, 4, hidden), "b": draw(4, hidden)}
    cell = flax.linen.LSTMCell(hidden)
    weights = {}
    for gate, letter in enumerate("ifgo"):
        weights[f"i{letter}"] = {"kernel": p["wx"][:, gate]}
        weights[f"h{letter}"] = {"kernel": p["wh"][:, gate], "bias": p["b"][gate]}
    state = (jnp.zeros((3, hidden)), jnp.zeros((3, hidden)))
    outputs: list[Any] = []
    for step in x:
        state, y = cell.apply({"params": weights}, state, step)
        outputs.append(y)
    close(lstm(x, p), jnp.stack(outputs))
