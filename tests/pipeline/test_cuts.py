"""The search for cuts against enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pase.errors import Infeasible
from pase.pipeline import cuts
from pase.pipeline.cuts import TOLERANCE, CutProblem, StageBytes, best_cuts
from pase.pipeline.registry import SCHEDULES, schedule
from pase.pipeline.simulate import peak_bytes, simulate
from pase.pipeline.types import StageTimes


def problem_of(
    rng: np.random.Generator, name: str, p: int, v: int, m: int, blocks: int, limit: float = np.inf
):  # type: ignore[no-untyped-def]
    """A random problem: equal blocks, an embedding and a head, gradient reductions once per step, and bytes."""
    s, n = schedule(name, p, m, v), p * v
    block = rng.uniform(0.5, 1.5, 3)
    ends = np.zeros((4, n))
    ends[:, 0], ends[:, -1] = rng.uniform(0, 0.5, 4), rng.uniform(0, 3, 4)
    fixed = StageTimes.of(
        *ends[:3],
        recompute=ends[3],
        ranks=p,
        send=rng.choice([0.0, 0.1]) * np.ones(n - 1),
        after=rng.uniform(0, 2, p),
    )
    each = StageTimes.of([block[0]] * n, block[1], block[2], ranks=n, after=rng.uniform(0, 0.5))
    return CutProblem(
        schedule=s,
        blocks=blocks,
        fixed=fixed,
        each=each,
        limit=limit,
        bytes_fixed=StageBytes(held=ends[0] * 4, kept=ends[1], for_weights=ends[1] / 4),
        bytes_each=StageBytes(held=np.full(n, 2.0), kept=np.full(n, 1.0), for_weights=np.full(n, 0.25)),
    )


def fits(problem: CutProblem, counts: np.ndarray) -> bool:
    f, e = problem.bytes_fixed, problem.bytes_each
    assert f is not None and e is not None
    active = peak_bytes(problem.schedule, f.kept + counts * e.kept, f.for_weights + counts * e.for_weights)
    held = problem.on_rank @ (f.held + counts * e.held)
    return bool((active + held <= problem.limit * (1 + 1e-9)).all())


def enumerated(problem: CutProblem) -> float:
    n, best = problem.schedule.stages, np.inf
    for cut in itertools.combinations(range(1, problem.blocks), n - 1):
        counts = np.diff([0, *cut, problem.blocks])
        if fits(problem, counts):
            best = min(best, simulate(problem.schedule, problem.times(counts)).step_s)
    return best


@pytest.mark.some(4)
@pytest.mark.parametrize("name", [n for n, d in SCHEDULES.items() if not d.lockstep])
@pytest.mark.parametrize("limited", [False, True])
def test_equal_to_enumeration(name, limited):
    rng = np.random.default_rng(len(name) + limited)
    low, _ = SCHEDULES[name].chunks
    for _ in range(4):
        p, v = (4, 1) if low == 1 else (2, 2)
        m, limit = 2 * p * int(rng.integers(1, 3)), 37.0 if limited else np.inf
        problem = problem_of(rng, name, p, v, m, 11, limit)
        truth = enumerated(problem)
        if np.isinf(truth):
            with pytest.raises(Infeasible) as e:
                best_cuts(problem)
            assert e.value.where == f"schedule '{name}'" and e.value.fix
            continue
        found = best_cuts(problem)
        assert found.simulated is not None and found.counts is not None and sum(found.counts) == 11
        assert found.optimal and found.simulations <= 40
        assert found.simulated.step_s == pytest.approx(truth, rel=2 * TOLERANCE)
        assert found.bound <= truth * (1 + 1e-9) and fits(problem, np.array(found.counts))
        assert best_cuts(problem, below=truth * 0.999).counts is None


@pytest.mark.some(4)
@pytest.mark.parametrize("name", [n for n, d in SCHEDULES.items() if not d.lockstep])
@pytest.mark.parametrize("limited", [False, True])
def test_of_many_stages_the_bound_is_a_step_in_parts_of_blocks(name, limited, monkeypatch):
    """The linear program of all actions agrees with a simulation of its solution, and is below enumerated cuts."""
    monkeypatch.setattr(cuts, "_MOST_STAGES", 0)
    rng = np.random.default_rng(len(name) + limited)
    low, _ = SCHEDULES[name].chunks
    p, v = (4, 1) if low == 1 else (2, 2)
    seen = 0
    for _ in range(6):
        problem = problem_of(rng, name, p, v, 2 * p, 11, 40.0 if limited else np.inf)
        truth = enumerated(problem)
        if np.isinf(truth):
            continue
        parts, bound, _ = cuts._timed_parts(problem)
        assert simulate(problem.schedule, problem.times(parts)).step_s == pytest.approx(bound)
        rows, room = problem.memory_rows
        assert parts.sum() == pytest.approx(11) and (
            not len(rows) or (rows @ parts <= room * (1 + 1e-6)).all()
        )
        found = best_cuts(problem)
        assert found.bound == pytest.approx(bound) and bound <= truth * (1 + 1e-9)
        if found.simulated is not None:
            seen += 1
            assert truth * (1 - 1e-9) <= found.simulated.step_s < 1.05 * truth
            assert fits(problem, np.array(found.counts)) and sum(found.counts) == 11
    assert seen >= 3


def test_a_large_chain_takes_few_simulations():
    """24 blocks on 6 stages, which have 33,649 cut vectors, and a chain as long as Llama-3 405B's."""
    for p, m, blocks in ((6, 24, 24), (16, 16, 126)):
        rng = np.random.default_rng(p)
        found = best_cuts(problem_of(rng, "1f1b", p, 1, m, blocks))
        assert found.optimal and found.simulations <= 60
        assert found.counts is not None and found.counts[-1] < max(found.counts)  # the head counts
