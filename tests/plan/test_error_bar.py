"""Error bars: what is common to two plans cancels, shapes average out, and kernels that were kept back lie inside."""

import math
from dataclasses import replace

import pytest

import pase
from pase.machine import load
from pase.plan.error_bar import (
    RESIDUALS,
    Deviation,
    ErrorBar,
    StepPart,
    alike,
    interval,
    is_measured,
    parts_of,
    spread,
)


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


def test_a_card_with_other_memory_runs_the_same_kernels():
    h100 = load("h100x8")
    assert is_measured(h100)
    assert is_measured(replace(h100, device=replace(h100.device, memory_bytes=2 * h100.device.memory_bytes)))
    assert not is_measured(replace(h100, device=replace(h100.device, launch_s=1.0)))


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
def test_the_residuals_are_those_of_the_measured_tables():
    """Four of five kernels that were kept back lie in the intervals of their kinds, tables in equal parts."""
    from bench.kernels.comparison import compared, tables
    from bench.kernels.links import LINKS
    from bench.kernels.residuals import residuals
    from bench.kernels.rows import READERS, read

    groups = (r for readers in (READERS, LINKS) for file in tables(readers) for r in read(file, readers))
    found = {kind: r for kind, r in residuals((g, compared(g)) for g in groups).items() if kind in RESIDUALS}
    made = {
        kind: Deviation(shared=r["shared"], own=r["own"], family=r["family"]) for kind, r in found.items()
    }
    assert made == RESIDUALS
    assert all(r["kept_inside"] > 0.7 for r in found.values())
    assert all(r["kept_inside"] < 0.95 for r in found.values() if r["kept"] > 100)
