"""Searches under a memory limit count their work. The clock matters only if a time limit is given."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

import pase
from pase.compiler.meshes.every_mesh import close_meshes
from pase.compiler.meshes.search import search_meshes
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.spent import Spent
from pase.compiler.resolve import resolve
from pase.errors import PaseError
from tests.command import printed

MODEL = "zoo:gpt2?layers=2&batch=32&vocab=4096"
MLP = "zoo:mlp?batch=48"


def within(limit: int, **options):
    return pase.compile(MODEL, devices=4, baselines=False, memory_limit=limit, **options)


@pytest.fixture(scope="module")
def limit() -> int:
    return int(within(10**12).memory.total * 0.7)


@pytest.fixture(scope="module")
def quiet(limit: int):
    return within(limit)


def test_a_busy_machine_gives_the_same_answer(limit: int, quiet, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour passes between any two readings of the clock."""
    clock = itertools.count(step=3600.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    busy = within(limit)
    assert (busy.cost, busy.bound, busy.mesh, busy.accumulate) == (
        quiet.cost,
        quiet.bound,
        quiet.mesh,
        quiet.accumulate,
    )


@pytest.mark.parametrize("little", [{"work": 1e-9}, {"time_limit": 0.0}])
def test_with_hardly_any_budget_there_is_an_answer_and_its_bound_holds(limit: int, quiet, little) -> None:
    plan = within(limit, **little)
    assert plan.memory.total <= limit
    assert plan.bound <= quiet.cost * (1 + 1e-9) and plan.cost >= quiet.bound * (1 - 1e-9)


def test_the_search_of_a_variant_without_the_limit_is_work_too(limit: int, quiet, monkeypatch) -> None:
    """It is counted. Once the work is spent and a strategy fits, no further mesh is searched, and the bound holds."""
    from pase.compiler.meshes import fit

    budgets, fitted, late = [], [], []
    made, search, fit_limit = Spent.within, fit.search_meshes, fit.fit_limit

    def begun(*given: float) -> Spent:
        budgets.append(made(*given))
        return budgets[-1]

    def searched(*given, **options):
        late.extend(fitted)
        return search(*given, **options)

    def fits(*given):
        found, bound = fit_limit(*given)
        fitted.extend([] if found is None else [found])
        return found, bound

    monkeypatch.setattr(fit, "_FIRST_MESHES", 1)
    monkeypatch.setattr(Spent, "within", begun)
    monkeypatch.setattr(fit, "search_meshes", searched)
    monkeypatch.setattr(fit, "fit_limit", fits)
    within(limit)
    assert late and budgets[-1].entries > 0
    late.clear()
    fitted.clear()
    plan = within(limit, work=1e-9)
    assert fitted and not late
    assert plan.bound <= quiet.cost * (1 + 1e-9)


def test_no_search_gets_more_than_the_time_that_is_left(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is read again at each call, so several searches of one region cannot add up to more."""
    from pase.compiler.meshes import fit

    asked, real = [], fit.solve
    clock = itertools.count(step=1e-3)
    ends = []

    def watched(tables, memory, *, effort, **options):
        asked.append((effort.time_limit, ends[-1].left_s()))
        return real(tables, memory, effort=replace(effort, time_limit=None), **options)

    def begun(work: float, time_limit: float | None, began: float) -> Spent:
        ends.append(Spent(most=work, ends_at=next(clock) + time_limit))
        return ends[-1]

    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(fit, "solve", watched)
    monkeypatch.setattr(Spent, "within", begun)
    within(limit, time_limit=100.0)
    assert asked and all(seconds <= left + 1e-3 for seconds, left in asked)


def test_a_time_limit_runs_from_the_start_of_the_compilation() -> None:
    """Tracing and the search without a limit use it up, although they are not cut short."""
    began = time.perf_counter() - 60.0
    assert Spent.within(60.0, 50.0, began).over()
    assert not Spent.within(60.0, 100.0, began).over()


@pytest.mark.parametrize("pipeline", ["auto", 2])
def test_a_pipeline_asked_for_is_found_when_the_time_is_over(pipeline: int | str) -> None:
    plan = pase.compile(MODEL, devices=4, pipeline=pipeline, baselines=False, time_limit=0.0)
    assert plan.bound <= plan.cost and (plan.pipeline is not None or pipeline == "auto")


@pytest.mark.parametrize("wrong", [{"work": 0.0}, {"time_limit": -1.0}])
def test_budgets_are_positive(wrong) -> None:
    with pytest.raises(PaseError) as e:
        pase.compile(MLP, devices=2, **wrong)
    assert e.value.where == "work, time_limit"


def test_nothing_is_proven_of_further_meshes_if_a_variant_took_less() -> None:
    """A mesh is pruned for the step as written. This bounds its variants only if none of them takes less time."""
    problem = SplitProblem.of(resolve(MLP).graph, 8, None, "analytic", "adam", "none")
    found = search_meshes(problem, problem.meshes(None, 1))
    known = set(found.bounds)
    sound, every = close_meshes(problem, found, known, lambda _: True)
    assert sound.solution.optimal and not every.left
    doubtful, every = close_meshes(problem, replace(found, least=False), known, lambda _: True)
    assert not doubtful.solution.optimal and doubtful.solution.bound == 0.0
    assert {m.sizes for m, _ in every.left} == {
        m.sizes for m in problem.meshes(None, 8, distinct=False)
    } - known
    assert np.isfinite(doubtful.solution.cost)


def test_the_command_takes_both() -> None:
    assert "step" in printed("compile", MLP, "--devices", "2", "--work", "5", "--time-limit", "3.5")
