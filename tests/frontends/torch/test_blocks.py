"""Repeated blocks of a traced model, and its batch."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from pase.errors import PaseError
from pase.frontends import registry
from pase.frontends.torch.blocks import batch_size, blocks_of, micro

pytestmark = pytest.mark.torch


def traced(layers: int, wide: int = 8) -> Any:
    import torch
    from torch import nn

    made = nn.Sequential(*(nn.Sequential(nn.Linear(wide, wide), nn.Tanh()) for _ in range(layers)))
    return registry.trace(made, torch.zeros(6, wide), loss=lambda m, x: m(x).square().mean())


def test_equal_layers_are_blocks_of_the_same_nodes() -> None:
    t = traced(4)
    nodes = list(t.scope.nodes)
    blocks = blocks_of(t)
    assert len(blocks) >= 3
    ops = [[str(n.target) for n in nodes[b.start : b.stop]] for b in blocks]
    assert all(o == ops[0] for o in ops) and any("linear" in o for o in ops[0])
    assert all(a.stop == b.start for a, b in pairwise(blocks))


def test_a_single_layer_is_no_block() -> None:
    assert blocks_of(traced(1)) == ()


def of_batch(*shapes: tuple[int, ...]) -> Any:
    import torch

    return SimpleNamespace(batch=tuple(torch.zeros(s) for s in shapes), graph=SimpleNamespace(name="m"))


def test_the_batch_is_the_size_that_most_inputs_begin_with() -> None:
    assert batch_size(of_batch((4, 2), (4,), (7, 4), ())) == 4
    with pytest.raises(PaseError, match="no batch") as e:
        batch_size(of_batch((), ()))
    assert e.value.where == "m"


def test_a_micro_batch_is_an_equal_part_of_the_batch() -> None:
    t = traced(1)
    assert micro(t, 1) is t
    (x,) = micro(t, 3).batch
    assert tuple(x.shape) == (2, 8)
    with pytest.raises(PaseError, match="a batch of 6 cannot be divided into 4 micro-batches"):
        micro(t, 4)
