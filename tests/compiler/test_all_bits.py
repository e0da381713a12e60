"""Products of float32 that keep all bits of their factors: what they cost, and what a plan says of them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import pase
from pase import machine
from pase.compiler.problem.problem import SplitProblem
from pase.ir import from_text, to_text
from pase.ir.precision import HIGH, HIGHEST
from pase.ir.text import digest
from pase.machine.types import MatmulTable
from pase.questions.unaligned import unaligned

ROWS, WIDTH = 8192, 4096


def loss(params, x):
    return (jnp.tanh(x @ params["a"]) @ params["b"]).mean()


def compiled(precision, on="h100x8", dtype=jnp.float32):
    params = {k: jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype) for k in "ab"}
    with jax.default_matmul_precision(precision):
        x = jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)
        return pase.compile(loss, params, x, devices=1, machine=on, baselines=False)


def products(plan):
    """The rates and the seconds of the plan's products."""
    work = [w for n in plan.nodes for w in n.work if w.kind == "matmul"]
    return {w.dtype for w in work}, sum(w.cost for w in work)


def test_a_gpu_multiplies_all_bits_without_its_matrix_units() -> None:
    by_default, exact = compiled(None), compiled("highest")
    assert products(by_default)[0] == {"float32"} and products(exact)[0] == {HIGHEST}
    device = machine.load("h100x8").device
    slower = device.peak("float32") * device.reached("matmul", "float32")
    slower /= device.peak(HIGHEST) * device.reached("matmul", HIGHEST)
    assert products(exact)[1] == pytest.approx(slower * products(by_default)[1], rel=0.05)
    assert exact.peak == (HIGHEST, device.vector_flops)
    (remark,) = exact.noted
    assert "jax.default_matmul_precision" in remark.what and "test_all_bits.py" in remark.where
    assert not by_default.noted and "float32, all bits" in str(exact)


@pytest.mark.parametrize(("precision", "rate", "passes"), [("high", HIGH, 3), ("highest", HIGHEST, 6)])
def test_a_tpu_multiplies_in_passes_of_bfloat16(precision: str, rate: str, passes: int) -> None:
    one, several = (products(compiled(p, "tpu_v5p")) for p in (None, precision))
    assert several[0] == {rate} and several[1] == pytest.approx(passes * one[1], rel=0.1)


def test_a_precision_has_no_effect_on_bfloat16() -> None:
    assert products(compiled("highest", dtype=jnp.bfloat16))[0] == {"bfloat16"}


def test_a_machine_without_such_a_rate_is_said_to_have_none() -> None:
    m = machine.load("h100x8")
    peaks = {k: v for k, v in m.device.peak_flops.items() if k != HIGHEST}
    without = replace(m, device=replace(m.device, peak_flops=peaks))
    plan = compiled("highest", without)
    (remark,) = plan.noted
    assert "the machine has none" in remark.what
    assert plan.peak == (HIGHEST, m.device.peak("float32"))
    assert products(plan)[1] == products(compiled(None))[1]


def test_a_machine_without_such_a_rate_prices_by_its_measured_products() -> None:
    device = machine.load("cpu_host").device
    table = MatmulTable(dtype="float32", m=(64, 4096), n=(64, 4096), k=(64, 4096), flops_per_s=(1e9,) * 8)
    measured = replace(
        machine.load("cpu_host"),
        device=replace(device, peak_flops={"float32": 80e9}, matmul_tables=(table,)),
    )
    exact, by_default = (products(compiled(p, measured))[1] for p in ("highest", None))
    assert exact == by_default > 2 * ROWS * WIDTH * WIDTH / 1e9


def test_a_text_has_the_precision_and_a_layout_is_for_each() -> None:
    """A job that sets another precision than the one that planned it still takes the layout."""
    exact, rounded = (compiled(p).traced.graph for p in ("highest", None))
    assert from_text(to_text(exact)) == exact and "precision=highest" in to_text(exact)
    assert digest(exact) == digest(rounded)
    with pytest.raises(pase.PaseError, match="'low' is not a precision; known are high, highest"):
        from_text(to_text(exact).replace("precision=highest", "precision=low"))


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (("highest", "default"), "highest"),
        ("F32_F32_F32", "highest"),
        ("BF16_BF16_F32_X3", "high"),
        ("BF16_BF16_F32", None),
    ],
)
def test_what_a_product_states(asked, found) -> None:
    def one(p, x):
        return jax.lax.dot(x, p, precision=asked).mean()

    args = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan = pase.compile(one, *args, devices=1, baselines=False)
    (op,) = (op for n in plan.traced.graph.nodes for op in n.ops if op.kind == "matmul")
    assert op.precision == found


def test_rows_that_are_not_aligned_are_found_in_every_precision() -> None:
    """Questions read the names of a plan's rates. Without matrix units, such rows cost nothing more."""

    def odd(w, x):
        return (x @ w).mean()

    args = jax.ShapeDtypeStruct((768, 50257), jnp.float32), jax.ShapeDtypeStruct((ROWS, 768), jnp.float32)
    for precision, layers in (("highest", 0), (None, 1)):
        with jax.default_matmul_precision(precision):
            plan = pase.compile(odd, *args, devices=1, machine="h100x8", baselines=False)
        problem = SplitProblem.of(plan.traced.graph, 1, machine.load("h100x8"), "analytic", "adam")
        assert len(unaligned(plan, problem)) == layers
