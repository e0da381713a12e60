"""Ops that pase rewrites in other ops: the FLOPs of recurrent layers, and the refusal of sizes that depend on data."""

from __future__ import annotations

from typing import Any

import pytest

from bench.audit.torch_coverage import products
from pase.errors import PaseError
from pase.frontends import registry
from pase.ir import simplify, verify
from tests.backends.torch.steps import assert_unsharded

pytestmark = pytest.mark.torch
STEPS, BATCH, WIDE, HIDDEN = 50, 8, 12, 16


@pytest.mark.some(2)
@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_a_recurrent_layer_is_a_loop_over_time(kind: str, gates: int) -> None:
    """Two layers in two directions: for each, gates · (inputs + state) · state multiplications per time step.

    Dropout is only between layers.
    """
    import torch

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over = getattr(torch.nn, kind)(
                WIDE, HIDDEN, 2, batch_first=True, bidirectional=True, dropout=0.1
            )

        def forward(self, x: Any) -> Any:
            return self.over(x)[0].square().mean()

    module = Reads()
    traced = registry.trace(module, torch.zeros(BATCH, STEPS, WIDE))
    entering = (WIDE, 2 * HIDDEN)
    assert products(traced.graph) == sum(
        2 * 2 * gates * (n + HIDDEN) * HIDDEN * BATCH * STEPS for n in entering
    )
    assert traced.param_paths == tuple(k for k, _ in module.named_parameters())
    ops = [op for n in traced.graph.nodes for op in n.ops]
    assert sum(op.kind == "matmul" for op in ops) == 8
    assert sum(op.name == "dropout" for op in ops) == 1
    verify(simplify(traced.graph))


def test_sizes_that_depend_on_data_are_refused() -> None:
    import torch
    from torch.nn.utils.rnn import pack_padded_sequence

    class Picks(torch.nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind, self.inside, self.over = kind, torch.nn.Linear(4, 4), torch.nn.LSTM(4, 4)

        def forward(self, x: Any) -> Any:
            y, mask = self.inside(x), x.sum(-1) > 0
            if self.kind == "read":
                return y[mask].square().sum()
            if self.kind == "write":
                y[mask] = x[mask] * 2
                return y.sum()
            packed = pack_padded_sequence(y, torch.tensor([3, 2, 1]), enforce_sorted=True)
            return self.over(packed)[0].data.sum()

    x = torch.zeros(3, 3, 4)
    for kind, word, where, fix in (
        ("read", "mask", "aten.index.Tensor", "topk"),
        ("write", "mask", "aten.index.Tensor", "torch.where"),
        ("packed", "packed batch", "", "padded"),
    ):
        with pytest.raises(PaseError, match=word) as e:
            registry.trace(Picks(kind), x)
        assert where in e.value.where and fix in e.value.fix
        assert "test_written.py:" in e.value.where


PAIRS = [
    ("lstm", "fsdp"),
    ("lstm", "random1@2x2"),
    ("cells", "ours@2x2"),
    ("cells", "random2@2x2"),
    *((model, strategy) for model in ("bags", "masks", "waves") for strategy in ("fsdp", "random1@2x2")),
]


@pytest.mark.some(4)
@pytest.mark.parametrize(("model", "strategy"), PAIRS)
def test_the_step_is_the_unsharded_one(model: str, strategy: str) -> None:
    assert_unsharded(model, strategy)


@pytest.mark.parametrize("model", ["rows", "places", "instances"])
def test_picked_rows_and_places_are_those_of_the_unsharded_step(model: str) -> None:
    assert_unsharded(model, "random1@2x2")


def test_places_that_no_rule_gives_are_refused() -> None:
    import torch

    class Reads(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            y, at = torch.nn.functional.adaptive_max_pool2d(x, 2, return_indices=True)
            return (y * at).mean()

    with pytest.raises(PaseError, match="reads the places of the maxima, which"):
        registry.trace(Reads(), torch.randn(4, 3, 8, 8))


def test_running_statistics_that_an_export_leaves_out_are_refused() -> None:
    """PyTorch writes them although the op's schema does not say so."""
    import torch

    norm = torch.nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    with pytest.raises(PaseError, match="updates running statistics") as e:
        registry.trace(norm, torch.randn(8, 4, 6), loss=lambda norm, x: norm(x).square().mean())
    assert "track_running_stats=False" in e.value.fix
