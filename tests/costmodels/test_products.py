"""Products on GPUs: laws of the model, and measured products of an H100 that the fit did not see."""

from dataclasses import replace

import numpy as np
import pytest

from pase.costmodels.analytic import Analytic
from pase.ir.precision import HIGHEST
from pase.machine import ProductKernels, load
from pase.machine import names as machine_names

MEASURED_US = {
    ("bfloat16", 4096, 4096, 4096): 176.5,
    ("bfloat16", 8192, 1024, 1024): 27.0,
    ("bfloat16", 16384, 768, 3072): 101.0,
    ("bfloat16", 2048, 8192, 2048): 90.9,
    ("bfloat16", 512, 32000, 1024): 52.7,
    ("bfloat16", 16384, 2048, 8192): 657.0,
    ("float32", 4096, 4096, 4096): 329.8,
    ("float32", 4096, 14336, 4096): 1152.7,
}
"""Products by XLA on an H100 SXM5, from the profiler's kernel times (JAX 0.11.2). No bfloat16 row was fitted to."""

ALL_BITS_US = {
    (1024, 768, 768): 65.5,
    (1280, 1024, 1280): 120.5,
    (768, 1024, 2304): 129.9,
    (1024, 1024, 4096): 208.7,
    (2048, 2048, 2048): 381.5,
    (4096, 768, 3072): 424.2,
}
"""Short products of float32 with all bits by PyTorch on an H100 (sitar-lab/NeuSight@6945927, linear), kept from the
fit."""


def seconds(model: Analytic, dtype: str, m: float, n: float, k: float) -> float:
    width = {"float32": 4, HIGHEST: 4, "bfloat16": 2}[dtype]
    nbytes = width * (m * k + k * n + m * n)
    return float(model.compute("matmul", dtype, 2.0 * m * n * k, nbytes, mnk=(m, n, k)))


@pytest.mark.parametrize(("row", "us"), MEASURED_US.items(), ids=str)
def test_single_products_of_an_h100(row, us):
    alone = Analytic(load("h100x8"), steady=False)
    assert 1e6 * seconds(alone, *row) == pytest.approx(us, rel=0.15 if row[0] == "bfloat16" else 0.3)


@pytest.mark.parametrize(("mnk", "us"), ALL_BITS_US.items(), ids=str)
def test_short_products_of_all_bits_on_an_h100(mnk, us):
    """Priced as if the units multiplied at their rate from the first square on, these were 20 to 45% too fast."""
    alone = Analytic(load("h100x8"), steady=False)
    assert 1e6 * seconds(alone, HIGHEST, *mnk) == pytest.approx(us, rel=0.26)


GPUS = [name for name in machine_names() if load(name).device.products is not None]


@pytest.mark.parametrize("name", GPUS)
def test_a_step_is_never_faster_than_a_benchmark_and_both_agree_on_long_and_short_products(name):
    machine = load(name)
    alone, steady = Analytic(machine, steady=False), Analytic(machine)
    rate = machine.device.products.steady
    sizes = (128, 1024, 4096, 16384, 65536)
    ratios = [seconds(steady, "bfloat16", s, s, s) / seconds(alone, "bfloat16", s, s, s) for s in sizes]
    assert min(ratios) >= 1 - 1e-12 and max(ratios) <= 1 / rate + 1e-12
    assert ratios[-1] == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("name", GPUS)
def test_vector_units_multiply_after_three_squares_and_never_throttle(name):
    machine = load(name)
    device = machine.device
    alone, steady = Analytic(machine, steady=False), Analytic(machine)
    for size in (128, 4096, 16384):
        assert seconds(steady, HIGHEST, size, size, size) == seconds(alone, HIGHEST, size, size, size)
    assert device.reached("matmul", HIGHEST) == device.products.rate_of(HIGHEST)
    whole = replace(device, products=replace(device.products, start_s=0.0, split_s=1.0))
    undivided = Analytic(replace(machine, device=whole))

    def s(waves: int) -> float:
        m, n, k = 64 * device.compute_units * waves, 64, 1024
        return float(undivided.compute("matmul", HIGHEST, 2.0 * m * n * k, 0.0, mnk=(m, n, k)))

    assert s(29) / s(5) == pytest.approx((29 + 3) / (5 + 3))


def test_matrix_units_that_keep_all_bits_do_not_fill_and_throttle():
    """A card whose float32 peak is above its vector units', as with matrix units for float32."""
    h100 = load("h100x8").device
    other = replace(h100, peak_flops={**h100.peak_flops, HIGHEST: 2 * h100.vector_flops})
    assert h100.multiplies_on_vector_units(HIGHEST) and not other.multiplies_on_vector_units(HIGHEST)
    assert other.left_at_limit(HIGHEST) == h100.products.steady == h100.left_at_limit("float64")


