"""Shardings by name: the plan of a Keras model is applied to the same model in JAX, by the variables' paths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

import jax
import jax.numpy as jnp
import jsonschema
import keras
import numpy as np

import pase
from pase.api import Plan
from pase.backends import registry
from pase.backends.emit import shardings_json
from pase.errors import PaseError
from pase.plan.types import TensorPlan


def keras_mlp() -> Any:
    x = keras.Input((32,), name="x")
    h = keras.layers.Dense(64, activation="relu", name="up")(x)
    h = keras.layers.LayerNormalization(name="norm", epsilon=1e-3)(h)
    return keras.Model(x, keras.layers.Dense(16, name="down")(h), name="mlp")


def jax_mlp(p: Any, x: Any) -> jax.Array:
    h = jax.nn.relu(x @ p["up/kernel"] + p["up/bias"])
    h = h - jnp.mean(h, -1, keepdims=True)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-3)
    return (h * p["norm/gamma"] + p["norm/beta"]) @ p["down/kernel"] + p["down/bias"]


def stored(plan: Plan, layouts: dict[str, Any]) -> Plan:
    """The plan with these storage layouts. Parameters and inputs without a layout are replicated."""

    def placed(tensors: Mapping[str, TensorPlan]) -> dict[str, TensorPlan]:
        return {
            k: replace(t, storage=layouts.get(k, ((),) * len(t.shape)), used_as=())
            for k, t in tensors.items()
        }

    return replace(plan, parameters=placed(plan.parameters), inputs=placed(plan.inputs))


@cache
def plans() -> dict[str, Plan]:
    """The search's plan, the FSDP plan, and one that uses both axes, with layers stored as by Megatron."""
    options = {"devices": 4, "mesh": "data=2,model=2", "dims": {"batch": 8}, "machine": "v100x8"}
    found = dict(pase.compare(keras_mlp(), **options))
    rows, columns, each = (("model",), ()), ((), ("model",)), (("model",),)
    megatron = {
        "up/kernel": columns,
        "up/bias": each,
        "norm/gamma": each,
        "norm/beta": each,
        "down/kernel": rows,
    }
    by_hand = stored(found["pase"], megatron | {"x": (("data",), ())})
    return {"pase": found["pase"], "fsdp": found["fsdp"], "megatron": by_hand}


def test_a_keras_plan_on_a_jax_model(tmp_path: Path) -> None:
    """Each plan, through the file, on 4 devices: loss and gradients do not change, and arrays have the layouts of the
    file."""
    model = keras_mlp()
    arrays = {v.path: np.asarray(v.numpy(), np.float32) for v in model.trainable_variables}
    x = np.random.default_rng(0).standard_normal((8, 32), dtype=np.float32)
    assert np.allclose(jax_mlp(arrays, x), model(x), atol=1e-5)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(jax_mlp(p, x)))

    wanted, wanted_gradients = jax.value_and_grad(loss)(arrays, x)
    split = 0
    for name, plan in plans().items():
        path = tmp_path / "names.json"
        assert "parameters" in registry.emit(plan, "names", path)
        data = shardings_json.load(path)
        where = shardings_json.jax_shardings(data, jax.devices()[:4])
        assert set(data["parameters"]) == set(arrays)
        placed = {k: jax.device_put(a, where[k]) for k, a in arrays.items()}
        gradients = {k: where[k] for k in arrays}
        step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, gradients))
        got, got_gradients = step(placed, jax.device_put(x, where["x"]))
        assert np.allclose(got, wanted, rtol=1e-5), name
        for k, g in got_gradients.items():
            assert np.allclose(g, wanted_gradients[k], atol=1e-5), (name, k)
            ways = np.prod(
                [data["mesh"][a] for axes in data["parameters"][k]["spec"] for a in axes], dtype=int
            )
            assert g.addressable_shards[0].data.size * ways == g.size
            split += ways > 1
    assert split


def test_activations_by_the_frameworks_names() -> None:
    plan = plans()["pase"]
    data = shardings_json.to_json(plan)
    jsonschema.Draft202012Validator(shardings_json.SCHEMA).validate(data)
    products = {k: t for k, t in data["activations"].items() if "MatMul" in k}
    assert {tuple(t["shape"]) for t in products.values()} == {(8, 64), (8, 16)}
    assert all((k.endswith(":0") and "up" in k) or "down" in k for k in products)


def test_a_jax_plan_too() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ p["w"])

    s = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    data = shardings_json.to_json(pase.compile(loss, {"w": s}, s, devices=4, baselines=False))
    assert data["frontend"] == "jax" and list(data["parameters"]) == ["w"]


def test_what_is_no_such_file(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    shardings_json.emit(plans()["pase"], path, model=None)
    good = json.loads(path.read_text())

    def refused(change: Any, where: str, *words: str) -> None:
        data = json.loads(json.dumps(good))
        change(data)
        path.write_text(json.dumps(data))
        with pytest.raises(PaseError) as e:
            shardings_json.load(path)
        assert e.value.where == f"{path} at {where}" and all(w in e.value.what for w in words), str(e.value)

    refused(lambda d: d.update(schema="pase.names/9"), "schema", "pase.names/1")
    refused(lambda d: d.pop("mesh"), "the top", "mesh")
    refused(lambda d: d["parameters"]["up/bias"].update(spec=[["gone"]]), "parameters/up/bias", "gone")
    refused(lambda d: d["parameters"]["up/bias"].update(spec=[]), "parameters/up/bias", "[64]")
    path.write_text("{")
    with pytest.raises(PaseError, match="is not JSON"):
        shardings_json.load(path)
    with pytest.raises(PaseError) as e:
        shardings_json.jax_shardings(good, jax.devices()[:1])
    assert e.value.where == "devices" and "4 devices" in e.value.what
