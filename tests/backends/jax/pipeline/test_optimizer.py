"""The state of an optimizer in stages."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from tests.backends.jax.pipeline.staged import chained, staged

pytestmark = pytest.mark.usefixtures("double")


def test_constants_in_an_optimizers_state_are_on_every_rank():
    plan, w, _, _ = chained()
    state = staged(plan, "1f1b", 1, (2, 2)).jax.init(optax.contrib.muon(1e-3), w)
    (coefficients,) = (x for x in jax.tree.leaves(state) if x.shape == (3,))
    np.testing.assert_allclose(coefficients, (3.4445, -4.775, 2.0315))
