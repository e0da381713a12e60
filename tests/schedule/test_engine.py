"""The event loop, as Python and compiled, against a list of events that is searched one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.schedule.engine import run_jobs


def jobs(
    seconds: list[float],
    resource: list[int],
    after: list[list[int]],
    *,
    strict: list[bool] | None = None,
    hold: list[float] | None = None,
    size: list[float] | None = None,
    credit: list[float] | None = None,
) -> dict[str, np.ndarray]:
    """Arrays of jobs whose rank is their number. after: the predecessors of each job."""
    n, resources = len(seconds), max(resource) + 1
    succ: list[list[int]] = [[j for j in range(n) if i in after[j]] for i in range(n)]
    return {
        "seconds": np.array(seconds, float),
        "resource": np.array(resource, np.int64),
        "rank": np.arange(n, dtype=np.int64),
        "npred": np.array([len(a) for a in after], np.int64),
        "succ_ptr": np.cumsum([0, *map(len, succ)]).astype(np.int64),
        "succ": np.array([j for row in succ for j in row], np.int64),
        "hold": np.array(hold or [0.0] * n, float),
        "size": np.array(size or [1.0] * n, float),
        "credit": np.array(credit or [1.0] * max(resources, 1), float),
        "strict": np.array(strict or [False] * max(resources, 1), bool),
    }


def ran(a: dict[str, Any], kernel: str = "python") -> list[tuple[float, float]]:
    return list(zip(*(x.tolist() for x in run_jobs(kernel=kernel, **a)), strict=True))


def test_a_chain_runs_one_after_the_other() -> None:
    assert ran(jobs([1.0, 2.0, 3.0], [0, 0, 0], [[], [0], [1]])) == [(0, 1), (1, 3), (3, 6)]


def test_a_resource_runs_the_first_that_is_ready() -> None:
    """Job 1 is of higher rank than job 2, but waits for job 0 on another resource."""
    loose = jobs([5.0, 1.0, 2.0], [1, 0, 0], [[], [0], []])
    assert ran(loose) == [(0, 5), (5, 6), (0, 2)]


def test_a_strict_resource_waits_for_its_turn() -> None:
    held = jobs([5.0, 1.0, 2.0], [1, 0, 0], [[], [0], []], strict=[True, False])
    assert ran(held) == [(0, 5), (5, 6), (6, 8)]


def test_jobs_without_a_resource_run_when_they_are_ready() -> None:
    assert ran(jobs([1.0, 1.0, 4.0], [0, -1, -1], [[], [0], []]))[1:] == [(1, 2), (0, 4)]


def test_a_held_job_starts_later() -> None:
    assert ran(jobs([1.0, 1.0], [0, 0], [[], [0]], hold=[2.0, 3.0])) == [(2, 3), (6, 7)]


def test_credit_accepts_jobs_before_more_urgent_ones_are_ready() -> None:
    """Job 0 is the most urgent, but becomes ready at 1; with credit for two, job 2 was accepted before."""
    data = {"seconds": [1.0, 1.0, 3.0, 3.0], "resource": [0, 1, 0, 0], "after": [[1], [], [], []]}
    assert ran(jobs(**data))[0] == (3, 4)  # type: ignore[arg-type]
    assert ran(jobs(**data, credit=[2.0, 1.0]))[0] == (6, 7)  # type: ignore[arg-type]


def test_a_job_in_a_circle_never_runs() -> None:
    start, end = run_jobs(kernel="python", **jobs([1.0, 1.0, 1.0], [0, 0, 0], [[], [2], [1]]))
    assert np.isnan(start[1:]).all() and np.isnan(end[1:]).all() and end[0] == 1


@st.composite
def random_jobs(draw: st.DrawFn) -> dict[str, np.ndarray]:
    n = draw(st.integers(1, 8))
    seconds = [float(draw(st.integers(1, 5))) for _ in range(n)]
    resource = [draw(st.integers(-1, 1)) for _ in range(n)]
    after = [sorted(draw(st.sets(st.integers(0, i - 1), max_size=2))) if i else [] for i in range(n)]
    return jobs(seconds, [*resource[:-1], 1], after)


@settings(max_examples=60)
@given(random_jobs())
def test_jobs_keep_their_order_and_their_resource_and_nobody_idles(a: dict[str, np.ndarray]) -> None:
    """What each start must satisfy: after its predecessors, alone on its resource, and never later than needed."""
    start, end = run_jobs(kernel="python", **a)
    n = start.size
    before = [
        [i for i in range(n) if j in a["succ"][a["succ_ptr"][i] : a["succ_ptr"][i + 1]]] for j in range(n)
    ]
    ready = [max((end[i] for i in before[j]), default=0.0) for j in range(n)]
    assert (end == start + a["seconds"]).all() and (start >= ready).all()
    for j in range(n):
        same = [i for i in range(n) if i != j and a["resource"][i] == a["resource"][j] >= 0]
        assert all(end[i] <= start[j] or end[j] <= start[i] for i in same)
        assert start[j] == ready[j] or any(end[i] == start[j] for i in same)


@pytest.mark.parametrize("seed", range(3))
def test_the_compiled_loop_gives_the_same(seed: int) -> None:
    pytest.importorskip("numba")
    g = np.random.default_rng(seed)
    n = 60
    after = [sorted({int(x) for x in g.integers(0, i, 2)}) if i else [] for i in range(n)]
    a = jobs(
        g.integers(1, 9, n).tolist(),
        g.integers(-1, 3, n).tolist(),
        after,
        strict=[True, False, False],
        hold=g.integers(0, 3, n).tolist(),
        credit=[1.0, 1.0, 3.0],
    )
    assert ran(a) == ran(a, "numba")
