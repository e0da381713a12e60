"""Costs of local work in seconds, by formulas and by measured tables. Collectives are in ``test_collectives.py``."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.costmodels import get
from pase.costmodels.analytic import Analytic
from pase.machine import Curve, Tile, load
from pase.machine import names as machine_names
from tests.costmodels.machines import CURVES, TABLE, axes, device, flat, nested

GPUS = ["1080tix8", "2080tix8", "v100x8", "a100x8", "h100x8", "h200x8"]
work = st.floats(0, 16).map(lambda e: 10.0**e)
extents = st.integers(1, 20000)


# -- roofline --


def test_roofline_is_the_slower_of_two_plus_a_launch():
    d = replace(device(), efficiency={"matmul": 0.5, "memory": 0.8}, launch_s=3e-6, vector_flops=1e12)
    model = Analytic(replace(flat(), device=d))
    got = model.compute("matmul", "bfloat16", [1e12, 1e6, 0.0], [1e6, 1e9, 0.0])
    assert got == pytest.approx([1e12 / 5e13 + 3e-6, 1e9 / 8e11 + 3e-6, 0.0])
    assert float(model.compute("memory", "float32", 1e9, 1e6)) == pytest.approx(1e-3 + 3e-6)
    # conv: no figure in this machine, so the peak.
    assert float(model.compute("conv", "float32", 1e13, 0)) == pytest.approx(1.0 + 3e-6)


def test_a_dtype_that_is_not_listed_is_slow_but_never_free():
    model = Analytic(flat())
    assert model.compute("matmul", "int4", 1e12, 0) == model.compute("matmul", "float32", 1e12, 0)


@given(
    st.sampled_from([*machine_names(), "measured"]),
    st.sampled_from(["matmul", "conv", "memory"]),
    work,
    work,
    work,
    work,
)
def test_more_work_never_takes_less_time(name, kind, f1, f2, b1, b2):
    model = MEASURED if name == "measured" else Analytic(load(name))
    flops, nbytes = sorted([f1, f2]), sorted([b1, b2])
    low, high = model.compute(kind, "bfloat16", flops, nbytes)
    assert 0 < low <= high * (1 + 1e-12)


@given(
    st.sampled_from(GPUS),
    st.tuples(extents, extents),
    st.tuples(extents, extents),
    st.tuples(extents, extents),
)
def test_larger_matmuls_never_take_less_time(name, m, n, k):
    model = Analytic(load(name))
    both = [np.array(sorted(x), dtype=float) for x in (m, n, k)]
    flops = 2 * both[0] * both[1] * both[2]
    low, high = model.compute("matmul", "bfloat16", flops, 0.0, mnk=tuple(both))
    assert low <= high * (1 + 1e-12)


@given(st.sampled_from(GPUS), extents, extents, extents)
def test_ragged_and_small_matmuls_are_never_faster_than_the_peak(name, m, n, k):
    model = Analytic(load(name))
    flops = 2.0 * m * n * k
    plain = float(model.compute("matmul", "bfloat16", flops, 0.0))
    assert float(model.compute("matmul", "bfloat16", flops, 0.0, mnk=(m, n, k))) >= plain * (1 - 1e-12)


@pytest.mark.parametrize("name", GPUS)
def test_large_matmuls_reach_the_stated_efficiency_and_slivers_do_not(name):
    model = Analytic(load(name))

    def rate(m, n, k):
        flops = 2.0 * m * n * k
        return flops / float(model.compute("matmul", "float32", flops, 0.0, mnk=(m, n, k)))

    stated = model.machine.device.peak("float32") * model.machine.device.reached("matmul", "float32")
    assert rate(16384, 16384, 16384) == pytest.approx(stated, rel=0.05)
    assert rate(16384, 8, 16384) < 0.3 * stated
    assert rate(64, 64, 64) < 0.1 * stated


def test_a_wave_too_many_shows():
    """One more tile than there are units takes a second wave (tile and wave quantization)."""
    model = Analytic(load("a100x8"))
    k = 64 * 1024

    def s(tiles):
        m, n = 256 * tiles, 128
        return float(model.compute("matmul", "bfloat16", 2.0 * m * n * k, 0.0, mnk=(m, n, k)))

    assert s(108) == pytest.approx(s(100), rel=0.1)
    assert s(109) > 1.05 * s(108)


def test_a_batch_of_matmuls_fills_the_device():
    model = Analytic(load("h100x8"))
    one = float(model.compute("matmul", "bfloat16", 2.0 * 128**3, 0.0, mnk=(128, 128, 128)))
    many = float(model.compute("matmul", "bfloat16", 132 * 2.0 * 128**3, 0.0, mnk=(128, 128, 128)))
    assert many < 10 * one


def test_a_split_of_k_pays_for_its_partial_sums():
    """One 128 x 128 tile on 4 units: split 2 ways, with half the depth, and 2 float32 partial sums written and read."""
    d = replace(
        device(),
        memory_bandwidth_bytes_per_s=1e9,
        compute_units=4,
        tiles=(Tile(m=128, n=128, rate=1.0),),
        peak_flops={"float32": 1e12},
    )
    model = Analytic(replace(flat(), device=d))
    got = float(model.compute("matmul", "float32", 2.0 * 128 * 128 * 4096, 0.0, mnk=(128, 128, 4096)))
    arithmetic = 2 * 128 * 128 * (4096 / 2) * 4 / 1e12
    assert got == pytest.approx(arithmetic + 2 * 4 * 2 * 128 * 128 / 1e9)


def test_a_head_of_64_half_fills_the_tpus_128_rows():
    model = Analytic(load("tpu_v5e"))
    deep, shallow = (
        float(model.compute("matmul", "bfloat16", 2.0 * 8192 * 8192 * k, 0.0, mnk=(8192, 8192, k)))
        for k in (128, 64)
    )
    assert shallow == deep


# -- measured tables --

MEASURED = Analytic(
    replace(
        nested(8),
        device=replace(
            device(),
            launch_s=2e-6,
            matmul_tables=(TABLE,),
            memory_curve=Curve(nbytes=(1e3, 1e6, 1e9), seconds=(3e-6, 5e-6, 1e-3)),
        ),
        collectives=CURVES,
    )
)


def test_measured_points_come_back_as_measured():
    for c in CURVES:
        mesh = axes(4, 8) if c.ways == (1, 4) else axes(8, 2, 4)
        axis_set = 1 if c.ways == (1, 4) else 4
        got = MEASURED.collective(c.kind, mesh, axis_set, np.array(c.curve.nbytes))
        assert got == pytest.approx(c.curve.seconds)
    got = MEASURED.compute("memory", "bfloat16", 0.0, [1e3, 1e6, 1e9])
    assert got == pytest.approx([3e-6, 5e-6, 1e-3])
    for i, m in enumerate(TABLE.m):
        for j, n in enumerate(TABLE.n):
            for l, k in enumerate(TABLE.k):
                rate = TABLE.flops_per_s[(i * 2 + j) * 2 + l]
                s = float(MEASURED.compute("matmul", "bfloat16", 2.0 * m * n * k, 0.0, mnk=(m, n, k)))
                assert s == pytest.approx(max(2.0 * m * n * k / rate, 2e-6))


def test_a_measured_batch_counts_as_rows():
    one, batch = (
        float(MEASURED.compute("matmul", "bfloat16", b * 2.0 * 128**2 * 64, 0.0, mnk=(128, 128, 64)))
        for b in (1, 8)
    )
    assert batch == pytest.approx(max(2.0 * 1024 * 128 * 64 / 5e12, 2e-6))
    assert batch < 8 * one


def test_a_convolution_keeps_its_distance_from_measured_matmuls():
    d = replace(MEASURED.machine.device, efficiency={"matmul": 0.8, "conv": 0.6})
    model = Analytic(replace(MEASURED.machine, device=d))
    conv, matmul = (
        float(model.compute(kind, "bfloat16", 2.0 * 8192 * 1024 * 1024, 0.0, mnk=(8192, 1024, 1024)))
        for kind in ("conv", "matmul")
    )
    assert conv == pytest.approx(matmul * 0.8 / 0.6)


def test_unmeasured_ways_follow_the_nearest_measured_ones():
    """8 devices in a node, measured for 4: scaled as the formulas scale large tensors, by 7/8 over 3/4."""
    n = np.array([1e3, 1e6, 1e9])
    four, eight = (MEASURED.collective("all_reduce", axes(2, p), 2, n) for p in (4, 8))
    assert eight / four == pytest.approx([7 / 6] * 3, rel=1e-3)
    # Across nodes, nothing was measured for all_reduce, so the formulas are used.
    plain = Analytic(replace(nested(8), device=MEASURED.machine.device))
    assert MEASURED.collective("all_reduce", axes(4, 8), 1, n) == pytest.approx(
        plain.collective("all_reduce", axes(4, 8), 1, n)
    )


def test_attention_without_a_kernel_of_its_own_is_its_products():
    bare = get("analytic", load("v100x8"))
    assert bare.machine.device.attention is None
    products, fused = (
        bare.compute(kind, "bfloat16", 1e15, 0.0, mnk=(1024, 1024, 128)) for kind in ("matmul", "attention")
    )
    assert fused == products
