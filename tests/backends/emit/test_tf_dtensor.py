"""A plan as DTensor layouts, which TensorFlow runs on four logical CPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import pase
from pase.backends import registry
from pase.backends.emit import tf_dtensor
from pase.compiler.problem.problem import SplitProblem
from pase.errors import PaseError
from pase.machine import Mesh
from pase.search import solve
from pase.tables.axis_layout import AxisLayout, forward_states, gradient_states
from pase.tables.layouts import read_rule, write_rule
from tests.backends.emit.test_shardings_json import keras_mlp, plans, stored

PROGRAM = """
import json, sys
import numpy as np, tensorflow as tf
from tensorflow.experimental import dtensor
from pase.backends.emit import tf_dtensor as to_dtensor

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
rng = np.random.default_rng(0)
shapes = {"up/kernel": (32, 64), "up/bias": (64,), "norm/gamma": (64,), "norm/beta": (64,),
          "down/kernel": (64, 16), "down/bias": (16,)}
arrays = {k: rng.standard_normal(s, dtype=np.float32) for k, s in shapes.items()}
x = rng.standard_normal((8, 32), dtype=np.float32)


def loss(p, x):
    h = tf.nn.relu(x @ p["up/kernel"] + p["up/bias"])
    h = h - tf.reduce_mean(h, -1, keepdims=True)
    h = h * tf.math.rsqrt(tf.reduce_mean(h * h, -1, keepdims=True) + 1e-3)
    return tf.reduce_mean(tf.square((h * p["norm/gamma"] + p["norm/beta"]) @ p["down/kernel"] + p["down/bias"]))


@tf.function
def step(p, x):
    with tf.GradientTape() as tape:
        tape.watch(list(p.values()))
        value = loss(p, x)
    return value, tape.gradient(value, p)


wanted, gradients = step({k: tf.constant(a) for k, a in arrays.items()}, tf.constant(x))
out = {}
for name, data in json.load(open(sys.argv[1])).items():
    mesh, layouts = to_dtensor.layouts(data, [f"CPU:{i}" for i in range(4)])

    def placed(a, layout):
        whole = dtensor.copy_to_mesh(tf.constant(a), dtensor.Layout.replicated(mesh, rank=a.ndim))
        return dtensor.relayout(whole, layout)

    reads = to_dtensor.read_layouts(data, mesh)

    @tf.function
    def sharded(p, x):
        with tf.GradientTape() as tape:
            tape.watch(list(p.values()))
            value = loss({k: dtensor.relayout(w, reads[k]) if k in reads else w for k, w in p.items()}, x)
        return value, tape.gradient(value, p)

    value, got = sharded({k: placed(a, layouts[k]) for k, a in arrays.items()}, placed(x, layouts["x"]))
    got = {k: dtensor.relayout(g, layouts[k]) for k, g in got.items()}
    whole = {k: dtensor.relayout(g, dtensor.Layout.replicated(mesh, rank=g.shape.rank)) for k, g in got.items()}
    error = max(float(np.abs(dtensor.unpack(whole[k])[0].numpy() - gradients[k].numpy()).max()) for k in arrays)
    pieces = {k: [list(t.shape) for t in dtensor.unpack(g)][0] for k, g in got.items()}
    out[name] = [float(dtensor.unpack(value)[0]) - float(wanted), error, pieces]
