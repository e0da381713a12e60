"""Unification of dims: products are preserved, undoing restores the table, and factorings nest."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.ir.dims import Conflict, DimTable
from pase.ir.types import DimKind
from pase.ops.nests import common_factors

kinds: st.SearchStrategy[DimKind] = st.sampled_from(["parallel", "reduction", "replicated"])
shapes = st.lists(st.integers(1, 12), max_size=4)


def table(*shapes: list[int], kind: DimKind = "parallel") -> tuple[DimTable, list[list[Any]]]:
    t, keys = DimTable(), []
    for i, shape in enumerate(shapes):
        keys.append([(i, f"d{j}") for j in range(len(shape))])
        for key, size in zip(keys[-1], shape, strict=True):
            t.add(key, size, kind)
    return t, keys


def extent(t: DimTable, key: Any) -> int:
    return math.prod(t.size(r) for r in t.resolve(key))  # type: ignore[misc]


def state(t: DimTable, keys: list[list[Any]]) -> object:
    return [[(r, t.size(r), t.kind(r)) for r in t.resolve(k)] for ks in keys for k in ks]


@given(shapes, shapes)
def test_unified_walks_are_one(a: list[int], b: list[int]) -> None:
    """Every dim keeps its extent, and both walks resolve to the same finer dims, whose extents are those of a common
    factoring. If there is none, or if the extents differ, a Conflict is raised."""
    t, (x, y) = table(a, b)
    common = common_factors(a, b)
    try:
        t.unify(x, y)
    except Conflict:
        assert common is None or math.prod(a) != math.prod(b)
        return
    assert math.prod(a) == math.prod(b) and common is not None
    for keys, shape in ((x, a), (y, b)):
        assert [extent(t, k) for k in keys] == shape
    fine = [[r for k in keys for r in t.resolve(k) if t.size(r) != 1] for keys in (x, y)]
    assert fine[0] == fine[1]
    assert [t.size(r) for r in fine[0]] == [f for f in common[0] if f != 1]


@given(shapes, shapes, shapes, st.data())
def test_undo_restores(a: list[int], b: list[int], c: list[int], data: st.DataObject) -> None:
    t, keys = DimTable(), []
    for i, shape in enumerate((a, b, c)):
        keys.append([(i, j) for j in range(len(shape))])
        for key, size in zip(keys[-1], shape, strict=True):
            t.add(key, size, data.draw(kinds))
    try:
        with t.attempt():
            t.unify(keys[0], keys[1])
    except Conflict:
        return
    before = state(t, keys)
    with t.attempt() as attempt:
        with suppress(Conflict):
            t.unify(keys[1], keys[2])
        attempt.undo()
    assert state(t, keys) == before


@given(kinds, kinds)
def test_kinds_meet(a: DimKind, b: DimKind) -> None:
    """A dim that one side may not split is not split. A dim that is summed here and kept there is parallel."""
    t = DimTable()
    t.add("x", 6, a)
    t.add("y", 6, b)
    with t.attempt() as attempt:
        t.unify(["x"], ["y"])
    (root,) = t.resolve("y")
    wanted = "replicated" if "replicated" in (a, b) else a if a == b else "parallel"
    assert t.resolve("x") == (root,) and t.kind(root) == wanted
    assert attempt.restricted == ((a == "replicated") != (b == "replicated"))


def test_a_walk_may_name_a_dim_twice() -> None:
    """Each occurrence is what the dim has become by then."""
    t, ((a, b), (c,)) = table([2, 2], [2])
    with t.attempt() as attempt:
        t.unify([a, b], [c, c])
        assert t.resolve(a) == t.resolve(b) == t.resolve(c)
        attempt.undo()
    assert len({t.resolve(k) for k in (a, b, c)}) == 3


def test_attempts_do_not_nest() -> None:
    t = DimTable()
    with t.attempt(), pytest.raises(RuntimeError, match="do not nest"), t.attempt():
        pass


@st.composite
def of_one_size(draw: Any) -> tuple[list[int], list[int]]:
    """Two shapes with the same prime factors, each in its own order and grouping."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), max_size=5))

    def grouped(order: list[int]) -> list[int]:
        cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
        return [math.prod(order[i:j]) for i, j in zip([0, *cuts], [*cuts, len(order)], strict=True)]

    return grouped(primes), grouped(draw(st.permutations(primes)) if draw(st.booleans()) else primes)


@given(of_one_size())
def test_common_factors(two: tuple[list[int], list[int]]) -> None:
    """The factors make up both shapes, in order. There are none only if the cumulative products do not nest."""
    a, b = two
    found = common_factors(a, b)
    cuts = [sorted({math.prod(s[i:]) for i in range(len(s) + 1)}) for s in (a, b)]
    merged = sorted({*cuts[0], *cuts[1]})
    nests = all(y % x == 0 for x, y in pairwise(merged))
    assert (found is not None) == nests
    if found is not None:
        factors, of_a, of_b = found
        for shape, of in ((a, of_a), (b, of_b)):
            assert [math.prod(factors[i] for i in dim) for dim in of] == shape  # type: ignore[misc]
            assert [i for dim in of for i in dim] == list(range(len(factors)))
