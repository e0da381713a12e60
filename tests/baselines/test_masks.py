"""Masks of configs by hand: a weight of 512 × 1024 and a batch of activations on a mesh of 2 × 4."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pase.baselines import roles
from pase.baselines.masks import fits, most, no_batch, only, state_apart, stored_apart, ways_over
from pase.ir import Access, AccessMap, Dim, IterationSpace, Node, Op, functions
from pase.machine import Mesh, load, mesh_from
from pase.tables.layouts import NOT_SPLIT, configs, state_index
from tests.ir.graphs import simple

MESH = Mesh(names=("a", "b"), sizes=(2, 4))
LARGEST = roles(simple("mlp"))
FIRST = replace(LARGEST, eager=True)


def parameter(*shape: int) -> Node:
    names = [f"d{i}" for i in range(len(shape))]
    write = Access("w", AccessMap.of(*names))
    op = Op(name="w", kind="parameter", function=functions.BY_KIND["parameter"], reads=(), writes=(write,))
    dims = [Dim(name=n, size=s) for n, s in zip(names, shape, strict=True)]
    return Node(name="w", space=IterationSpace((*dims, Dim(name="state", size=0, kind="state"))), ops=(op,))


def rows(cfg: np.ndarray, mask: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(row) for row in cfg[mask].tolist()}


def test_only_these_dims_are_split() -> None:
    cfg = np.array([[0, 1], [0, 0], [NOT_SPLIT, 1], [1, NOT_SPLIT]], np.int8)
    assert only(cfg, [0], [0]).tolist() == [True, True, False, False]
    assert only(cfg, [0, 1], [1, NOT_SPLIT]).tolist() == [False, False, True, True]
    assert ways_over(cfg, [0], [0, 1], MESH).tolist() == [2, 8, 1, 1]
    assert ways_over(cfg, [0], [1], MESH).tolist() == [1, 4, 1, 1]
    allowed = np.array([True, False, True, True])
    assert most(cfg, allowed, [1], MESH).tolist() == [True, False, True, False]


def test_a_large_weight_is_stored_split_on_its_largest_dim() -> None:
    node = parameter(512, 1024)
    cfg = configs(node, MESH)
    assert rows(cfg, stored_apart(LARGEST, node, cfg, [0, 1])) == {(1, 1)}
    # What tensor parallelism splits comes last, because its shards would be interleaved.
    assert rows(cfg, stored_apart(LARGEST, node, cfg, [1], taken=[1])) == {
        tuple(r) for r in cfg.tolist() if r[1] == 0
    }
    (state,) = state_index(node)
    assert rows(cfg, state_apart(node, cfg, [0, 1])) == {(state, state)}


@pytest.mark.parametrize(("shape", "dim"), [((512, 1024), 0), ((999, 1024), 1), ((4, 1 << 20), 1)])
def test_call_by_call_it_is_stored_split_on_its_first_dim(shape: tuple[int, ...], dim: int) -> None:
    """That all devices divide: a message then has the parts in their order."""
    node = parameter(*shape)
    cfg = configs(node, MESH)
    assert rows(cfg, stored_apart(FIRST, node, cfg, [0, 1])) == {(dim, dim)}


def test_a_small_weight_may_stay_whole() -> None:
    node = parameter(64, 128)
    cfg = configs(node, MESH)
    whole = (NOT_SPLIT, NOT_SPLIT)
    assert rows(cfg, stored_apart(LARGEST, node, cfg, [0, 1])) == {(1, 1), whole}
    (state,) = state_index(node)
    assert rows(cfg, state_apart(node, cfg, [0, 1])) == {(state, state), whole}


def test_what_no_axis_divides_stays_whole() -> None:
    node = parameter(999, 1001)
    cfg = configs(node, MESH)
    assert rows(cfg, stored_apart(LARGEST, node, cfg, [0, 1])) == {(NOT_SPLIT, NOT_SPLIT)}
    assert rows(cfg, state_apart(node, cfg, [0, 1])) == {(NOT_SPLIT, NOT_SPLIT)}


def test_a_batch_is_split_only_evenly() -> None:
    graph = simple("mlp")
    r = roles(graph)
    (size,) = set(r.sizes(graph, r.batch))
    assert no_batch(graph, r, 1) is no_batch(graph, r, size) is None
    assert no_batch(graph, r, 2 * size) == f"a batch of {size} is not divisible by {2 * size}"


@pytest.mark.parametrize(("mesh", "whole"), [("8x4", True), ("4x8", True), ("16x2", True), ("4x2x4", True)])
def test_axes_cover_whole_factors_of_link_levels(mesh: str, whole: bool) -> None:
    """Nodes of an H100 machine have 8 devices."""
    assert fits(mesh_from(mesh, 32), load("h100x8")) is whole
