"""Plans as Mesh-TensorFlow programs: layouts pass Mesh-TF's own checks, and steps equal TensorFlow's on one device."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pase
from bench.cases.plans import case_of, reduced
from pase.backends import registry
from pase.backends.emit import mesh_tf
from pase.backends.mesh_tf.legality import check_layout, check_tensor
from pase.backends.mesh_tf.names import MeshTfDim, Names, flat, merged_axes
from pase.backends.mesh_tf.reshapes import direct, reshape_steps
from pase.errors import PaseError
from pase.ir import from_text
from pase.machine import Mesh
from tests.command import reported

ROOT = Path(__file__).parents[3]
HAVE = all(importlib.util.find_spec(m) for m in ("tensorflow", "mesh_tensorflow"))
needs_mesh_tf = pytest.mark.skipif(
    not HAVE, reason="needs tensorflow and mesh-tensorflow (pip install '.[tf]')"
)
ENV = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}


@cache
def worker():
    sections = ["rules", "moves", "refused", "scans", "mlp", "alexnet", "rows", "lstm", "transformer"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.emit.mesh_tf_worker", *sections],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


# --- rules and names


@pytest.mark.parametrize(
    ("mesh", "layout", "where", "texts"),
    [
        ("x:2;y:2", "a:x;a:y", "layout_rules", ("'a'", "x and y")),
        ("x:2", "a:y", "layout_rules", ("'a'", "'y'", "x:2")),
        ("x:0", "", "mesh_shape 'x:0'", ("'x'", "'0'")),
        ("x:2;x:4", "", "mesh_shape 'x:2;x:4'", ("'x'", "twice")),
        ("x:2", "a", "layout_rules 'a'", ("'a'", "NAME:VALUE")),
    ],
)
def test_a_layout_that_mesh_tf_would_refuse(mesh, layout, where, texts):
    with pytest.raises(PaseError) as e:
        check_layout(mesh, layout)
    assert e.value.where == where and all(t in e.value.what for t in texts)


@pytest.mark.parametrize(
    ("dims", "whole", "texts"),
    [
        ([("a", 4), ("b", 4)], (), ("'a'", "'b'", "both", "'x'")),
        ([("a", 3)], (), ("'a'", "3 elements", "2 devices")),
        ([("c", 3), ("c", 3)], (), ("twice", "'c'")),
        ([("a", 4)], ("a",), ("this op cannot split", "'a'")),
    ],
)
def test_a_tensor_that_mesh_tf_would_refuse(dims, whole, texts):
    with pytest.raises(PaseError) as e:
        check_tensor("t", dims, *check_layout("x:2", "a:x;b:x"), whole=whole)
    assert e.value.where == "t" and all(t in e.value.what for t in texts)


def test_axes_that_are_never_used_apart_become_one():
    mesh = Mesh(names=("x", "y", "z", "w"), sizes=(2, 2, 4, 1))
    together = [{"b": ("x", "y")}, {"k": ("z",), "b": ("x", "y")}, {}]
    assert merged_axes(mesh, together)[1] == {"x_y": 4, "z": 4}
    assert merged_axes(mesh, [*together, {"h": ("x",)}])[1] == {"x": 2, "y": 2, "z": 4}


def test_an_axis_that_splits_what_walks_no_tensor_is_used_by_none():
    """Only the copy's pending dim uses x alone. It does not index a tensor, so x and y are merged all the same."""
    graph = from_text(
        "graph g\ntensor t float32[8] activation\ntensor u float32[8] activation copy=t\n"
        "node t (b=8)\n  generate iota -> t[b]\n"
        "node u (b=8, pending=0 pending)\n  copy copy t[b] -> u[b]\n"
    )
    mesh = Mesh(names=("x", "y"), sizes=(2, 2))
    strategy = {"t": {"b": ("x", "y")}, "u": {"b": ("x", "y"), "pending": ("x",)}}
    assert Names(graph, mesh, strategy).axes == {"x_y": 4}


AXES = {"x": 2, "y": 3}


