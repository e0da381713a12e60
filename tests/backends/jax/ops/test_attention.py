"""Attention runs on each device's part with the kernel that the program asks for, or from its definition without one.

In float64 on 8 host devices, the sharded step agrees with the unsharded one up to rounding. The kernels are compared
with the definition: Pallas' kernel in its interpreter. cuDNN's kernel is only lowered for CUDA, not run.
"""

from __future__ import annotations

import warnings
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

from bench.cases.plans import Case, case_of
from pase.api import Plan
from pase.backends.audit.xla import compare, sharded_step
from pase.backends.jax.ops.attention import _platform
from pase.backends.jax.ops.attention_kernels import Attended, AttentionFunctions, CuDNN, Flash, Reference
from pase.compiler.meshes.plans import plan_of
from pase.machine import mesh_from
from pase.tables.layouts import NOT_SPLIT

B, S, D, H, G, K = 4, 24, 8, 2, 4, 4
EXACT = 1e-12


@pytest.fixture
def float64() -> Any:
    with jax.enable_x64(True):
        yield


def written_out(
    q: Any, k: Any, v: Any, *, is_causal: bool, scale: float | None = None, **_: Any
) -> jax.Array:
    """Attention by its definition, in the operands' own precision (JAX computes every softmax in float32)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * scale
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores, axis=-1), v)


def model(causal: bool, implementation: Any) -> Any:
    """A layer with attention, a residual connection and a loss. implementation: as JAX names it; None: written out."""
    attend = (
        partial(jax.nn.dot_product_attention, implementation=implementation)
        if implementation
        else written_out
    )

    def loss(params: Any, x: Any) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[n]) for n in "qkv")
        y = attend(q, k, v, is_causal=causal)
        return jnp.mean((x + jnp.einsum("bshk,hkd->bsd", y, params["o"])) ** 2)

    return loss


def arrays() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shapes = {"q": (D, H * G, K), "k": (D, H, K), "v": (D, H, K), "o": (H * G, K, D)}
    params = {n: jnp.asarray(rng.normal(size=s)) for n, s in shapes.items()}
    return params, jnp.asarray(rng.normal(size=(B, S, D)))


@cache
def case(causal: bool, implementation: str) -> Case:
    return case_of(model(causal, implementation), *arrays())


def planned(case: Case, split: dict[str, str], mesh: str) -> Plan:
    """The plan that splits only the attention. split: dim (b, q, h, g; r for queries and keys) -> its mesh axes."""
    p = case.problem
    m = mesh_from(mesh, p.devices)
    (node,) = (n for n in p.graph.nodes if n.kind == "attention")
    q, k = node.main.reads[0].map.walks, node.main.reads[1].map.walks
    (heads,) = k[2].dims
    (group,) = set(q[2].dims) - {heads}
    *ring, queries = q[1].dims
    dims = {"b": q[0].dims[0], "q": queries, "r": "".join(ring), "h": heads, "g": group}
    place = {a: i for i, a in enumerate(m.names)}
    index = {d.name: i for i, d in enumerate(node.space)}
    chosen = {n.name: np.full(len(m.sizes), NOT_SPLIT, np.int8) for n in p.graph.nodes}
    for dim, axes in split.items():
        for a in axes:
            chosen[node.name][place[a]] = index[dims[dim]]
    return Plan.of(plan_of(p, chosen, m, "model", case.traced))


def difference(plan: Plan, loss: Any) -> float:
    """The largest difference of the plan's loss and gradients from those of ``loss`` on one device, relative to the
    largest gradient."""
    params, x = arrays()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = jax.jit(plan.jax.value_and_grad(), in_shardings=plan.jax.in_shardings())
        got = step(*plan.jax.device_put(params, x))
    want = jax.value_and_grad(loss)(params, x)
    most = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(want[1]))
    off = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), got, want)
    return max(jax.tree.leaves(off)) / most


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


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("split", "mesh"), [s[1:] for s in SPLITS], ids=[s[0] for s in SPLITS])
def test_parts_are_the_whole(split: dict[str, str], mesh: str, causal: bool) -> None:
    plan = planned(case(causal, "cudnn"), split, mesh)
    assert difference(plan, model(causal, None)) < EXACT


RINGS = [
    ("r", {"r": "a"}, "a=8"),
    ("rh", {"r": "a", "h": "b"}, "a=4,b=2"),
    ("br", {"b": "a", "r": "b"}, "a=4,b=2"),
    ("rr", {"r": "ab"}, "a=2,b=4"),
    ("rg", {"r": "b", "g": "a"}, "a=2,b=4"),
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("split", "mesh"), [s[1:] for s in RINGS], ids=[s[0] for s in RINGS])
def test_a_ring_is_the_whole(split: dict[str, str], mesh: str, causal: bool) -> None:
    """A ring also runs for calls that ask for XLA's attention. On 8 devices, parts have an odd number of positions, so
    they are not redistributed, and have unequal work under a causal mask; parts on fewer devices are redistributed."""
    plan = planned(case(causal, "xla"), split, mesh)
    assert "ppermute" in str(jax.make_jaxpr(plan.jax.loss())(*arrays()))
    assert difference(plan, model(causal, None)) < EXACT


@pytest.mark.usefixtures("float64")
def test_a_ring_sends_what_the_plan_says() -> None:
    """Except that XLA does not send the first keys and values again for backward, because nothing is recomputed."""
    plan = planned(case(True, "xla"), {"r": "a", "h": "b"}, "a=4,b=2")
    step = sharded_step(plan, optax.sgd(0.1), *arrays())
    (row,) = (r for r in compare(plan, step.compiled, step.lowering) if r.kind == "permute")
    once = next(c.nbytes for c in plan.collectives if c.kind == "permute")
    assert row.compiled == row.predicted - once > 0


@pytest.mark.usefixtures("float64")
def test_a_device_without_the_kernel_says_so() -> None:
    plan = planned(case(True, "cudnn"), {"q": "a"}, "a=8")
    with pytest.warns(UserWarning, match=r"test_attention\.py.* cuDNN.* cpu devices lack"):
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


@pytest.mark.usefixtures("float64")
def test_xlas_own_is_left_to_xla() -> None:
    plan = planned(case(True, "xla"), {"b": "a"}, "a=4,b=2")
    assert "shard_map" not in str(jax.make_jaxpr(plan.jax.loss())(*arrays()))


def operands(dtype: Any, positions: int, width: int, group: int, heads: int = 2) -> list[jax.Array]:
    rng = np.random.default_rng(1)
    shape, of_keys = (2, positions, heads, group, width), (2, positions, heads, width)
    shapes = [shape, of_keys, of_keys, shape]
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def gradients(kernel: AttentionFunctions, q: Any, k: Any, v: Any, g: Any, causal: bool) -> list[Any]:
    result, sums = kernel.forward(q, k, v, causal=causal, scale=0.3)
    return [result, *kernel.backward(Attended(q, k, v, result, sums), g, causal=causal, scale=0.3)]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("causal", [False, True])
def test_the_definition_stands_beside_its_derivative(causal: bool) -> None:
    q, k, v, g = operands(jnp.float64, 6, 4, 3)

    def attend(q: Any, k: Any, v: Any) -> Any:
        flat = q.reshape(*q.shape[:2], -1, q.shape[-1])
        return written_out(flat, k, v, is_causal=causal, scale=0.3).reshape(q.shape)

    want, pull = jax.vjp(attend, q, k, v)
    for a, b in zip(gradients(Reference(), q, k, v, g, causal), [want, *pull(g)], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_flash_by_its_parts_is_the_definition() -> None:
    """Pallas' own kernels, in the interpreter. Backward gets the results of forward."""
    q, k, v, g = operands(jnp.float32, 128, 128, 1, heads=1)
    with pltpu.force_tpu_interpret_mode():
        got = gradients(Flash(blocks=BlockSizes.get_default(2, 1, 512, 512, 128)), q, k, v, g, True)
    for a, b in zip(got, gradients(Reference(), q, k, v, g, True), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


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


def test_cudnns_kernels_are_what_xla_for_cuda_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering for CUDA gives forward and backward custom calls. It only lowers, so it needs no GPU."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    q, k, v, g = operands(jnp.bfloat16, 128, 64, 2)

    def both(*x: Any) -> Any:
        return gradients(CuDNN(), *x, True)

    text = jax.jit(both).trace(q, k, v, g).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text and "CAUSAL" in text


def test_a_mesh_without_devices_says_what_they_are() -> None:
    mesh = jax.make_mesh((2,), ("a",)).abstract_mesh
    assert _platform(mesh) == mesh.abstract_device.platform == "cpu"
    other = mesh.abstract_device.__class__(device_kind="H100", num_cores=None, platform="gpu")
    assert _platform(mesh.update(abstract_device=other)) == "gpu"
