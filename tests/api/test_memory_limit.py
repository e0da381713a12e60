"""A memory limit is kept, costs time, and is refused where nothing fits."""

import numpy as np
import pytest

import pase
from pase.compiler.options import CompileOptions
from pase.compiler.problem import SplitProblem
from pase.compiler.resolve import resolve
from pase.errors import Infeasible, PaseError
from pase.machine import load, mesh_from
from pase.memory.account import memory, profile
from pase.tables.itemize import collectives

MODEL = "zoo:gpt2?layers=2&batch=32&vocab=4096"


@pytest.fixture(scope="module")
def free():
    return pase.compile(MODEL, devices=4, mesh="2x2", baselines=False)


def test_the_profile_is_the_plans_own_account(free):
    """Whatever the configs, the profile's peak is the memory that the plan reports, buffers aside."""
    problem = SplitProblem.of(resolve(MODEL).graph, 4, None, "analytic", "adam")
    mesh = mesh_from("2x2", 4)
    _, space = problem.tables(mesh)
    p = profile(problem.graph, mesh, space.configs, float("inf"))
    rng = np.random.default_rng(0)
    for _ in range(20):
        choice = np.array([rng.integers(len(c)) for c in space.configs])
        configs = {n.name: c[i] for n, c, i in zip(problem.graph.nodes, space.configs, choice, strict=True)}
        moved = collectives(problem.graph, mesh, configs, problem.model)
        account = memory(problem.graph, mesh, configs, moved)
        assert p.usage(choice).max() == pytest.approx(account.total - account.buffers, abs=8)


def test_tighter_limits_are_kept_and_cost_time():
    free = pase.compile("zoo:mlp", devices=4, mesh="2x2", baselines=False)
    limit = free.memory.total * 0.97
    plan = pase.compile("zoo:mlp", devices=4, mesh="2x2", memory_limit=limit, baselines=False)
    assert plan.memory.total <= limit < free.memory.total
    assert plan.cost > free.cost
    assert plan.bound <= plan.cost
    with pytest.raises(Infeasible):
        pase.compile("zoo:mlp", devices=4, mesh="2x2", memory_limit=free.memory.total / 2, baselines=False)


def test_a_limit_that_does_not_bind_changes_nothing(free):
    plan = pase.compile(MODEL, devices=4, mesh="2x2", memory_limit=free.memory.total, baselines=False)
    assert plan.cost == free.cost
    assert plan.optimal


def test_what_cannot_fit_says_what_would():
    with pytest.raises(
        Infeasible, match=r"fits 0\.0009766 GiB a device on 4 devices: any needs at least [\d.]+ GiB"
    ):
        pase.compile(MODEL, devices=4, memory_limit=2**20)


def test_bytes_are_read_as_people_write_them():
    def limit(text, machine="h100x8"):
        return CompileOptions(devices=1, memory_limit=text).limit_bytes(load(machine))

    assert limit("80GiB") == 80 * 2**30
    assert limit("1.5 gb") == 1.5e9
    assert limit(2**30) == limit("1GiB")
    assert limit("machine", "v100x8") < limit("machine", "h200x8")
    for text in ("much", "-3GiB", "nan", "inf", "0", "3 PB", ""):
        with pytest.raises(
            PaseError, match=f"memory limit '{text}': expected a size such as 80GiB, 16e9, or machine"
        ):
            limit(text)
