"""Peak memory over the step's course, beside what XLA for TPU allocated (bench/results/tpu_aot.json)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pase import machine, zoo
from pase.api import Problem
from pase.frontends.from_jax import trace
from pase.machine import mesh_from
from pase.plan.peak import peak

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "tpu_aot.json"


def test_peak_is_what_the_compiler_allocates():
    """FSDP of GPT-2 on 32 chips, the logits in full: within 5% of the compiled program's peak."""
    rows = json.loads(RESULTS.read_text())["rows"]
    row = next(r for r in rows if (r["model"], r["strategy"]) == ("gpt2", "FSDP"))
    m = zoo.get(row["zoo"])
    traced = trace(m.loss_fn, m.params, m.batch, name="gpt2")
    problem = Problem.of(traced.graph, 32, machine.load("tpu_v5e"), "analytic", "adam")
    made, _ = problem.baselines()
    fsdp = next(b for b in made if b.name == "fsdp")
    assert peak(problem.graph, fsdp.mesh, fsdp.strategy) == pytest.approx(row["peak"], rel=0.05)


def test_peak_by_hand():
    """Two products, a squared error, one device: state, input, what backward needs, one weight with its gradient."""
    import jax
    import jax.numpy as jnp

    def loss(p, x):
        return jnp.mean(((x @ p["a"]) @ p["b"]) ** 2)

    f32 = jnp.float32
    params = {"a": jax.ShapeDtypeStruct((512, 64), f32), "b": jax.ShapeDtypeStruct((64, 256), f32)}
    traced = trace(loss, params, jax.ShapeDtypeStruct((128, 512), f32), name="two")
    problem = Problem.of(traced.graph, 1, machine.load("tpu_v5e"), "analytic", "adam")
    whole = {n.name: np.full(1, -1, dtype=np.int8) for n in problem.graph.nodes}
    a, b, x, h, y = (4 * np.prod(s) for s in ((512, 64), (64, 256), (128, 512), (128, 64), (128, 256)))
    stored = 3 * (a + b) + x
    assert peak(problem.graph, mesh_from("1", 1), whole) == stored + h + y + 2 * a
