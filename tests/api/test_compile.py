"""pase.compile on callables, and what it says of bad input."""

from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

import pase
from pase.errors import PaseError
from tests.command import reported

S = jax.ShapeDtypeStruct
PARAMS = {"w": S((64, 128), "float32"), "v": S((128, 8), "float32")}
BATCH = S((32, 64), "float32")


def loss(params, x):
    return jnp.mean((jax.nn.relu(x @ params["w"]) @ params["v"]) ** 2)


def test_a_callable_on_shapes_alone():
    plan = pase.compile(loss, PARAMS, BATCH, devices=8)
    assert plan.model == "loss"
    assert set(plan.parameters) == {"w", "v"}
    assert plan.mesh.devices == 8


def test_a_plan_shows_itself_in_a_line_and_in_a_notebook():
    """Names of a model are text there, whatever they are."""
    shape = jax.ShapeDtypeStruct((8, 8), "float32")
    plan = pase.compile(lambda p, x: (x @ p["<b>w[red]"]).sum(), {"<b>w[red]": shape}, shape, devices=4)
    assert repr(plan).startswith("<Plan ") and "predicted, optimal>" in repr(plan) and "\n" not in repr(plan)
    page = plan._repr_html_()
    assert page.startswith("<pre") and "&lt;b&gt;w[red]" in page and "<b>" not in page
    assert "predicted" in page and "4 devices" in page


def test_arrays_and_shapes_give_the_same_plan():
    arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (PARAMS, BATCH))
    assert pase.compile(loss, *arrays, devices=8).diff(pase.compile(loss, PARAMS, BATCH, devices=8)) == []


def test_the_mesh_can_be_given_and_keeps_its_names():
    plan = pase.compile(loss, PARAMS, BATCH, devices=8, mesh="rows=2,cols=4")
    assert plan.mesh.names == ("rows", "cols")
    assert len(plan.tried) == 1


def test_a_finer_mesh_is_never_worse():
    """A mesh's strategies are among those of a mesh that splits its axes further."""
    coarse = pase.compile(loss, PARAMS, BATCH, devices=8, mesh="8", baselines=False)
    fine = pase.compile(loss, PARAMS, BATCH, devices=8, mesh="2x2x2", baselines=False)
    assert fine.cost <= coarse.cost * (1 + 1e-9)


def test_every_optimizer_and_machine_and_cost_model():
    from pase import costmodels, machine

    for optimizer in ("sgd", "momentum", "adam"):
        assert pase.compile(loss, PARAMS, BATCH, devices=4, optimizer=optimizer).optimizer == optimizer
    for name in machine.names():
        assert pase.compile(loss, PARAMS, BATCH, devices=4, machine=name).cost > 0
    for name in costmodels.names():
        assert pase.compile(loss, PARAMS, BATCH, devices=4, cost_model=name).cost_model == name


def helper_model():
    return loss, PARAMS, BATCH


def test_a_model_by_module_and_function():
    plan = pase.compile("tests.api.test_compile:helper_model", devices=4)
    assert set(plan.parameters) == {"w", "v"}


mystery = Primitive("mystery")  # an op that no frontend can know
mystery.def_abstract_eval(lambda x: x)


