"""The perceptron's loss against numpy."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from pase import zoo


def test_the_loss_is_that_of_products_and_relus() -> None:
    model = zoo.reduced("mlp")
    given: tuple[Any, Any] = jax.tree.map(lambda x: np.asarray(x, np.float64), model.init(0))
    params, batch = given
    x = batch["inputs"]
    for p in params["hidden"]:
        x = np.maximum(x @ p["w"] + p["b"], 0.0)
    logits = x @ params["classifier"]["w"] + params["classifier"]["b"]
    right = logits[np.arange(len(x)), batch["labels"].astype(int)]
    wanted = (np.log(np.exp(logits).sum(-1)) - right).mean()
    assert float(jax.jit(model.loss_fn)(*model.init(0))) == pytest.approx(float(wanted), rel=1e-5)
