"""Layouts that the user requires: the plan keeps them, and says what each costs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pase
from pase.errors import PaseError

MESH = "data=4,model=2"
WIDTH, HIDDEN = 512, 2048


def loss(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for layer in params:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x - batch["y"]) ** 2)


def shape(*sizes: int, spec: Any = None) -> Any:
    own = None if spec is None else NamedSharding(AbstractMesh((4, 2), ("data", "model")), spec)
    return jax.ShapeDtypeStruct(sizes, "float32", sharding=own)


def arguments(up: Any = None, batch: Any = None) -> tuple[Any, ...]:
    layers = [{"up": shape(WIDTH, HIDDEN, spec=up), "down": shape(HIDDEN, WIDTH)} for _ in range(3)]
    return loss, layers, {"x": shape(256, WIDTH, spec=batch), "y": shape(256, WIDTH, spec=batch)}


def planned(constraints: Any = None, *args: Any, **options: Any) -> pase.Plan:
    return pase.compile(*(args or arguments()), devices=8, mesh=MESH, constraints=constraints, **options)


def test_a_constraint_is_as_the_same_sharding_of_the_arrays() -> None:
    """The reference are arrays that have these shardings."""
    asked = {"*.up": P(None, "model"), "batch": P("data")}
    plan = planned(asked, baselines=False)
    given = planned(None, *arguments(P(None, "model"), P("data")), baselines=False)
    assert plan.cost == given.cost and plan.optimal
    assert {p: t.storage for p, t in plan.parameters.items()} == {
        p: t.storage for p, t in given.parameters.items()
    }
    assert all(plan.parameters[f"{i}.up"].storage == ((), ("model",)) for i in range(3))
    assert all(t.storage == (("data",), ()) for t in plan.inputs.values())


def test_the_plan_says_what_each_constraint_costs() -> None:
    asked = {"*.down": (None, None), "batch": "data"}
    plan, free = planned(asked), planned(baselines=False)
    assert plan.cost > free.cost
    said = str(plan.noted[-1])
    assert f"together cost {plan.cost / free.cost - 1:.1%}" in said
    for name in asked:
        fewer = planned({k: v for k, v in asked.items() if k != name}, baselines=False)
        more = plan.cost / fewer.cost - 1
        assert f"'{name}' " + (f"{more:.1%} (" if more >= 0.0005 else "nothing") in said
    # "data" alone is for the first dim; the search decides the others.
    assert all(t.storage[0] == ("data",) for t in plan.inputs.values())


def test_dims_may_be_left_to_the_search() -> None:
    open_ = planned({"0.up": (..., "model")}, baselines=False)
    assert open_.parameters["0.up"].storage[1] == ("model",)
    assert planned({"0.up": (..., ...)}, baselines=False).cost == planned(baselines=False).cost
    assert planned({"0.up": P(P.UNCONSTRAINED, "model")}, baselines=False).cost == open_.cost


@pytest.mark.parametrize(
    ("constraints", "what"),
    [
        ({"0.upp": "model"}, "did you mean '0.up'"),
        ({"0.up": "modle"}, "no axis 'modle'"),
        ({"0.up": ("model", "data", None)}, "3 entries, but '0.up' has 2 dims"),
        ({"0.up": 3}, "3 is no layout"),
        ({"0.up": ("model", "model")}, "two dims"),
        ({"0.up": P("data"), "*.up": P("model")}, "by constraint '0.up'"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused(constraints: Any, what: str) -> None:
    with pytest.raises(PaseError) as e:
        planned(constraints, baselines=False)
    assert what in e.value.what and e.value.where.startswith("constraint '") and e.value.fix


def test_an_axis_of_one_device_splits_nothing() -> None:
    """So a program may run on any number of devices, one included."""
    for mesh, devices in (("data=1,model=8", 8), ("data=1", 1)):
        asked = {"batch": ("data", None)}
        plan = pase.compile(*arguments(), devices=devices, mesh=mesh, constraints=asked, baselines=False)
        assert all(t.storage == ((), ()) for t in plan.inputs.values())


def test_the_axes_need_names_and_stages_take_no_constraints() -> None:
    for mesh in (None, "4x2"):
        with pytest.raises(PaseError, match="--mesh data=4,model=2"):
            pase.compile(*arguments(), devices=8, mesh=mesh, constraints={"batch": "data"})
    with pytest.raises(PaseError) as e:
        planned({"batch": "data"}, pipeline=2)
    assert "'batch.x'" in e.value.what and "stages" in e.value.what
    with pytest.raises(PaseError) as e:
        planned({"batch": P("data")}, *arguments(batch=P("model")), baselines=False)
    assert "own sharding" in e.value.what


def test_a_constraint_that_cannot_be_kept_is_named() -> None:
    """The arrays have no layout of their own, so the fix is about the constraint."""
    layers = [{"up": shape(WIDTH, HIDDEN), "down": shape(HIDDEN, WIDTH)}]
    batch = {"x": shape(6, WIDTH), "y": shape(6, WIDTH)}
    with pytest.raises(PaseError, match="4 devices do not divide the 6 elements of its dim 0") as e:
        planned({"batch": ("data", None)}, loss, layers, batch)
    assert e.value.fix == "change its layout, or leave out the constraint 'batch'"


def test_a_constraint_on_the_dim_of_a_loop_is_named_alone() -> None:
    def looped(p: Any, x: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])
        return jnp.mean((h @ p["head"]) ** 2)

    params = {"layers": shape(4, WIDTH, WIDTH), "head": shape(WIDTH, WIDTH)}
    asked = {"layers": ("model", None, None), "head": (None, "model")}
    with pytest.raises(PaseError, match="its dim 0 cannot be split, because a loop runs over it") as e:
        planned(asked, looped, params, shape(8, WIDTH))
    assert e.value.fix == "change its layout, or leave out the constraint 'layers'"


def test_the_batch_is_what_holds_examples() -> None:
    """Not a key, a table or the Variables of a model, which have no names that the user wrote."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(64, 256, rngs=rngs)
            self.norm = nnx.BatchNorm(256, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

    def of_model(model: Any, x: Any, key: Any, weights: Any) -> Any:
        h = model.drop(model.norm(model.up(x)))
        return jnp.mean((h + jax.random.normal(key, h.shape)) ** 2 * weights)

    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    key, weights = jax.ShapeDtypeStruct((2,), "uint32"), shape(256)
    plan = planned({"batch": "data"}, of_model, model, shape(512, 64), key, weights, baselines=False)
    split = {path for path, t in plan.inputs.items() if any(t.storage)}
    assert split == {"x"} and len(plan.inputs) > 3
