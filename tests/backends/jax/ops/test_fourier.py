"""Fourier transforms under plans that split the batch dims, those that are not transformed."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.cases.plans import case_of
from pase.backends.audit.xla import sharded_step, unsharded_step

CHANNELS, SIZE, MODES = 4, 16, 4


def spectral(x, weights):
    """A layer of a Fourier neural operator: multiplies the lowest modes by complex weights."""
    modes = jnp.fft.rfft2(x, axes=(1, 2))
    low = jnp.einsum("bxyc,cdxy->bxyd", modes[:, :MODES, :MODES], weights)
    return jnp.fft.irfft2(
        jnp.zeros(modes.shape, modes.dtype).at[:, :MODES, :MODES].set(low), s=x.shape[1:3], axes=(1, 2)
    )


def operator(params, x):
    y = x @ params["lift"]
    for layer in params["layers"]:
        weights = layer["modes"] if "modes" in layer else layer["real"] + 1j * layer["imaginary"]
        y = jax.nn.gelu(spectral(y, weights) + y @ params["skip"])
    return jnp.mean((y @ params["project"] - x) ** 2)


@pytest.mark.parametrize("lowering", ["manual", "annotated"])
@pytest.mark.parametrize("strategy", ["random1@2x4", "random3@2x2x2"])
def test_transforms_whose_batch_dims_are_split_agree(strategy, lowering):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return 0.2 * rng.normal(size=shape)

    with jax.enable_x64(True):
        shape = (CHANNELS, CHANNELS, MODES, MODES)
        params = {
            "lift": normal(1, CHANNELS),
            "layers": [
                {"real": normal(*shape), "imaginary": normal(*shape)},
                {"modes": normal(*shape) + 1j * normal(*shape)},
            ],
            "project": normal(CHANNELS, 1),
            "skip": normal(CHANNELS, CHANNELS),
        }
        x = normal(8, SIZE, SIZE, 1)
        plan = case_of(operator, params, x).plan(strategy)
        step = sharded_step(plan, optax.sgd(0.1), params, x, lowering=lowering)
        assert max(unsharded_step(operator, optax.sgd(0.1), params, x).differences(step).values()) < 1e-12
        # XLA for CPUs may give several batch dims an order that its runtime refuses, so each transform has one.
        text = jax.jit(plan.jax.value_and_grad(lowering=lowering)).lower(params, x).as_text()
        sizes = re.findall(r"stablehlo.fft .*: \(tensor<([\dx]+)xcomplex<f64>>\)", text)
        sizes += re.findall(r"stablehlo.fft .*: \(tensor<([\dx]+)xf64>\)", text)
        assert len(sizes) >= 8
        assert {len(n.split("x")) for n in sizes} == {3}
