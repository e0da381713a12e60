"""Peak memory over the course of a step, compared with what XLA for TPU allocated (bench/results/tpu_aot.json)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pase import machine, zoo
from pase.compiler.meshes.baselines import price_baselines
from pase.compiler.meshes.plans import plan_of
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import Variant
from pase.frontends.jax.frontend import trace
from pase.machine import mesh_from
from pase.memory.course import peak

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "tpu_aot.json"


@pytest.mark.parametrize(("strategy", "method"), [("FSDP", "fsdp"), ("data parallel", "data_parallel")])
def test_peak_is_what_the_compiler_allocates(strategy, method):
    """GPT-2 on 32 chips, with full logits: the peak is within 5% of the compiled program's.

    Under data parallelism the tied embedding's gradient is computed at the end, so the logits live until then.
    """
    rows = json.loads(RESULTS.read_text())["rows"]
    row = next(r for r in rows if (r["model"], r["strategy"]) == ("gpt2", strategy))
    m = zoo.get(row["zoo"])
    traced = trace(m.loss_fn, m.params, m.batch, name="gpt2")
    problem = SplitProblem.of(traced.graph, 32, machine.load("tpu_v5e"), "analytic", "adam")
    made, _ = price_baselines(problem)
    by = next(b for b in made if b.name == method)
    found = peak(problem.graph, by.mesh, by.strategy, tile=(8, 128)).total
    assert found == pytest.approx(row["peak"], rel=0.05)


def test_peak_by_hand():
    """Two products and a squared error on one device: state, input, residuals, one weight with its gradient."""
    import jax
    import jax.numpy as jnp

    def loss(p, x):
        return jnp.mean(((x @ p["a"]) @ p["b"]) ** 2)

    f32 = jnp.float32
    params = {"a": jax.ShapeDtypeStruct((512, 64), f32), "b": jax.ShapeDtypeStruct((64, 256), f32)}
    traced = trace(loss, params, jax.ShapeDtypeStruct((128, 512), f32), name="two")
    problem = SplitProblem.of(traced.graph, 1, machine.load("tpu_v5e"), "analytic", "adam")
    whole = {n.name: np.full(1, -1, dtype=np.int8) for n in problem.graph.nodes}
    a, b, x, h, y = (4 * np.prod(s) for s in ((512, 64), (64, 256), (128, 512), (128, 64), (128, 256)))
    stored = 3 * (a + b) + x
    assert peak(problem.graph, mesh_from("1", 1), whole).total == stored + h + y + 2 * a


@pytest.mark.some(1)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_profile_is_no_more_than_the_course(accumulate):
    """For any configs, what the search counts under a limit is a lower bound on the plan's own peak.

    If the machine's compiler fuses products, that peak is what the plan reports.
    """
    m = zoo.get("gpt2?layers=2&batch=32&vocab=4096&attention=plain")
    traced = trace(m.loss_fn, m.params, m.batch, name="gpt2")
    problem = SplitProblem.of(traced.graph, 4, machine.load("tpu_v5e"), "analytic", "adam")
    problem = problem.varied(traced, Variant(accumulate=accumulate))
    mesh = mesh_from("2x2", 4)
    _, space = problem.tables(mesh)
    seen = problem.account.profile(problem.graph, mesh, space.configs, float("inf"), problem.optimizer)
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(20):
        choice = np.array([rng.integers(len(c)) for c in space.configs])
        configs = {n.name: c[i] for n, c, i in zip(problem.graph.nodes, space.configs, choice, strict=True)}
        plan = plan_of(problem, configs, mesh, "gpt2", traced)
        assert plan.memory == peak(problem.graph, mesh, configs, tile=(8, 128))
        ratios.append(seen.usage(choice).max() / plan.memory.total)
    assert 0.5 < min(ratios) <= max(ratios) <= 1 + 1e-9
