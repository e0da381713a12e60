"""Ops that move data: a dim may be split exactly if halves of it, moved apart, make the whole."""

from __future__ import annotations

from typing import Any

import pytest

from pase.frontends import registry
from pase.ir import simplify, verify
from tests.frontends.torch.formulas import assert_unsharded

pytestmark = pytest.mark.torch


def moves() -> dict[str, Any]:
    import torch

    return {
        "slice": lambda x: x[:, 2:5],
        "flip": lambda x: x.flip(2),
        "roll": lambda x: x.roll(2, 1),
        "tile": lambda x: x.repeat(1, 3, 1),
        "concatenate": lambda x: torch.cat([x, 2 * x], 0),
        "pad": lambda x: torch.nn.functional.pad(x, (1, 2)),
    }


@pytest.mark.parametrize("name", ["slice", "flip", "roll", "tile", "concatenate", "pad"])
def test_a_dim_is_split_exactly_if_halves_make_the_whole(name: str) -> None:
    import torch

    op = moves()[name]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(8))

        def forward(self, x: Any) -> Any:
            return op(x * self.w).square().sum()

    x = torch.arange(4.0 * 6 * 8).reshape(4, 6, 8)
    graph = registry.trace(Model(), x).graph
    verify(simplify(graph))
    (node,) = (n for n in graph.nodes if n.main.name == name)
    made = node.main.writes[0].tensor
    assert graph.tensors[made].shape == tuple(op(x).shape)
    kinds = {d.name: d.kind for d in node.space}
    for dim, walk in enumerate(node.main.reads[0].map.walks):
        halves = torch.cat([op(half) for half in x.chunk(2, dim)], dim)
        alike = halves.shape == op(x).shape and bool(torch.equal(halves, op(x)))
        assert alike == all(kinds[d] == "parallel" for d in walk.dims), (name, dim)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "kind",
    ["sorted places", "like another", "frames", "diagonals", "index reduce", "filled", "joined", "counts"],
)
def test_the_step_is_the_unsharded_one(kind: str) -> None:
    assert_unsharded(kind)


@pytest.mark.parametrize(
    "name", ["unfold", "overlapping", "strided", "written", "waves", "kthvalue", "median", "searchsorted"]
)
def test_examples_of_a_batch_do_not_meet(name: str) -> None:
    """Each op on rows of their own can be split over the batch."""
    import torch

    def written(x: Any) -> Any:
        y = x.clone()
        y.as_strided((7, 4), (12, 2), 1).mul_(2)
        return y

    ops = {
        "unfold": lambda x: x.unfold(1, 4, 4),
        "overlapping": lambda x: x.unfold(1, 4, 2),
        "strided": lambda x: x.as_strided((7, 4, 2), (12, 2, 3), 1),
        "written": written,
        "waves": lambda x: torch.stft(x, 6, 2, window=torch.ones(6), return_complex=True).abs(),
        "kthvalue": lambda x: x.kthvalue(3)[0],
        "median": lambda x: x.median(1)[0],
        "searchsorted": lambda x: torch.searchsorted(x.sort(1)[0], x) * x,
    }

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = torch.nn.Linear(12, 12)

        def forward(self, x: Any) -> Any:
            return ops[name](self.inside(x)).square().mean()

    kinds = ("gather", "scatter", "sequential", "opaque")
    for n in registry.trace(Model(), torch.randn(7, 12)).graph.nodes:
        assert n.kind not in kinds or any((d.size, d.kind) == (7, "parallel") for d in n.space), n.name
