"""Fused attention on GPUs: laws of the model, published rates, and measured kernels of an H100."""

from dataclasses import replace

import numpy as np
import pytest

from pase.costmodels.analytic import Analytic
from pase.costmodels.attention import attention_s, rate_at_width
from pase.ir.precision import HIGHEST
from pase.machine import load

H100 = Analytic(load("h100x8"), steady=False)


def seconds(
    model: Analytic, heads: float, queries: float, keys: float, width: float, nbytes: float = 0.0
) -> float:
    flops = 4.0 * heads * queries * keys * width
    return float(model.compute("attention", "bfloat16", flops, nbytes, mnk=(queries, keys, width)))


PUBLISHED = {512: 430e12, 1024: 517e12, 2048: 566e12, 4096: 590e12, 8192: 614e12, 16384: 621e12}
"""FLOP/s of FlashAttention 3 forward on an H100, 16,384 tokens, 16 heads of 128 (PyTorch tritonbench)."""


@pytest.mark.parametrize(("keys", "rate"), PUBLISHED.items())
def test_published_rates_follow_from_two_constants(keys, rate):
    heads = 16 * 16384 / keys
    flops = 4.0 * heads * keys * keys * 128
    nbytes = 4 * 2.0 * 16 * 16384 * 128
    assert flops / seconds(H100, heads, keys, keys, 128, nbytes) == pytest.approx(rate, rel=0.02)


def test_narrow_heads_and_few_keys_run_at_a_lower_rate():
    """Exponentials take the same time for heads of any width, and a unit's begin and end for any number of keys."""
    wide, narrow, short = (
        seconds(H100, 512, keys, keys, width) / (4.0 * 512 * keys * keys * width)
        for keys, width in ((4096, 128), (4096, 64), (128, 128))
    )
    assert narrow > 1.15 * wide
    assert short > 1.5 * wide


@pytest.mark.parametrize("name", ["a100x8", "h100x8", "b200x8"])
def test_more_work_never_takes_less_time(name):
    model = Analytic(load(name))
    for extents in (
        [(h, 1024, 1024, 64) for h in (1, 16, 300, 301)],
        [(16, s, s, 128) for s in (64, 65, 512, 4096)],
    ):
        found = [seconds(model, *e) for e in extents]
        assert found == sorted(found)


@pytest.mark.parametrize("name", ["a100x8", "h100x8", "b200x8"])
def test_attention_that_keeps_all_bits_is_three_of_tf32_and_faster_than_the_vector_units(name):
    model, heads, s = Analytic(load(name)), 4096, 4096
    flops = 4.0 * heads * s * s * 128
    rounded, exact = (
        float(model.compute("attention", d, flops, 0.0, mnk=(s, s, 128))) for d in ("float32", HIGHEST)
    )
    assert exact == pytest.approx(3 * rounded, rel=0.03)  # but for a unit's begin and end
    assert exact < flops / load(name).device.vector_flops


def test_decode_takes_the_time_of_its_keys_and_values():
    """One query a sequence: 64 sequences, 8 heads of 128, 8,192 keys."""
    device = H100.machine.device
    nbytes = 2.0 * 2 * 64 * 8 * 8192 * 128
    found = seconds(H100, 64 * 8, 1, 8192, 128, nbytes)
    assert found == pytest.approx(nbytes / device.moved_bytes_per_s, rel=0.1)


def test_a_device_without_units_has_no_waves():
    device = replace(H100.machine.device, compute_units=0)
    model = Analytic(replace(H100.machine, device=device))
    one, ten = (seconds(model, h, 4096, 4096, 128) - device.launch_s for h in (64, 640))
    assert np.isclose(ten, 10 * one)


def test_narrow_heads_lower_the_rate_of_a_named_kernel_as_they_do_that_of_the_curve():
    device = replace(load("b200x8").device, launch_s=0.0)
    curve = device.attention
    assert curve is not None
    curve = replace(curve, wave_s=0.0)

    def seconds(width: float) -> float:
        flops = np.array([4.0 * 1024 * 8192 * 8192 * width])
        extents = tuple(np.array([x]) for x in (8192.0, 8192.0, width))
        return float(attention_s(device, curve, "bfloat16", flops, np.array([0.0]), extents)[0])

    for width in (32.0, 64.0, 96.0):
        slower = seconds(width) / seconds(128.0) / (width / 128)
        assert rate_at_width(device, width, False) == pytest.approx(1 / slower, rel=1e-6)
    # Wider heads gain nothing in forward, and backward has more sums than registers hold.
    assert [rate_at_width(device, width, back) for width in (192.0, 256.0) for back in (False, True)] == [
        1.0,
        0.85,
        1.0,
        0.85,
    ]
    assert rate_at_width(device, 64.0, False) < rate_at_width(device, 64.0, True) < 1.0
    assert rate_at_width(replace(device, attention=None), 64.0, False) == 1.0
