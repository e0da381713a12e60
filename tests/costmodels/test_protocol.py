"""The CostModel protocol suffices for its callers: a second, small model that implements nothing else works."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pase.compiler.meshes.baselines import price_baselines
from pase.compiler.meshes.fit import fit_limit
from pase.compiler.meshes.plans import plan_of
from pase.compiler.meshes.search import search_meshes
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.spent import Spent
from pase.frontends.jax.frontend import trace
from pase.machine import CostModel, Machine, load
from pase.plan.step import step_time
from pase.tables.build import habits

S = jax.ShapeDtypeStruct
PARAMS = {"w": S((512, 2048), "float32"), "v": S((2048, 512), "float32")}


class Bytes:
    """Work costs its FLOPs and bytes, and a collective a startup and its bytes. It has only what the protocol names."""

    __slots__ = ("machine", "name", "unit")

    def __init__(self, machine: Machine) -> None:
        self.name, self.unit, self.machine = "bytes", "s", machine

    def compute(self, kind, dtype, flops, nbytes, *, mnk=None):
        return np.asarray(flops, float) * 1e-12 + np.asarray(nbytes, float) * 1e-12

    def collective(self, kind, mesh, axes, nbytes):
        moves = (np.asarray(axes) > 0) & (np.asarray(nbytes) > 0)
        return np.where(moves, 1e-6 + np.asarray(nbytes, float) * 1e-9, 0.0)


def loss(params, x):
    return jnp.mean((jax.nn.relu(x @ params["w"]) @ params["v"]) ** 2)


@pytest.fixture(scope="module")
def traced():
    return trace(loss, PARAMS, S((256, 512), "float32"))


@pytest.mark.parametrize("overlap", ["none", "parameters"])
def test_a_second_model_serves_every_question(traced, overlap):
    machine = load("h100x8")
    assert isinstance(Bytes(machine), CostModel)
    problem = SplitProblem.of(traced.graph, 8, machine, "analytic", "adam", overlap)
    problem = replace(problem, model=Bytes(machine))
    over = problem.meshes(None, 3)
    found = search_meshes(problem, over)
    plan = plan_of(problem, found.configs, found.mesh, "loss", traced)
    assert plan.cost == pytest.approx(found.solution.cost)
    given, _ = price_baselines(problem)
    assert all(found.solution.cost <= b.cost * (1 + 1e-9) for b in given)
    assert step_time(problem.graph, found.mesh, found.configs, problem.model).total_s > 0
    tight, bound = fit_limit(problem, found, over, plan.memory.total * 1.0, Spent(), lambda _: None)
    assert tight is not None and bound <= tight.solution.cost


def test_what_the_machine_says_reaches_the_tables(traced):
    """Buckets, tiles and the sum of readers' gradients are read from the model's machine, which is not optional."""
    h100, tpu = load("h100x8"), load("tpu_v5e")
    assert habits(Bytes(h100)).tile is None and habits(Bytes(tpu)).tile == tpu.device.memory_tile

    def tables(machine):
        problem = SplitProblem.of(traced.graph, 8, machine, "analytic", "adam")
        return replace(problem, model=Bytes(machine)).tables(problem.meshes("8", 1)[0])

    alone, _ = tables(replace(h100, bucket_bytes=0.0))
    shared, _ = tables(h100)
    assert any(not np.array_equal(a.cost, b.cost) for a, b in zip(alone.edges, shared.edges, strict=True))

    def spaces(sums: bool) -> int:
        return sum(len(c) for c in tables(replace(h100, sums_readers=sums))[1].configs)

    assert spaces(False) <= spaces(True)


def test_a_model_without_a_machine_is_no_cost_model():
    class Bare:
        name, unit = "bare", "s"
        compute, collective = Bytes.compute, Bytes.collective

    assert not isinstance(Bare(), CostModel)