@st.composite
def layouts(draw):
    """Two layouts of one tensor: factors of its dims, and the factor that each axis splits."""
    extents = draw(st.lists(st.sampled_from([1, 2, 6, 12, 36]), min_size=1, max_size=3))

    def one(prefix):
        groups = []
        for i, extent in enumerate(extents):
            group = []
            while extent > 1 and draw(st.booleans()):
                f = draw(st.sampled_from([d for d in range(2, extent + 1) if extent % d == 0]))
                group.append(MeshTfDim(f"{prefix}{i}{len(group)}", f))
                extent //= f
            groups.append([*group, *([MeshTfDim(f"{prefix}{i}{len(group)}", extent)] if extent > 1 else [])])
        for axis, ways in AXES.items():
            free = [
                (i, k)
                for i, g in enumerate(groups)
                for k, d in enumerate(g)
                if not d.axis and d.size % ways == 0
            ]
            if free and draw(st.booleans()):
                i, k = draw(st.sampled_from(free))
                groups[i][k] = MeshTfDim(groups[i][k].base, groups[i][k].size, axis)
        return tuple(map(tuple, groups))

    return one("a"), one("b")


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_moves_end_where_they_should_by_steps_that_lower_both_ways(pair):
    have, want = pair
    steps = reshape_steps(have, want, AXES)
    assert (steps[-1] if steps else flat(have)) == flat(want)
    at = flat(have)
    for step in steps:
        assert direct(at, step, AXES), f"{at} -> {step}"
        at = step


def test_two_axes_do_not_trade_places_in_one_reshape():
    a, b = MeshTfDim("a", 6, "x"), MeshTfDim("b", 6, "y")
    steps = reshape_steps(((a,), (b,)), ((MeshTfDim("a", 6, "y"),), (MeshTfDim("b", 6, "x"),)), AXES)
    assert len(steps) > 1


@pytest.mark.parametrize("model", ["mlp", "transformer", "rnnlm", "alexnet"])
@pytest.mark.parametrize("strategy", ["ours@2x4", "random3@2x2x2"])
def test_every_tensor_of_a_program_obeys_the_rules(model, strategy):
    """``program`` checks each of its tensors. A scan that is refused is named in the error."""
    plan = reduced(model).plan(strategy)
    try:
        text, layout = mesh_tf.program(plan)
    except PaseError as e:
        assert model in ("transformer", "rnnlm"), e
        assert re.search(r"'scan' at .*\.py", str(e)), e
        return
    compile(text, "program.py", "exec")
    mesh, rules = check_layout(layout.mesh_shape, layout.layout_rules)
    for name, dims in layout.dims.items():
        check_tensor(name, dims, mesh, rules)
    assert set(layout.dims) == {*plan.parameters, *plan.inputs}


def test_storage_is_the_plan_s():
    plan = reduced("mlp").plan("ours@2x4")
    _, layout = mesh_tf.program(plan)
    mesh, rules = check_layout(layout.mesh_shape, layout.layout_rules)
    for name, tensor in plan.parameters.items():
        planned = sorted(a for axes in tensor.storage for a in axes)
        mine = sorted(a for d, _ in layout.dims[name] if d in rules for a in rules[d].split("_"))
        assert planned == mine, name
    assert mesh


def test_what_has_no_translation_is_named():
    def loss(w, x):
        return jnp.sort(x @ w).sum()

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((8, 8), (8, 8))]
    plan = case_of(loss, *shapes).plan("random0@2x2x2")
    with pytest.raises(PaseError, match=r"'sort' at .*test_mesh_tf\.py:\d+"):
        mesh_tf.program(plan)


# --- against Mesh-TensorFlow itself


@needs_mesh_tf
def test_our_rules_are_mesh_tf_s():
    """pase refuses all that Mesh-TF refuses, and in addition rules that give two axes to a dim that no tensor has."""
    cases = worker()["rules"]
    assert len(cases) == 400 and 50 < sum(bool(c["theirs"]) for c in cases) < 350
    for c in cases:
        assert c["ours"] or not c["theirs"], c
        if c["ours"] and not c["theirs"]:
            (dim,) = re.findall(r"dim '(\w)' has two mesh axes", c["ours"])
            assert f"{dim}:" not in c["dims"], c


@needs_mesh_tf
def test_moves_keep_the_values_and_the_gradients():
    cases = worker()["moves"]
    assert max(c["steps"] for c in cases) > 2
    assert all(c["value"] == 0 and c["gradient"] == 0 for c in cases)


