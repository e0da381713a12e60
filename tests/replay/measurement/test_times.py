"""Lags: a measured start is a sample of its binding edge only."""

import numpy as np

from pase.replay.graph import EDGES
from pase.replay.measurement.tasks import RankProgram
from pase.replay.measurement.times import Edges, _lags
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
