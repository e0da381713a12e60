"""Tasks of one rank's iteration: their keys differ, and an edge is added once."""

from __future__ import annotations

from pase.replay.graph import EDGES
from pase.replay.measurement.tasks import RankProgram


def test_tasks_of_one_key_get_keys_of_their_own() -> None:
    p = RankProgram(rank=0, iteration=0)
    made = [p.task(("op", 0, "gemm"), ("7", "stream"), "gemm", 2, 10 * k, 10 * k + 5) for k in range(3)]
    assert made == [0, 1, 2] and len(set(p.keys)) == 3 and p.keys[0] == ("op", 0, "gemm")


def test_no_task_ends_before_it_starts() -> None:
    p = RankProgram(rank=0, iteration=0)
    p.task(("a",), ("7", "stream"), "a", 2, 10, 4)
    assert (p.start, p.end) == ([10], [10])


def test_an_edge_has_the_kind_that_was_found_first() -> None:
    p = RankProgram(rank=0, iteration=0)
    for src, dst, kind in (
        (0, 1, "stream"),
        (0, 1, "wait"),
        (-1, 1, "launch"),
        (1, -1, "launch"),
        (1, 1, "wait"),
    ):
        p.edge(src, dst, kind)
    assert p.edges == {(0, 1): EDGES.index("stream")}