@needs_mesh_tf
@pytest.mark.parametrize("model", ["mlp", "alexnet", "rows", "lstm", "transformer"])
def test_a_step_is_tensorflow_s(model):
    found = [v for k, v in worker().items() if k.partition(" ")[0] == model]
    assert found
    for step in found:
        assert step["rules"] and step["lowered"], "nothing is split"
        assert step["loss_error"] <= 2e-6 * abs(step["loss"])
        assert step["gradient_error"] < 5e-6
        assert step["update_error"] < 1e-6


@needs_mesh_tf
def test_mesh_tf_moves_what_the_plan_says():
    """Mesh-TF has no reduce-scatter: what the plan reduce-scatters is all-reduced and then sliced."""
    step = worker()["mlp ours@4x2"]
    planned, lowered = step["planned"], step["lowered"]
    assert lowered["allconcat"] == planned["all_gather"] > 0
    summed = planned["all_reduce"] + planned["reduce_scatter"]
    assert summed <= lowered["allreduce"] <= summed + planned.get("all_to_all", 0)


@needs_mesh_tf
def test_what_tensorflow_models_cannot_have_is_named():
    said = worker()["refused"]
    assert "'Cumsum' at running" in said["cumulative"]
    assert re.search(r"'\w*While' at until.*depends on data", said["until"])


def test_what_jax_programs_cannot_have_is_said_at_once_with_what_to_do():
    def loss(w, x):
        def turn(h, row):
            return jnp.tanh(h @ row), None

        until = jax.lax.while_loop(lambda h: jax.lax.stop_gradient(h).sum() < 3, lambda h: h + 1, x)
        return jnp.cumsum(jax.lax.scan(turn, x, w)[0]).mean() + jax.lax.stop_gradient(until).mean()

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 8, 8), (4, 8))]
    plan = pase.compile(loss, *shapes, devices=2, baselines=False)
    with pytest.raises(PaseError, match=r"'cumsum' at .*; 'while' at .* lax\.scan"):
        mesh_tf.program(plan)
    long = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((300, 8, 8), (4, 8))]
    plan = pase.compile(lambda w, x: jax.lax.scan(turn_of, x, w)[0].mean(), *long, devices=2, baselines=False)
    with pytest.raises(PaseError, match="300 iterations"):
        mesh_tf.program(plan)


def turn_of(h, w):
    return jnp.tanh(h @ w), None


@needs_mesh_tf
def test_a_scan_is_written_out_turn_by_turn():
    """Forward and in reverse, with carries that are exchanged, and stacked results: loss and gradients equal JAX's."""
    for step in worker()["scans"]:
        assert step["layout"], "nothing is split"
        assert step["loss"] == pytest.approx(step["wanted"], rel=1e-6)
        assert step["gradient_error"] <= 2e-6


@needs_mesh_tf
def test_a_written_program_runs(tmp_path):
    layout, program = tmp_path / "layout.json", tmp_path / "mlp_mtf.py"
    plan = pase.compile(
        "zoo:mlp?batch=16&layers=1&features=8&hidden=16&classes=4", devices=4, baselines=False
    )
    plan.save(layout)
    with pytest.raises(PaseError) as e:
        registry.emit(pase.load(layout), "mesh-tf", program)
    assert "zoo:mlp" in e.value.where and "model" in e.value.fix

    said = reported("emit", layout, "--to", "mesh-tf", "-o", program)
    assert "mesh_shape" in said["written"] and 'MESH_SHAPE = "' in program.read_text()
    done = subprocess.run(
        [sys.executable, str(program)], env=ENV, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.findall(r"step (\d): loss \d", done.stdout) == ["1", "2", "3"]


def test_names_of_a_model_are_no_code():
    """The names that a model gives its parameters are string literals in the program."""
    odd = 'w"]; import os  # \n"""\nraise SystemExit("no"'

    def loss(params, x):
        return (x @ params[odd]).sum()

    shapes = [jax.ShapeDtypeStruct((8, 8), "float32")] * 2
    plan = case_of(loss, {odd: shapes[0]}, shapes[1], name=odd).plan("random0@2x2x2")
    text, _ = mesh_tf.program(plan)
    tree = ast.parse(text)
    assert not any("os" in [a.name for a in n.names] for n in ast.walk(tree) if isinstance(n, ast.Import))
    (table,) = (
        n.value for n in tree.body if isinstance(n, ast.Assign) and "PARAMETERS" in ast.unparse(n.targets[0])
    )
    assert list(ast.literal_eval(table)) == [odd]
