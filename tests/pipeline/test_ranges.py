"""Divisions of a chain of unequal units, against an enumeration of all divisions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pase.pipeline.ranges import least_divided, least_partition, partitions_below, runs_of
from pase.pipeline.types import StageTimes


def work_of(seconds: np.ndarray) -> np.ndarray:
    """The seconds of units a … b - 1 at [a, b]."""
    total = np.append(0.0, np.cumsum(seconds))
    return np.maximum(total[None, :] - total[:, None], 0.0)


def divisions(units: int, stages: int) -> list[list[tuple[int, int]]]:
    """All divisions of a chain into ranges, one for each stage."""
    cuts = itertools.combinations(range(1, units), stages - 1)
    return [list(itertools.pairwise((0, *c, units))) for c in cuts]


@pytest.mark.parametrize("seed", range(6))
def test_partitions_are_those_of_an_enumeration(seed):
    rng = np.random.default_rng(seed)
    work, stages = work_of(rng.random(7)), int(rng.integers(1, 5))
    longest = {tuple(d): max(work[r] for r in d) for d in divisions(7, stages)}
    found = least_partition(work, stages)
    assert longest[tuple(found)] == min(longest.values())
    below = float(np.median(list(longest.values()))) + 1e-9
    for k, ranges in enumerate(partitions_below(work, stages, below)):
        assert set(ranges) == {d[k] for d, s in longest.items() if s < below}


def test_a_divided_chain_is_a_bound_on_every_division():
    """Two kinds of ranks; a stage on each. Units that can be split in parts take at most as long as whole ones."""
    rng = np.random.default_rng(1)
    seconds = rng.uniform(0.5, 2, (2, 5))
    each = [max(seconds[0, :k].sum(), seconds[1, k:].sum()) for k in range(6)]
    bound = least_divided(seconds, np.array([1, 1]))
    assert seconds.min(0).sum() / 2 * (1 - 1e-5) <= bound <= min(each)
    alone = least_divided(seconds[:1], np.array([4]))
    assert alone == pytest.approx(seconds[0].sum() / 4, rel=1e-5)


def test_seconds_by_kind_are_those_of_stage_times():
    """The same sums as in ``StageTimes.by_kind``: recomputation comes before a backward and before its first part."""
    t = StageTimes.of([1.0], 2.0, 4.0, ranks=1, recompute=8.0)
    assert runs_of(forward=1.0, input=2.0, weight=4.0, recompute=8.0).tolist() == t.by_kind[:, 0].tolist()
    assert t.by_kind[:, 0].tolist() == [1, 14, 10, 4]
