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


def test_places_in_sorted_rows_are_those_of_the_unsharded_step() -> None:
    assert_unsharded("sorted places")
