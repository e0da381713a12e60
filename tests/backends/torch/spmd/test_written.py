"""Ops that pase writes in other ops, run by ``plan.torch``: the results equal those of PyTorch's op under any split."""

from __future__ import annotations

import pytest

from tests.backends.torch.models import case
from tests.backends.torch.test_plan import one_step

pytestmark = pytest.mark.torch
PAIRS = [
    ("lstm", "fsdp"),
    ("lstm", "random1@2x2"),
    ("cells", "ours@2x2"),
    ("cells", "random2@2x2"),
    *((model, strategy) for model in ("bags", "masks", "waves") for strategy in ("fsdp", "random1@2x2")),
]


@pytest.mark.parametrize(("model", "strategy"), PAIRS)
def test_the_step_is_the_unsharded_one(model: str, strategy: str) -> None:
    import torch

    c = case(model, 4)
    for loss, gradients, after in one_step(c, strategy):
        torch.testing.assert_close(loss, c.loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients, c.gradients, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(after, c.after, rtol=1e-12, atol=1e-12)


def test_elements_that_are_taken_in_order_are_not_cut_into_micro_batches() -> None:
    from pase.frontends.torch.batch import examples_meet

    c = case("masks", 4).case
    assert "cumsum" in str(examples_meet(c.traced, c.problem.graph))
