"""A plan in a sentence, against strategies that are known."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import pase
from pase.machine import Mesh
from pase.plan.answer import answer, split_text, strategy_in_words
from pase.plan.error_bar import interval
from pase.plan.table import headline, layer_table
from pase.questions.explain import explain
from pase.questions.report import report_page

MODEL = "zoo:gpt2?batch=16&layers=2&seq=128&vocab=512"


@pytest.fixture(scope="module")
def plans() -> dict[str, pase.Plan]:
    return dict(pase.compare(MODEL, devices=8, machine="h100x8", max_axes=1))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("data_parallel", "data parallelism over 8 devices"),
        ("zero2", "data parallelism over 8 devices with optimizer state sharded (ZeRO-2)"),
        ("fsdp", "FSDP over 8 devices"),
        ("megatron_4x2", "data parallelism over 4 × model parallelism over 2"),
        ("megatron_sp_fsdp_2x4", "FSDP over 2 × model parallelism over 4"),
    ],
)
def test_common_strategies_have_their_names(plans: dict[str, pase.Plan], name: str, says: str) -> None:
    assert strategy_in_words(plans[name]) == says


def test_what_is_stored_on_fewer_devices_is_said_by_devices(plans: dict[str, pase.Plan]) -> None:
    """Where some parameters are whole or split less, no average such as 1/7 of the parameters."""
    plan = plans["fsdp"]
    largest = max(plan.parameters, key=lambda path: plan.parameters[path].elements)
    none = dict.fromkeys([largest], replace(plan.parameters[largest], storage=((),) * 2))
    some = replace(plan, parameters={**plan.parameters, **none})
    assert re.fullmatch(r"FSDP over 8 devices \((most|\d+% of the) parameters\)", strategy_in_words(some))


def test_weights_that_are_split_over_few_devices_are_fsdp_too(
    plans: dict[str, pase.Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pase.plan.answer._shards", lambda plan, axes, stored: 1.75)
    assert strategy_in_words(plans["fsdp"]) == "FSDP over 8 devices (most parameters)"


def test_parameters_that_are_used_as_they_are_split_make_no_fsdp(plans: dict[str, pase.Plan]) -> None:
    """A recommender's tables that are split by column were called FSDP, though nothing gathers them."""
    plan = plans["fsdp"]
    ours = replace(next(iter(plan.parameters.values())), shape=(4096, 4096, 8), storage=((), ("data",), ()))
    stays, gathered = replace(ours, used_as=()), replace(ours, used_as=(ours.storage, ((), (), ())))
    says = strategy_in_words(replace(plan, parameters={**plan.parameters, "table": stays}))
    assert re.fullmatch(r"FSDP over 8 devices \(90% of the parameters split where they are used\)", says)
    rest = plans["data_parallel"].parameters
    says = strategy_in_words(replace(plan, parameters={**rest, "table": stays}))
    assert says == "data parallelism over 8 devices (90% of the parameters split where they are used)"
    says = strategy_in_words(replace(plan, parameters={**plan.parameters, "table": gathered}))
    assert says == "FSDP over 8 devices"


