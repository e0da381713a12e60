"""Error bars: what is common to two plans cancels, shapes average out, and kernels that were kept back lie inside."""

import math
from dataclasses import replace

import numpy as np
import pytest

import pase
from pase.plan.error_bar import RESIDUALS, ErrorBar, StepPart, alike, interval, parts_of, spread


@pytest.fixture(scope="module")
def plans() -> dict[str, pase.Plan]:
    return dict(pase.compare("zoo:mlp", devices=8, machine="h100x8"))


def test_the_parts_are_the_step(plans):
    """Without a pipeline, work and what is waited for of the collectives add up to the price."""
    for plan in plans.values():
        assert sum(p.seconds for p in parts_of(plan)) == pytest.approx(plan.cost, rel=1e-6)
        bar = interval(plan)
        assert bar is not None and bar.low_s < plan.cost < bar.high_s
        assert math.sqrt(bar.low_s * bar.high_s) == pytest.approx(plan.cost)


def test_a_machine_whose_kernels_nobody_measured_has_no_error_bar(plans):
    plan = plans["pase"]
    assert interval(replace(plan, machine="tpu_v5e")) is None
    assert interval(replace(plan, machine="mine")) is None
    assert interval(replace(plan, machine_digest="0")) is None  # another machine of the same name
    assert interval(replace(plan, unit="FLOP")) is None


def test_shapes_average_out_and_kinds_do_not():
    one = [StepPart(kind="product", shape=(1,), seconds=1.0)]
    many = [StepPart(kind="product", shape=(i,), seconds=0.01) for i in range(100)]
    r = RESIDUALS["product"]
    assert spread(one) == pytest.approx(math.hypot(r.shared, r.own))
    assert spread(many) == pytest.approx(math.hypot(r.shared, r.own / 10))
    assert spread(one * 2) == pytest.approx(2 * spread(one))


def test_what_two_plans_have_in_common_does_not_tell_them_apart(plans):
    best = plans["pase"]
    assert alike(best, best)
    slow = replace(best, cost=best.cost * 2)
    assert not alike(best, slow)
    gather = max(best.collectives, key=lambda c: c.cost)
    more = replace(best, collectives=(*best.collectives, replace(gather, node="more")))
    assert alike(best, more) == (abs(more.cost - best.cost) <= 0)


def test_the_text_is_a_percentage():
    assert str(ErrorBar(low_s=1 / 1.07, high_s=1.07)) == "± 7%"


@pytest.mark.data
def test_kernels_that_were_kept_back_lie_in_their_intervals():
    """Four of five, for products, attention and large collectives: tables in equal parts."""
    from bench.cases import SHARED
    from bench.kernels.__main__ import compared
    from bench.kernels.rows import READERS, read

    inside: dict[str, list[float]] = {}
    for file in sorted({f for p in READERS for f in (SHARED / "measured").rglob(p)}):
        for rows in read(file):
            kind = next((k for start, k in _KINDS.items() if rows.kind.startswith(start)), None)
            if kind is None or not rows.kept.any() or rows.machine.device.products is None:
                continue
            r = RESIDUALS[kind if "below" not in rows.kind or kind == "attention" else "small collective"]
            off = np.abs(np.log1p(compared(rows)))[rows.kept]
            inside.setdefault(kind, []).append(float(np.mean(off <= 1.2816 * math.hypot(r.shared, r.own))))
    assert set(inside) == set(_KINDS.values())
    for kind, parts in inside.items():
        assert 0.7 < np.mean(parts) < 0.9, (kind, np.mean(parts))


_KINDS = {
    "product bfloat16": "product",
    "product fp8": "product in 8 bits",
    "attention": "attention",
    "all_": "large collective",
    "reduce_scatter": "large collective",
}
