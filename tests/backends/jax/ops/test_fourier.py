"""Fourier transforms under plans that split the batch dims, those that are not transformed."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pase
from bench.cases.plans import case_of
from pase.backends.audit.xla import sharded_step, unsharded_step
from tests.costmodels.machines import flat

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


@pytest.mark.some(1)
@pytest.mark.parametrize("lowering", ["manual", "annotated"])
@pytest.mark.parametrize("strategy", ["random1@2x4", "random4@2x2x2"])
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


def test_one_batch_dim_is_not_enough_to_keep_the_order():
    """A convolution leaves the image with its batch behind it in memory. XLA's runtime refused the transform of it."""
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 3, 1, 1), (12, 8, 8, 1)))

    def loss(w, x):
        dims = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
        return jnp.log1p(jnp.abs(jnp.abs(jnp.fft.fft2(y[..., 0])) - jnp.abs(jnp.fft.fft2(x[..., 0])))).mean()

    asked = {"mesh": "data=8", "uneven": "padded", "baselines": False}
    plan = pase.compile(loss, w, x, devices=8, machine=flat(bandwidth=1e15, latency_s=0.0), **asked)
    for got, want in zip(plan.jax.value_and_grad()(w, x), jax.value_and_grad(loss)(w, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