print(json.dumps(out))
"""


def test_layouts_run(tmp_path: Path) -> None:
    """Each plan on 2 by 2 devices: loss and gradients equal those on one device, and shards have the stated sizes."""
    made: dict[str, Any] = {}
    for name, plan in plans().items():
        registry.emit(plan, "dtensor", tmp_path / "one.json")
        made[name] = json.loads((tmp_path / "one.json").read_text())
    assert made["megatron"]["variables"]["up/kernel"] == ["unsharded", "model"]
    assert made["pase"]["reads"]["down/kernel"] == [
        "unsharded",
        "unsharded",
    ]  # stored split, and gathered while the previous layer computes
    (tmp_path / "all.json").write_text(json.dumps(made))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "all.json")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shapes = {v.path: tuple(v.shape) for v in keras_mlp().trainable_variables}
    for name, (off, error, pieces) in json.loads(done.stdout.splitlines()[-1]).items():
        assert abs(off) < 1e-4 and error < 1e-4, name
        sizes = made[name]["mesh"]
        for path, specs in made[name]["variables"].items():
            whole = shapes[path]
            assert pieces[path] == [n // sizes.get(s, 1) for n, s in zip(whole, specs, strict=True)], (
                name,
                path,
            )


def test_axes_that_go_together_are_one_mesh_dim(tmp_path: Path) -> None:
    both = (("data", "model"), ())
    plan = stored(plans()["pase"], {"up/kernel": both, "down/kernel": both})
    data = tf_dtensor.to_json(plan)
    assert data["mesh"] == {"data_model": 4}
    assert data["variables"]["up/kernel"] == ["data_model", "unsharded"]
    apart = replace(plan.nodes[0], split={"b": ("data",)})
    for node, differs in ((replace(apart, split={"b": ("data", "model")}), False), (apart, True)):
        said = registry.emit(replace(plan, nodes=(node,)), "dtensor", tmp_path / "layouts.json")
        assert ("its step will differ" in said) == differs


def test_what_dtensor_cannot_say() -> None:
    plan = plans()["pase"]
    with pytest.raises(PaseError) as e:
        tf_dtensor.to_json(
            stored(plan, {"up/kernel": (("data", "model"), ()), "down/kernel": (("model",), ())})
        )
    assert e.value.where == "tensor 'up/kernel'" and "data and model" in e.value.what
    with pytest.raises(PaseError, match="not adjacent"):
        tf_dtensor.to_json(stored(plan, {"up/kernel": (("model", "data"), ())}))


MODEL = "zoo:gpt2?layers=1&batch=16&seq=64&vocab=1024"


def test_a_plan_for_dtensor_is_the_cheapest_that_dtensor_can_say(tmp_path: Path) -> None:
    """The reference is the unrestricted tables of every mesh, restricted to those configs that split each dim of every
    tensor along at most one axis, as derived from the placements that plans write."""
    options: dict[str, Any] = {
        "devices": 8,
        "machine": "1080tix8",
        "baselines": False,
        "memory_limit": "none",
        "overlap": "none",
    }
    free, plan = pase.compile(MODEL, **options), pase.compile(MODEL, target="dtensor", **options)
    with pytest.raises(PaseError) as e:
        registry.emit(free, "dtensor", tmp_path / "free.json")
    assert "--for dtensor" in e.value.fix
    assert "will differ" not in registry.emit(plan, "dtensor", tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["mesh"]
    problem = SplitProblem.of(free.traced.graph, 8, "1080tix8", "analytic", "adam")
    best = min(_cheapest(problem, mesh) for mesh in problem.meshes(None, 3))
    assert plan.cost == pytest.approx(best) and plan.optimal
    assert free.cost < plan.cost, "the restriction to DTensor does not bind for this model"


def _cheapest(problem: SplitProblem, mesh: Mesh) -> float:
    tables, space = problem.tables(mesh)
    keep = {}
    for v, (node, configs) in enumerate(zip(problem.graph.nodes, space.configs, strict=True)):
        allowed = np.ones(len(configs), dtype=bool)
        for op in node.ops:
            for rule, accesses in ((write_rule, op.writes), (read_rule, op.reads)):
                for a in accesses:
                    rank = len(problem.graph.tensors[a.tensor].shape)
                    states = rule(node, op, a).states(configs, mesh)
                    for seen in (forward_states(states), gradient_states(states)):
                        placed = [AxisLayout.of(row).summed.placement(rank, mesh) for row in seen]
                        allowed &= [p is not None and all(len(axes) <= 1 for axes in p) for p in placed]
        keep[v] = np.flatnonzero(allowed)
    return solve(tables.restricted(keep)).cost


def test_a_plan_for_dtensor_has_no_stages() -> None:
    with pytest.raises(PaseError, match="'dtensor'"):
        pase.compile(MODEL, devices=8, target="dtensor", pipeline=2)
