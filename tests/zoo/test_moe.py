"""Mixture of experts against a loop over tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from pase.zoo.layers import arrays, normal
from pase.zoo.moe import expert_leaves, experts_forward, slots
from tests.zoo.helpers import close, draw


def dense_experts(x: Any, p: Any, chosen: int, capacity: int) -> np.ndarray:
    """For each token, the sum of its experts' results, weighted by its gates.

    Its experts are those with the largest logits, as long as they have capacity left.
    """
    p = {key: np.asarray(value, np.float64) for key, value in p.items()}
    y = np.zeros(x.shape)
    for row in range(x.shape[0]):
        used = dict.fromkeys(range(p["router"].shape[1]), 0)
        for position in range(x.shape[1]):
            token = np.asarray(x[row, position], np.float64)
            logits = token @ p["router"]
            best = np.argsort(-logits)[:chosen]
            gates = np.exp(logits[best]) / np.exp(logits[best]).sum()
            for expert, gate in zip(best.tolist(), gates, strict=True):
                used[expert] += 1
                if used[expert] <= capacity:
                    a = token @ p["gate"][expert]
                    hidden = a / (1 + np.exp(-a)) * (token @ p["up"][expert])
                    y[row, position] += gate * (hidden @ p["down"][expert])
    return y


@pytest.mark.parametrize(("capacity_percent", "drops"), [(400, False), (100, True), (50, True)])
def test_experts_are_the_per_token_reference(capacity_percent: int, drops: bool) -> None:
    """At 400% of the even share of 2 in 8, each expert has capacity for every token, so nothing is dropped."""
    seq, experts, chosen = 12, 8, 2
    x = draw(3, seq, 16)
    p = arrays(expert_leaves(16, 24, experts) | {"router": normal(16, experts, std=1.0)}, 1)
    capacity = slots(seq, experts, chosen, capacity_percent)
    y = jax.jit(partial(experts_forward, chosen=chosen, capacity_percent=capacity_percent))(x, p)
    close(y, dense_experts(x, p, chosen, capacity), 1e-4)
    unlimited = dense_experts(x, p, chosen, seq)
    assert bool(np.abs(unlimited - y).max() > 1e-2) == drops