def test_a_square_too_many_takes_another_wave():
    model = Analytic(load("h100x8"), steady=False)

    def s(squares: int) -> float:
        m, n, k = 64 * squares, 64, 1024
        return float(model.compute("matmul", "bfloat16", 2.0 * m * n * k, 0.0, mnk=(m, n, k)))

    full, fits, more = s(131), s(132), s(133)
    assert fits == pytest.approx(full, rel=0.01)
    assert more > 1.1 * full


def test_few_squares_divide_the_contraction():
    """One square of deep contraction: 32 units share it, until its operands' way through memory takes longer."""
    machine = load("h100x8")
    one, deep = (seconds(Analytic(machine), "bfloat16", 64, 64, k) for k in (64 * 1024, 2 * 1024 * 1024))
    serial = 2.0 * 64 * 64 * 2 * 1024 * 1024 / (989.4e12 * 0.867 * 0.835 / 132)
    assert one < deep < serial / 12


def test_a_dtype_without_a_rate_is_slow_and_no_extents_mean_full_units():
    machine = load("b200x8")
    model = Analytic(machine)
    assert machine.device.products.rate_of("float64") == min(machine.device.products.rate.values())
    flops = 2.0 * 8192**3
    plain = float(model.compute("matmul", "bfloat16", flops, 0.0))
    assert plain == pytest.approx(
        flops / (2250e12 * machine.device.reached("matmul", "bfloat16")) + machine.device.products.start_s
    )
    assert plain <= float(model.compute("matmul", "bfloat16", flops, 0.0, mnk=(8192, 8192, 8192)))


def test_arithmetic_and_memory_overlap_but_not_perfectly():
    kernels = ProductKernels(
        rate={"float32": 1.0}, start_s=0.0, output_bytes_per_s=1e15, split_s=0.0, memory=1.0
    )
    h100 = load("h100x8")
    device = replace(
        h100.device, peak_flops={"float32": 1e12}, products=kernels, memory_bandwidth_bytes_per_s=1e12
    )
    model = Analytic(replace(h100, device=device))
    got = model.compute("matmul", "float32", [1e12, 1e12, 0.0, 0.0], [1e12, 0.0, 1e12, 0.0])
    assert got == pytest.approx([np.cbrt(2), 1, 1, 0])


def test_measured_products_of_a_dtype_replace_the_model():
    from pase.machine import MatmulTable

    h100 = load("h100x8")
    table = MatmulTable(dtype="bfloat16", m=(128,), n=(128,), k=(128,), flops_per_s=(1e12,))
    model = Analytic(replace(h100, device=replace(h100.device, matmul_tables=(table,))))
    assert seconds(model, "bfloat16", 128, 128, 128) == pytest.approx(2 * 128**3 / 1e12, rel=1e-6)
    assert seconds(model, "float32", 128, 128, 128) == seconds(Analytic(h100), "float32", 128, 128, 128)


def _waiting(operand_bytes_per_s: float | None) -> Analytic:
    h100 = load("h100x8")
    kernels = ProductKernels(
        rate={"bfloat16": 1.0},
        start_s=0.0,
        output_bytes_per_s=1e15,
        operand_bytes_per_s=operand_bytes_per_s,
        split_s=1.0,
        memory=1.0,
    )
    device = replace(h100.device, products=kernels, memory_bandwidth_bytes_per_s=1e18)
    return Analytic(replace(h100, device=device))


@pytest.mark.parametrize("rows, columns", [(128, 256), (256, 128), (64, 128), (64, 64)])
def test_a_unit_that_waits_for_operands_takes_the_largest_tile_that_divides_the_result(
    rows: int, columns: int
) -> None:
    """Every unit has a tile of this size: it receives (rows + columns) operand rows of 2 bytes an element."""
    units, k, rate = load("h100x8").device.compute_units, 4096, 1e9
    got = seconds(_waiting(rate), "bfloat16", rows * units, columns, k)
    assert got == pytest.approx((rows + columns) * 2 * k / rate, rel=1e-6)


def test_units_that_never_wait_take_the_time_of_their_arithmetic() -> None:
    machine = load("h100x8")
    m, n, k = 256 * machine.device.compute_units, 128, 4096
    arithmetic = 2.0 * m * n * k / machine.device.peak_flops["bfloat16"]
    for rate in (None, 1e15):
        assert seconds(_waiting(rate), "bfloat16", m, n, k) == pytest.approx(arithmetic, rel=1e-3)
