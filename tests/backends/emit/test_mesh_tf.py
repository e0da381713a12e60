"""Plans as Mesh-TensorFlow programs: layouts pass Mesh-TF's own checks, and a written program runs."""

import ast
import re
import subprocess
import sys

import jax
import pytest

import pase
from bench.cases.plans import case_of, reduced
from pase.backends import registry
from pase.backends.emit import mesh_tf
from pase.backends.mesh_tf.legality import check_layout, check_tensor
from pase.errors import PaseError
from tests.backends.mesh_tf.results import ENV, needs_mesh_tf
from tests.command import reported


@pytest.mark.parametrize("model", ["mlp", "transformer", "rnnlm", "alexnet"])
@pytest.mark.parametrize("strategy", ["ours@2x4", "random3@2x2x2"])
def test_every_tensor_of_a_program_obeys_the_rules(model, strategy):
    """``program`` checks each of its tensors."""
    plan = reduced(model).plan(strategy)
    text, layout = mesh_tf.program(plan)
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
