"""The masks of a StridedSlice: numpy's indexing is the oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.frontends.tf.graph import TfNode
from pase.frontends.tf.slices import Pick, positions

ENTRIES = st.lists(
    st.one_of(
        st.integers(-2, 1),
        st.sampled_from([None, Ellipsis]),
        st.builds(
            slice,
            st.one_of(st.none(), st.integers(-6, 6)),
            st.one_of(st.none(), st.integers(-6, 6)),
            st.sampled_from([None, 1, 2, -1, -3]),
        ),
    ),
    max_size=5,
)


def node(**masks: int) -> TfNode:
    attr: Any = {key: SimpleNamespace(i=value) for key, value in masks.items()}
    return TfNode(name="s", op="StridedSlice", inputs=(), attr=attr)


def encoded(entries: list[Any]) -> tuple[TfNode, list[int], list[int], list[int]]:
    """A numpy index as TensorFlow writes it: begin, end, strides, and one bit per entry in each mask."""
    masks = dict.fromkeys(("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"), 0)
    begin, end, strides = [], [], []
    for k, e in enumerate(entries):
        low, high, step = 0, 0, 1
        if e is Ellipsis:
            masks["ellipsis_mask"] |= 1 << k
        elif e is None:
            masks["new_axis_mask"] |= 1 << k
        elif isinstance(e, int):
            masks["shrink_axis_mask"] |= 1 << k
            low, high = e, e + 1
        else:
            masks["begin_mask"] |= (e.start is None) << k
            masks["end_mask"] |= (e.stop is None) << k
            low, high, step = e.start or 0, e.stop or 0, e.step or 1
        begin.append(low)
        end.append(high)
        strides.append(step)
    return node(**masks), begin, end, strides


def picked(x: np.ndarray, picks: list[Pick | None]) -> np.ndarray:
    """The elements that the entries take, dim by dim."""
    at = 0
    for p in picks:
        if p is None:
            at += 1
        elif p.fresh:
            x = np.expand_dims(x, at)
            at += 1
        elif p.shrink:
            x = x.take(p.picked[0], at)
        else:
            x = x.take(list(p.picked), at)
            at += 1
    return x


@settings(max_examples=200)
@given(ENTRIES)
def test_a_slice_takes_what_numpy_takes(entries: list[Any]) -> None:
    x = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    if sum(e is Ellipsis for e in entries) > 1:
        return
    given_node, *numbers = encoded(entries)
    try:
        wanted = x[tuple(entries)]
    except IndexError:
        with pytest.raises(ValueError, match=r"out of range|indices for 3 dims"):
            positions(given_node, x.shape, *numbers)
        return
    assert np.array_equal(picked(x, positions(given_node, x.shape, *numbers)), wanted)


def test_an_index_that_depends_on_data_takes_one_position_and_a_range_is_refused() -> None:
    (at,) = positions(node(shrink_axis_mask=1), (5,), None, None, [1])
    assert at is not None and at.shrink and at.dynamic and len(at.picked) == 1
    assert positions(node(begin_mask=1, end_mask=1), (5,), None, None, [1]) == [None]
    with pytest.raises(ValueError, match="depends on data"):
        positions(node(end_mask=1), (5,), None, None, [1])


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="stride is 0"):
        positions(node(), (5,), [0], [5], [0])
    with pytest.raises(ValueError, match="differ in length"):
        positions(node(), (5,), [0, 0], [5], [1])
