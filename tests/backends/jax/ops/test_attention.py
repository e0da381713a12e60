"""Attention runs on each device's part with the kernel that the program asks for, or from its definition without one.

In float64 on 8 host devices, the sharded step agrees with the unsharded one up to rounding. The kernels are compared
with the definition: Pallas' kernel in its interpreter. cuDNN's kernel is only lowered for CUDA, not run.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

from bench.cases.plans import case_of
from pase.backends.audit.xla import compare, sharded_step
from pase.backends.jax.ops.platforms import platform_of
from tests.backends.jax.ops.attending import (
    EXACT,
    D,
    S,
    arrays,
    case,
    difference,
    model,
    planned,
    written_out,
)


@pytest.fixture
def float64() -> Any:
    with jax.enable_x64(True):
        yield


SPLITS = [
    ("b", {"b": "a"}, "a=4,b=2"),
    ("q", {"q": "a"}, "a=8"),
    ("bq", {"b": "a", "q": "b"}, "a=2,b=4"),
    ("hg", {"h": "a", "g": "b"}, "a=2,b=4"),
    ("g", {"g": "a"}, "a=4,b=2"),
    ("qg", {"q": "a", "g": "b"}, "a=4,b=2"),
    ("qq", {"q": "ab"}, "a=2,b=4"),
    ("bqhg", {"b": "a", "q": "b", "h": "c"}, "a=2,b=2,c=2"),
]


@pytest.mark.some(5)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("split", "mesh"), [s[1:] for s in SPLITS], ids=[s[0] for s in SPLITS])
def test_parts_are_the_whole(split: dict[str, str], mesh: str, causal: bool) -> None:
    plan = planned(case(causal, "cudnn"), split, mesh)
    assert difference(plan, model(causal, None)) < EXACT


@pytest.mark.usefixtures("float64")
def test_a_device_without_the_kernel_says_so() -> None:
    plan = planned(case(True, "cudnn"), {"q": "a"}, "a=8")
    with pytest.warns(UserWarning, match=r"attending\.py.* cuDNN.* cpu devices lack"):
        jax.eval_shape(plan.jax.loss(), *arrays())


@pytest.mark.usefixtures("float64")
def test_a_bias_is_not_split_with_the_kernel_and_that_is_said() -> None:
    def loss(params: Any, x: Any) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[n]) for n in "qkv")
        mask = jnp.ones((1, 1, S, S), bool)
        return jnp.mean(jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn"))

    plan = planned(case_of(loss, *arrays()), {"b": "a"}, "a=4,b=2")
    with pytest.warns(UserWarning, match=r"cuDNN.* with a bias or a mask"):
        jax.eval_shape(plan.jax.loss(), *arrays())
    with pytest.warns(UserWarning, match=r"cuDNN.* cpu devices lack"):
        jax.eval_shape(plan.jax.loss(lowering="manual"), *arrays())


def test_a_flash_attention_of_parts_is_found_with_its_scale_and_blocks() -> None:
    def loss(params: Any, x: Any) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhk->bhsk", x, params[n]) for n in "qkv")
        y = flash_attention(q, k, v, causal=True, sm_scale=0.3)
        return jnp.mean(jnp.einsum("bhsk,hkd->bsd", y, params["o"]) ** 2)

    def alike(params: Any, x: Any) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[n]) for n in "qkv")
        y = written_out(q, k, v, is_causal=True, scale=0.3)
        return jnp.mean(jnp.einsum("bshk,hkd->bsd", y, params["o"]) ** 2)

    rng = np.random.default_rng(0)
    shapes = {"q": (D, 4, 8), "k": (D, 4, 8), "v": (D, 4, 8), "o": (4, 8, D)}
    params = {n: jnp.asarray(rng.normal(size=s)) for n, s in shapes.items()}
    x = jnp.asarray(rng.normal(size=(2, 128, D)))
    plan = case_of(loss, params, x).plan("ours@2x2x2")
    assert plan is not None
    with pytest.warns(UserWarning, match="Pallas' kernel for TPUs"):
        got = jax.jit(plan.jax.value_and_grad())(*plan.jax.device_put(params, x))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.value_and_grad(alike)(params, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


def test_a_mesh_without_devices_says_what_they_are() -> None:
    mesh = jax.make_mesh((2,), ("a",)).abstract_mesh
    assert platform_of(mesh) == mesh.abstract_device.platform == "cpu"
    other = mesh.abstract_device.__class__(device_kind="H100", num_cores=None, platform="gpu")
    assert platform_of(mesh.update(abstract_device=other)) == "gpu"


RINGS = [
    ("r", {"r": "a"}, "a=8"),
    ("rh", {"r": "a", "h": "b"}, "a=4,b=2"),
    ("br", {"b": "a", "r": "b"}, "a=4,b=2"),
    ("rr", {"r": "ab"}, "a=2,b=4"),
    ("rg", {"r": "b", "g": "a"}, "a=2,b=4"),
]


@pytest.mark.some(3)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("split", "mesh"), [s[1:] for s in RINGS], ids=[s[0] for s in RINGS])
def test_a_ring_is_the_whole(split: dict[str, str], mesh: str, causal: bool) -> None:
    """On 8 devices, parts have an odd number of positions, so they are not redistributed, and have unequal
    work under a causal mask; parts on fewer devices are redistributed."""
    plan = planned(case(causal, "fused"), split, mesh)
    assert "ppermute" in str(jax.make_jaxpr(plan.jax.loss())(*arrays()))
    assert difference(plan, model(causal, None)) < EXACT


@pytest.mark.usefixtures("float64")
def test_a_ring_sends_what_the_plan_says() -> None:
    """Except that XLA does not send the first keys and values again for backward, because nothing is recomputed."""
    plan = planned(case(True, "fused"), {"r": "a", "h": "b"}, "a=4,b=2")
    step = sharded_step(plan, optax.sgd(0.1), *arrays())
    (row,) = (r for r in compare(plan, step.compiled, step.lowering) if r.kind == "permute")
    once = next(c.nbytes for c in plan.collectives if c.kind == "permute")
    assert row.compiled == row.predicted - once > 0
