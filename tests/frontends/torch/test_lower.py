"""Ops without a rule of pase's own."""

from __future__ import annotations

from typing import Any

import pytest

from pase.frontends import registry
from pase.frontends.registry import UnknownOp
from tests.frontends.torch.formulas import assert_unsharded

pytestmark = pytest.mark.torch


def test_an_op_without_rule_is_decomposed_or_named() -> None:
    """An op that PyTorch can decompose is decomposed. A custom op is named with its layer and line, or is not split."""
    import torch

    lib = torch.library.Library("pase_test", "FRAGMENT")
    lib.define("mystery(Tensor x) -> Tensor")
    lib.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("pase_test::mystery", lambda x: torch.empty_like(x), lib=lib)

    class Mystery(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return torch.ops.pase_test.mystery(torch.addcmul(self.inner(x), x, x)).sum()

    x = torch.zeros(2, 4)
    with pytest.raises(UnknownOp, match=r"test_lower.py:\d+: ") as e:
        registry.trace(Mystery(), x)
    assert e.value.where.startswith("Mystery: pase_test.mystery.default") and "replicate" in e.value.fix
    graph = registry.trace(Mystery(), x, unknown="replicate").graph
    assert any(op.kind == "opaque" for n in graph.nodes for op in n.ops)


@pytest.mark.some(6)
@pytest.mark.parametrize(
    "kind",
    [
        "GRUCell",
        "LSTMCell",
        "RNNCell",
        "cdist",
        "pdist",
        "cosine",
        "ranking",
        "diagonal",
        "chosen",
        "addbmm",
        "bessel",
        "median",
        "mixture",
        "mesh grid",
        "interleaved",
        "interleaved labels",
    ],
)
def test_the_step_is_the_unsharded_one(kind: str) -> None:
    assert_unsharded(kind)


def test_derivatives_at_zero_are_those_of_the_unsharded_step() -> None:
    """Of norms, distances and logarithms, where the formulas that they are written in have infinite ones."""
    assert_unsharded("edges")
