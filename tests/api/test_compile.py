"""pase.compile on callables, and its errors for bad input."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

import pase
from pase.errors import PaseError
from pase.files import progress

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
    """Names from the model are shown as text and never as markup."""
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
    """The strategies of a mesh are also strategies of a mesh that splits its axes further."""
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


def on_8(model, params=PARAMS, *batch, **options):
    return pase.compile(model, params, *(batch or (BATCH,)), devices=8, **options)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: pase.compile("zoo:gpt2", devices=0), ["devices", "0"]),
        (lambda: pase.compile("zoo:gpt2", devices=2.5), ["devices", "2.5"]),
        (lambda: pase.compile("zoo:gpt3", devices=8), ["gpt3"]),
        (lambda: pase.compile("gpt2", devices=8), ["'gpt2'", "zoo:NAME"]),
        (lambda: pase.compile("no.such.module:f", devices=8), ["'no.such.module:f'"]),
        (lambda: pase.compile("tests.api.test_compile:nothing", devices=8), ["'nothing'"]),
        (lambda: pase.compile("tests.api.test_compile:loss", devices=8), ["without arguments"]),
        (lambda: pase.compile("zoo:mlp", PARAMS, devices=8), ["zoo:mlp", "arguments"]),
        (lambda: pase.compile(loss, devices=8), ["example arguments"]),
        (lambda: pase.compile(3, devices=8), ["int"]),
        (lambda: on_8(loss, mesh="3x3"), ["9 devices", "8"]),
        (lambda: on_8(loss, mesh={"data": 2, "model": 4}), ["mesh", "dict", "mesh='data=2,model=4'"]),
        (lambda: on_8(loss, mesh=(2, 4)), ["mesh", "tuple", "mesh='data=4,model=2'"]),
        (lambda: on_8(loss, machine="abacus"), ["abacus"]),
        (lambda: on_8(loss, cost_model="vibes"), ["cost model 'vibes'", "analytic"]),
        (lambda: on_8(loss, optimizer="hope"), ["optimizer 'hope'", "sgd"]),
        (lambda: on_8(loss, unknown="free"), ["unknown", "'replicate'"]),
        (lambda: on_8(loss, {"w": "text"}), ["params['w']", "str"]),
        (lambda: on_8(loss, PARAMS | {"w": S((65, 128), "float32")}), ["loss", "shapes"]),
        (lambda: on_8(lambda p, x: x @ p["w"]), ["scalar loss"]),
        (lambda: on_8(unknown_op), ["'mystery'"]),
    ],
)
def test_bad_input_gets_one_clear_error(call, named):
    """The message names what is wrong: the option, argument or op, and its value or the choices."""
    with pytest.raises(PaseError) as e:
        call()
    assert all(text in str(e.value) for text in named), str(e.value)


def test_an_unknown_op_names_the_users_line_and_can_be_replicated():
    with pytest.raises(PaseError) as e:
        pase.compile(unknown_op, PARAMS, BATCH, devices=8)
    assert re.search(r"test_compile\.py:\d+.*\(unknown_op\)", e.value.where)
    plan = pase.compile(unknown_op, PARAMS, BATCH, devices=8, unknown="replicate")
    assert not next(n for n in plan.nodes if n.op == "opaque").split


def test_dims_that_do_not_divide_are_left_whole():
    odd = {"w": S((63, 127), "float32"), "v": S((127, 7), "float32")}
    plan = pase.compile(loss, odd, S((31, 63), "float32"), devices=8)
    assert all(not axes for t in plan.parameters.values() for axes in t.storage)
    assert "data_parallel" in plan.skipped


def test_compare_lists_every_baseline_priced_as_compile_prices_it():
    plan = pase.compile(loss, PARAMS, BATCH, devices=8)
    rows = dict(pase.compare(loss, PARAMS, BATCH, devices=8))
    assert set(rows) == {"pase", *plan.baselines}
    assert rows["pase"].cost == plan.cost == min(p.cost for p in rows.values())
    for name, cost in plan.baselines.items():
        assert rows[name].cost == pytest.approx(cost, rel=1e-9)


def test_a_long_compilation_says_where_it_is(capsys, monkeypatch):
    """Without a function for it, on standard error; ten seconds pass at once here."""
    monkeypatch.setattr(progress, "seldom", partial(progress.seldom, first_s=0.001, every_s=0.001))
    pase.compile("zoo:mlp", devices=4, cost_model="paper")
    assert "pase: tracing the model" in capsys.readouterr().err
    said = []
    pase.compile("zoo:mlp", devices=4, cost_model="paper", progress=said.append)
    assert said[0] == "tracing the model" and not capsys.readouterr().err
