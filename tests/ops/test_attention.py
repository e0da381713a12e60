"""Attention as one loop nest: its dims, its FLOPs, and shapes that do not fit."""

from __future__ import annotations

import math

import pytest

from pase.errors import PaseError
from pase.ir import Node, functions, verify
from pase.ops import GraphBuilder
from pase.ops.attention import attention

B, Q, S, KV, G, D, E = 2, 16, 12, 3, 2, 8, 5


def attended(order: tuple[int, ...] = (0, 1, 2, 3), *, causal: bool = False, mask: bool = False) -> Node:
    b = GraphBuilder("g")

    def array(name: str, *shape: int) -> object:
        return b.input(name, tuple(shape[order.index(i)] for i in range(4)), "float32")

    q, k, v = array("q", B, Q, KV * G, D), array("k", B, S, KV, D), array("v", B, S, KV, E)
    extra = [b.input("mask", (B, 1, Q, S), "bool")] if mask else []
    attention(b, q, k, v, extra, order=order, causal=causal)  # type: ignore[arg-type]
    return verify(b.finish()).nodes[-1]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_flops_are_those_of_two_products(order: tuple[int, ...]) -> None:
    """Whatever the order of the dims, the scores take a multiply-add per d, and the result one per e."""
    node = attended(order)
    points = math.prod(node.space[d].size for d in node.main.worked)  # type: ignore[misc]
    assert points * node.main.flops_per_point == 2 * B * Q * S * KV * G * (D + E)


def test_keys_and_widths_may_not_be_split() -> None:
    kinds = {d.name: d.kind for d in attended().space}
    assert {d for d, k in kinds.items() if k == "parallel"} == {"b", "q", "h", "g"}
    assert {d for d, k in kinds.items() if k == "replicated"} == {"s", "d", "e"}


def test_heads_that_share_a_key_are_adjacent() -> None:
    reads = [str(a.map) for a in attended().main.reads]
    assert reads == ["b q (h g) d", "b s h d", "b s h e"]
    assert [str(a.map) for a in attended().main.writes] == ["b q (h g) e", "b q (h g)"]


def test_a_mask_broadcasts() -> None:
    assert str(attended(mask=True).main.reads[3].map) == "b 1 q s"
    assert attended(causal=True).main.function is functions.CAUSAL_ATTENTION


@pytest.mark.parametrize("k", [(B, S, 4, D), (B, S + 1, KV, D)])
def test_shapes_that_do_not_fit_are_refused(k: tuple[int, ...]) -> None:
    """Heads that the keys' heads do not divide, and other keys than values."""
    b = GraphBuilder("g")
    shapes = (B, Q, KV * G, D), k, (B, S, KV, E)
    q, keys, v = (b.input(n, s, "float32") for n, s in zip("qkv", shapes, strict=True))
    with pytest.raises(PaseError, match="do not fit each other"):
        attention(b, q, keys, v)