def unknown_op(params, x):
    return jnp.mean(mystery.bind(x @ params["w"]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pase.compile("zoo:gpt2", devices=0), "devices: must be a positive whole number, got 0"),
        (lambda: pase.compile("zoo:gpt2", devices=2.5), "devices: must be a positive whole number, got 2.5"),
        (lambda: pase.compile("zoo:gpt3", devices=8), "gpt3"),
        (lambda: pase.compile("gpt2", devices=8), "'gpt2' is not a model; write zoo:NAME"),
        (
            lambda: pase.compile("no.such.module:f", devices=8),
            "'no.such.module:f': cannot import 'no.such.module'",
        ),
        (lambda: pase.compile("tests.api.test_compile:nothing", devices=8), "has no 'nothing'"),
        (
            lambda: pase.compile("tests.api.test_compile:loss", devices=8),
            "must be a function without arguments",
        ),
        (lambda: pase.compile("zoo:mlp", PARAMS, devices=8), "takes no further arguments"),
        (lambda: pase.compile(loss, devices=8), "no example arguments"),
        (
            lambda: pase.compile(3, devices=8),
            "not int; see pase.compile's help",
        ),
        (lambda: pase.compile(loss, PARAMS, BATCH, devices=8, mesh="3x3"), "9 devices, but 8 were asked for"),
        (lambda: pase.compile(loss, PARAMS, BATCH, devices=8, machine="abacus"), "abacus"),
        (
            lambda: pase.compile(loss, PARAMS, BATCH, devices=8, cost_model="vibes"),
            "no cost model 'vibes'",
        ),
        (
            lambda: pase.compile(loss, PARAMS, BATCH, devices=8, optimizer="hope"),
            "no optimizer 'hope'; use one of sgd",
        ),
        (
            lambda: pase.compile(loss, PARAMS, BATCH, devices=8, unknown="free"),
            "unknown: must be 'error' or 'replicate'",
        ),
        (lambda: pase.compile(loss, {"w": "text"}, BATCH, devices=8), "params['w']: it is str"),
        (
            lambda: pase.compile(loss, PARAMS | {"w": S((65, 128), "float32")}, BATCH, devices=8),
            "JAX cannot trace loss on these shapes",
        ),
        (lambda: pase.compile(lambda p, x: x @ p["w"], PARAMS, BATCH, devices=8), "pase needs a scalar loss"),
        (
            lambda: pase.compile(unknown_op, PARAMS, BATCH, devices=8),
            "no lowering for JAX primitive 'mystery'",
        ),
    ],
)
def test_bad_input_gets_one_clear_error(call, message):
    with pytest.raises(PaseError) as e:
        call()
    assert message in str(e.value)


def test_an_unknown_op_names_the_users_line_and_can_be_replicated():
    with pytest.raises(PaseError, match=r"test_compile.py:\d+.*\(unknown_op\)"):
        pase.compile(unknown_op, PARAMS, BATCH, devices=8)
    plan = pase.compile(unknown_op, PARAMS, BATCH, devices=8, unknown="replicate")
    assert not next(n for n in plan.nodes if n.op == "opaque").split


def test_dims_that_do_not_divide_are_left_whole():
    odd = {"w": S((63, 127), "float32"), "v": S((127, 7), "float32")}
    plan = pase.compile(loss, odd, S((31, 63), "float32"), devices=8)
    assert all(not axes for t in plan.parameters.values() for axes in t.storage)
    assert "data_parallel" in plan.skipped


def test_the_readmes_first_command_runs_its_second(tmp_path, monkeypatch):
    """make demo, by hand: a plan of the published size, run in the reduced one (bfloat16 there, float32 here). The
    gradient check takes three times as long as all else; the README's own commands run it (tests/house)."""
    layout = tmp_path / "layout.json"
    pase.compile("zoo:gpt2", devices=32).save(layout)
    left_out = Mock(as_json=dict, verdict="undecided")
    monkeypatch.setattr("pase.commands.run.gradient_check", lambda *_: left_out)
    result = reported("run", layout, "--reduced", "--devices", 8)
    assert result["agrees"]
    by_kind = {c["kind"]: c for c in result["collectives"]}
    assert by_kind["all_reduce"]["compiled_bytes"] > 0 < by_kind["reduce_scatter"]["compiled_bytes"]
    assert all(c["compiled_bytes"] == c["predicted_on_cpu"] for c in by_kind.values())


def test_compare_lists_every_baseline_priced_as_compile_prices_it():
    plan = pase.compile(loss, PARAMS, BATCH, devices=8)
    rows = dict(pase.compare(loss, PARAMS, BATCH, devices=8))
    assert set(rows) == {"pase", *plan.baselines}
    assert rows["pase"].cost == plan.cost == min(p.cost for p in rows.values())
    for name, cost in plan.baselines.items():
        assert rows[name].cost == pytest.approx(cost, rel=1e-9)
