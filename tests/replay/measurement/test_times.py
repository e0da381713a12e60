"""Lags: a measured start is a sample of its binding edge only."""

import numpy as np

from pase.replay.graph import EDGES
from pase.replay.measurement.tasks import RankProgram
from pase.replay.measurement.times import Edges, _edges, _lags
from pase.replay.types import KINDS

KERNEL = KINDS.index("kernel")
MS = 1_000_000


def test_an_iteration_without_a_predecessor_says_nothing_of_the_others():
    """An update waits for an early op on another lane and for the all-reduce before it on its own lane. In iterations
    in which the all-reduce runs on another lane, the update's start is not a delay of 200 ms after the early op."""
    p = RankProgram(rank=0, iteration=0)
    lanes = [("lane 2", "stream"), ("lane", "stream"), ("lane", "stream")]
    early, reduce, update = (
        p.task((name,), lane, name, KERNEL, 0, 1)
        for name, lane in zip(("early", "all-reduce", "update"), lanes, strict=True)
    )
    src, dst = np.array([early, reduce]), np.array([update, update])
    kind = np.array([EDGES.index("wait"), EDGES.index("stream")], dtype=np.uint8)
    end = np.array([[2, 200, 201], [2, np.nan, 202], [2, np.nan, 204]]) * MS
    start = np.array([[1, 3, 200.001], [1, np.nan, 201], [1, np.nan, 203]]) * MS
    edges = Edges(src=src, dst=dst, kind=kind, carried=np.zeros(2, dtype=bool))
    lag, _, _ = _lags(p, start, start[:, dst] - end[:, src], edges)
    assert lag[1] == 1000
    assert lag[0] < MS


def test_ops_that_take_turns_wait_for_each_other_in_no_iteration():
    """Two copies of a microsecond on a host's threads begin in either order. As edges of one graph, the waits of both
    orders would be a cycle, and the replay of a sound trace a deadlock."""

    def iteration(first: str, second: str, third: str) -> RankProgram:
        p = RankProgram(rank=0, iteration=0)
        lanes = {"a": "ops", "b": "ops beside 2", "c": "ops"}
        tasks = [
            p.task((name,), (lanes[name], "stream"), name, KERNEL, 500 * i, 500 * i + 400)
            for i, name in enumerate((first, second, third))
        ]
        p.edge(tasks[0], tasks[1], "wait")
        p.edge(tasks[1], tasks[2], "wait")
        return p

    template, other = iteration("a", "b", "c"), iteration("b", "a", "c")
    row = {key: i for i, key in enumerate(template.keys)}
    found = _edges(template, [template, other], row)
    a, b, c = (row[(name,)] for name in "abc")
    assert {*zip(found.src.tolist(), found.dst.tolist(), strict=True)} == {(a, b), (b, c), (a, c)}
