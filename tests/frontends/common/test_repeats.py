"""Equal runs and crossing bytes, against counting by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pase.frontends.common.repeats import crossing, equal_runs


def runs(tokens: str, cut: list[int] | None = None, heavy: str = "") -> list[tuple[int, int]]:
    """The runs of letters. heavy: the letters that are work; all, if none is named."""
    alive = np.array(cut if cut is not None else [0] * (len(tokens) + 1))
    return equal_runs(tokens, lambda a, b: not heavy or bool(set(heavy) & set(tokens[a:b])), lambda: alive)


def test_the_longest_repetition_is_found() -> None:
    assert runs("xabcabcabcy") == [(1, 4), (4, 7), (7, 10)]
    assert runs("ababab" + "cdecdecde") == [(6, 9), (9, 12), (12, 15)]


def test_two_equal_runs_are_no_repetition() -> None:
    assert runs("xyabcabczz" + "q") == [] and runs("abcdefgh") == [] and runs("") == []


def test_runs_without_work_do_not_count() -> None:
    assert runs("aaaaaa" + "bcbcbc", heavy="b") == [(6, 8), (8, 10), (10, 12)]
    assert runs("aaaaaabcd", heavy="b") == []


def test_runs_are_cut_where_the_fewest_bytes_are_live() -> None:
    """A shift leaves one run less."""
    assert runs("abcabcabcabc", [5, 1, 5] * 4 + [5]) == [(1, 4), (4, 7), (7, 10)]


@given(st.text("ab", max_size=24))
def test_runs_are_equal_and_adjacent(tokens: str) -> None:
    found = runs(tokens)
    assert len({tokens[a:b] for a, b in found}) <= 1
    assert all(b == c for (_, b), (c, _) in pairwise(found))
    thrice = any(
        tokens[i : i + n] * 3 == tokens[i : i + 3 * n]
        for n in range(1, len(tokens) // 3 + 1)
        for i in range(len(tokens) - 3 * n + 1)
    )
    assert bool(found) == (thrice and len(tokens) >= 6)


values = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 9)), max_size=6)


@given(values)
def test_crossing_bytes_are_those_made_before_and_read_after(spans: list[tuple[int, int, int]]) -> None:
    spans = [(min(a, b), max(a, b), n) for a, b, n in spans]
    made = {k: a for k, (a, _, _) in enumerate(spans)}
    last = {k: b for k, (_, b, _) in enumerate(spans)}
    found = crossing(made, last, lambda k: spans[k][2], 9)
    wanted = [sum(n for a, b, n in spans if a < i <= b) for i in range(10)]
    assert found.tolist() == wanted


def test_a_value_that_nobody_reads_crosses_nothing() -> None:
    assert crossing({"x": 0}, {}, lambda _: 8, 3).tolist() == [0, 0, 0, 0]
