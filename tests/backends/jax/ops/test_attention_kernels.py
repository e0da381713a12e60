"""Attention kernels against the definition, and against what XLA for CUDA would get."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes

from pase.backends.jax.ops.attention_kernels import CuDNN, Flash, Reference
from pase.local.ring import Attended, AttentionFunctions
from tests.backends.jax.ops.attending import (
    written_out,
)


@pytest.fixture
def float64() -> Any:
    with jax.enable_x64(True):
        yield


def operands(dtype: Any, positions: int, width: int, group: int, heads: int = 2) -> list[jax.Array]:
    rng = np.random.default_rng(1)
    shape, of_keys = (2, positions, heads, group, width), (2, positions, heads, width)
    shapes = [shape, of_keys, of_keys, shape]
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


def gradients(kernel: AttentionFunctions[Any], q: Any, k: Any, v: Any, g: Any, causal: bool) -> list[Any]:
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


def test_cudnns_kernels_are_what_xla_for_cuda_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering for CUDA gives forward and backward custom calls. It only lowers, so it needs no GPU."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    q, k, v, g = operands(jnp.bfloat16, 128, 64, 2)

    def both(*x: Any) -> Any:
        return gradients(CuDNN(), *x, True)

    text = jax.jit(both).trace(q, k, v, g).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text and "CAUSAL" in text
