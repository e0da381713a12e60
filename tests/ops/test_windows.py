"""Convolutions and pooling: FLOPs by hand, and which spatial dims may be split."""

from __future__ import annotations

import math

import pytest

from pase.errors import PaseError
from pase.ir import Node, functions, verify
from pase.ops import GraphBuilder
from pase.ops.windows import ConvDims, Sliding, conv, window_reduce

B, C, O = 4, 6, 8
PLAIN = (0, 1, (2, 3))


def convolved(
    size: int,
    made: int,
    *,
    extent: int = 3,
    stride: int = 1,
    padding: int = 1,
    groups: int = 1,
    zeros: int = 1,
) -> Node:
    b = GraphBuilder("g")
    x, w = (
        b.input("x", (B, C, size, size), "float32"),
        b.parameter("w", (O, C // groups, extent, extent), "float32"),
    )
    conv(
        b,
        x,
        w,
        (B, O, made, made),
        "float32",
        ConvDims(x=PLAIN, w=PLAIN, out=PLAIN),
        Sliding(
            strides=(stride, stride),
            dilation=(1, 1),
            padding=(padding, padding),
            input_dilation=(zeros, zeros),
        ),
        groups=groups,
    )
    return verify(b.finish()).nodes[-1]


def flops(node: Node) -> float:
    return node.main.flops_per_point * math.prod(node.space[d].size for d in node.main.worked)  # type: ignore[misc]


@pytest.mark.parametrize("groups", [1, 2])
def test_flops_are_a_product_per_result_channel_and_filter_element(groups: int) -> None:
    assert flops(convolved(16, 16, groups=groups)) == 2 * B * O * 16 * 16 * (C // groups) * 9


def test_zeros_between_elements_are_no_work() -> None:
    """A transposed convolution of stride 2 reads an element in one of four places."""
    assert flops(convolved(16, 31, padding=1, zeros=2)) == 2 * B * O * 31 * 31 * C * 9 / 4


@pytest.mark.parametrize(
    ("size", "made", "stride", "splits"), [(16, 16, 1, True), (16, 8, 2, True), (16, 14, 1, False)]
)
def test_spatial_dims_may_be_split_if_blocks_align(size: int, made: int, stride: int, splits: bool) -> None:
    """Each block of the result must lie over as many elements as its stride says."""
    node = convolved(size, made, stride=stride, padding=1 if splits else 0)
    assert {node.space[d].kind for d in ("h0", "h1")} == {"parallel" if splits else "replicated"}
    assert node.space["c"].kind == "reduction" and node.space["r0"].kind == "window"


def test_filters_of_one_element_have_no_window() -> None:
    node = convolved(16, 16, extent=1, padding=0)
    assert all(w.window is None for a in node.main.reads for w in a.map.walks)


def test_groups_must_divide_the_channels() -> None:
    with pytest.raises(PaseError, match="8 output channels cannot be divided into 3 groups"):
        convolved(16, 16, groups=3)


def test_pooling_walks_only_the_dims_with_windows() -> None:
    b = GraphBuilder("g")
    x = b.input("x", (B, C, 16, 16), "float32")
    out = window_reduce(
        b,
        functions.WINDOW_MAX,
        x,
        (B, C, 8, 8),
        (1, 1, 2, 2),
        Sliding(strides=(1, 1, 2, 2), padding=(0, 0, 0, 0)),
    )
    node = verify(b.finish([out])).nodes[-1]
    assert str(node.main.reads[0].map) == "d0 d1 d2@2/2 d3@2/2"
    assert flops(node) == 4 * B * C * 8 * 8 and all(d.kind == "parallel" for d in node.space)
