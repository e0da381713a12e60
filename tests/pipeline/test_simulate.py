"""The simulated step, against a recursion over actions, and the bytes that are held, against a count by hand."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from pase.pipeline.registry import SCHEDULES, schedule
from pase.pipeline.simulate import in_flight, peak_bytes, simulate
from pase.pipeline.types import Kind, Schedule, StageTimes
from tests.pipeline.timing import CASES


def recursive_step_s(s: Schedule, t: StageTimes) -> float:
    """The end of the last action, each of which begins once its rank is free and its input has arrived."""
    place = {
        (a.stage, a.kind == Kind.FORWARD, a.micro): (r, k)
        for r, order in enumerate(s.orders)
        for k, a in enumerate(order)
        if a.kind != Kind.WEIGHT
    }

    @cache
    def end(r: int, k: int) -> float:
        a = s.orders[r][k]
        start = end(r, k - 1) if k else float(t.before[r])
        other = a.stage + (-1 if a.kind == Kind.FORWARD else 1)
        if a.kind != Kind.WEIGHT and 0 <= other < s.stages:
            needed = place[other, a.kind == Kind.FORWARD, a.micro]
            way = int(a.kind != Kind.FORWARD)
            late = float(t.send[way, min(other, a.stage)]) if needed[0] != r else 0.0
            start = max(start, end(*needed) + late)
        return start + float(t.by_kind[a.kind, a.stage])

    return max(end(r, len(order) - 1) + float(t.after[r]) for r, order in enumerate(s.orders))


@pytest.mark.parametrize(("name", "chunks"), [c for c in CASES if not SCHEDULES[c[0]].lockstep])
def test_a_step_is_the_recursion_over_its_actions(name, chunks):
    rng = np.random.default_rng(chunks)
    s = schedule(name, 3, 6, chunks)
    n = s.stages
    t = StageTimes.of(
        *rng.random((3, n)),
        ranks=3,
        recompute=rng.random(n),
        send=rng.random((2, n - 1)),
        before=rng.random(3),
        after=rng.random(3),
    )
    done = simulate(s, t, kernel="numpy")
    assert done.step_s == pytest.approx(recursive_step_s(s, t))
    assert done.path.seconds(t) == pytest.approx(done.step_s)


def test_micro_batches_in_flight_of_two_ranks_of_1f1b():
    """Rank 0 runs F F B F B B and rank 1 runs F B F B F B."""
    s = schedule("1f1b", 2, 3)
    assert in_flight(s, 0)[:, 0, 0].tolist() == [1, 2, 1, 2, 1, 0]
    assert in_flight(s, 1)[:, 0, 1].tolist() == [1, 0, 1, 0, 1, 0]
    assert peak_bytes(s, np.array([10.0, 7.0])).tolist() == [20, 7]


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="'cuda'"):
        simulate(schedule("1f1b", 2, 3), StageTimes.of([1, 1], 1, 1, ranks=2), kernel="cuda")  # type: ignore[arg-type]