def test_weights_that_are_gathered_as_something_made_of_them_make_fsdp() -> None:
    """A weight divided by its norm is split where it is divided, and gathered after that."""

    def loss(p: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in p:
            x = jnp.tanh(x @ (w / jnp.linalg.norm(w)))
        return jnp.mean(x)

    shape = jax.ShapeDtypeStruct
    p, x = [shape((2048, 2048), "float32")] * 3, shape((4096, 2048), "float32")
    found = dict(pase.compare(loss, p, x, devices=8, machine="h100x8", max_axes=1, baselines=["fsdp"]))
    assert strategy_in_words(found["fsdp"]) == "FSDP over 8 devices"


@pytest.mark.parametrize("every", [False, True])
def test_rows_add_up_to_compute_and_communication(plans: dict[str, pase.Plan], every: bool) -> None:
    for plan in plans.values():
        table = layer_table(plan, most=None if every else 6)
        header = [str(c.header) for c in table.columns]
        for name, whole in (("compute", plan.compute), ("comm.", plan.communication)):
            cells = [str(c) for c in table.columns[header.index(name)].cells]
            assert sum(map(seconds, filter(None, cells))) == pytest.approx(whole, rel=0.01)


def seconds(text: str) -> float:
    number, _, unit = text.partition(" ")
    return float(number) * {"": 1.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]


def test_the_first_line_has_the_step_the_memory_and_what_would_do(plans: dict[str, pase.Plan]) -> None:
    ours = plans["pase"]
    first = answer(ours)
    assert " ".join(str(ours).split()).startswith(first)
    assert (
        f" {interval(ours)} a step, " in first and f"of {ours.memory_there / 2**30:.3g} GiB a device" in first
    )
    gain = min(v for k, v in ours.baselines.items() if k not in ours.too_large) / ours.cost - 1
    if gain < 0.0005:
        assert "as fast: take that" in first
    else:
        assert f"{gain:.0%} faster than" in first or f"{gain:.1%} faster" in first


def test_a_plan_for_a_target_is_compared_with_any_program(plans: dict[str, pase.Plan]) -> None:
    ours = plans["pase"]
    costs = {"fsdp": ours.cost, "any_program": ours.cost * 0.98}
    assert answer(replace(ours, baselines=costs)).endswith(
        "; as fast as plain FSDP, 2.0% slower than any program"
    )


def test_the_batch_is_named_without_the_variables_of_modules(plans: dict[str, pase.Plan]) -> None:
    ours = plans["pase"]
    some = next(iter(ours.inputs.values()))
    said = headline(replace(ours, inputs={"variables.rngs.count": some, "tokens": some}))
    assert " tokens " in said[1] and "rngs" not in said[1]
    assert " variables.rngs.count " in headline(replace(ours, inputs={"variables.rngs.count": some}))[1]


def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for name in sorted(w):
        x = jax.nn.gelu(x @ w[name])
    return jnp.mean(jnp.square(x))


def test_equal_layers_are_one_row_and_long_plans_are_cut() -> None:
    """The layers are written out; every other one has another width, and is a row of its own."""
    shapes = {f"layers.{i}": (512, 768) if i % 2 == 0 else (768, 512) for i in range(8)}
    w = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    plan = pase.compile(loss, w, x, devices=4, machine="h100x8", baselines=False)
    text = str(plan)
    assert text.count("layers.*:dot ×4") == 2 and len(text.splitlines()) <= 40

    wide = {f"w{chr(97 + i)}": jax.ShapeDtypeStruct((512, 512), jnp.bfloat16) for i in range(26)}
    wide |= {f"v{chr(97 + i)}": jax.ShapeDtypeStruct((512, 512), jnp.bfloat16) for i in range(26)}
    plan = pase.compile(loss, wide, x, devices=4, machine="h100x8", baselines=False, max_axes=1)
    from pase.plan.table import as_text

    assert len(str(plan).splitlines()) <= 40 and "--all lists them" in str(plan)
    every = as_text(plan, every_layer=True)
    assert all(f"{name}:dot" in every for name in wide) and "--all" not in every


def test_one_device_has_no_strategy_to_compare() -> None:
    assert answer(pase.compile(MODEL, devices=1, machine="h100x8")).count(";") == 1


def test_the_batch_of_a_whole_step_is_told_from_its_state() -> None:
    """The optimizer's state has more dims than the batch, and is no batch. It was counted as parameters."""
    w = jax.ShapeDtypeStruct((512, 8, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((256, 512), jnp.float32)

    def step(w: jax.Array, momentum: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        made, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.einsum("bd,dhk->bhk", x, w) ** 2))(w)
        momentum = 0.9 * momentum + gradient
        return w - momentum, momentum, made

    plans = dict(pase.compare(step, w, w, x, devices=8, machine="h100x8", mode="step", mesh="8"))
    plain = plans["data_parallel"]
    assert strategy_in_words(plain) == "data parallelism over 8 devices"
    assert plain.overlap is not None
    assert plain.memory.parameters == plain.memory.optimizer == 4 * 512 * 8 * 64
    assert f" {512 * 8 * 64 / 1e6:.3g} M parameters" in str(plain)
    sharded = replace(plain.parameters["momentum"], storage=(("data",), (), ()))
    says = strategy_in_words(replace(plain, parameters={**plain.parameters, "momentum": sharded}))
    assert says == "data parallelism over 8 devices with optimizer state sharded (ZeRO-2)"


def test_rows_name_axes_as_the_mesh_line_does() -> None:
    """The table, ``explain`` and the report say data where the mesh line says data=8 (2×4); layout.json has data2."""
    plan = pase.compile(MODEL, devices=8, machine="h100x8", baselines=False, mesh="data=2,data2=4")
    assert any(("data2",) in t.storage for t in plan.parameters.values()), (
        "nothing is split over a part of data"
    )
    text, page = str(plan), report_page(explain(plan, time_limit=0))
    assert "data=8 (2×4)" in text and "split over data (4 of 8)" in text and "b:data " in text
    assert "is split over data, 8 ways, in products" in page and "data (4 of 8)" in page
    read = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)  # the widgets have the real names
    assert "data2" not in text and "data2" not in read


def test_dims_of_equal_size_that_have_no_name_are_all_listed() -> None:
    """A row gives such a dim by its size. Two of them are two entries."""
    mesh = Mesh(names=("data", "data2"), sizes=(2, 4))
    assert (
        split_text([("243", ("data",)), ("243", ("data2",))], mesh) == "243:data (2 of 8)  243:data (4 of 8)"
    )
