"""The compiled sweep of the depth-first search, against that of the dual."""

from __future__ import annotations

import numpy as np
import pytest

from pase.search.bounded import kernels_depth, kernels_flat
from tests.kernels.cases import flat_instance


@pytest.mark.parametrize("seed", range(20))
def test_with_nothing_decided_a_sweep_is_that_of_the_dual(seed: int) -> None:
    flat = flat_instance(np.random.default_rng(seed))
    tree, message = kernels_depth.new_tree(flat.slot, np.zeros(flat.messages)), np.zeros(flat.messages)
    choice, reduced = np.zeros(flat.n, np.int64), np.zeros(flat.cost.size)
    for forward in (True, False) * 3:
        want = kernels_flat.trws_pass(flat.graph, flat.cost, message, choice, reduced, forward, False)
        assert kernels_depth.sweep(flat.graph, flat.cost, tree, forward) == pytest.approx(want, rel=1e-12)
        assert np.allclose(tree.message, message, atol=1e-12) and np.allclose(
            tree.excess, reduced, atol=1e-12
        )
