"""``pase compare --vary``: whether the strategy stays the best if the machine's figures are wrong."""

import pytest

import pase
from pase.errors import PaseError
from pase.machine import load
from pase.machine.scale import QUANTITIES, scaled
from pase.questions.sensitivity import parse_range, sensitivity

MODEL, DEVICES = "zoo:mlp", 8


@pytest.fixture(scope="module")
def points():
    return sensitivity(MODEL, devices=DEVICES, vary=["bandwidth=0.01..100:3", "flops=0.1,1"])


def test_every_combination_is_tried_and_the_machine_itself_is_among_them(points):
    tried = [(p.factors["bandwidth"], p.factors["flops"]) for p in points]
    assert tried == [(b, f) for b in (0.01, 1.0, 100.0) for f in (0.1, 1.0)]


def test_ours_is_the_best_on_the_machine_as_it_is(points):
    (here,) = [p for p in points if set(p.factors.values()) == {1.0}]
    plan = pase.compile(MODEL, devices=DEVICES)
    assert here.ours == here.best == pytest.approx(plan.cost)
    assert (here.winner, here.changed, here.regret) == ("pase", 0, 0.0)
    assert here.others == pytest.approx(plan.baselines)


def test_a_new_search_is_the_oracle_of_the_best(points):
    for p in points:
        machine = scaled(load("h100x8"), p.factors)
        assert p.best == pytest.approx(pase.compile(MODEL, devices=DEVICES, machine=machine).cost, rel=1e-12)
        assert p.regret >= 0
        assert all(p.best <= other * (1 + 1e-12) for other in p.others.values())
        assert p.winner in ("pase", *p.others)


def test_ours_is_priced_as_it_was_found_not_searched_again(points):
    """Its cost does not fall if links slow down."""
    at_speed = [p for p in points if p.factors["flops"] == 1.0]
    costs = [p.ours for p in at_speed]
    assert costs == sorted(costs, reverse=True)


def test_under_a_limit_every_search_keeps_to_it():
    free = pase.compile(MODEL, devices=8, mesh="2x4", memory_limit="none")
    limit = 0.95 * free.memory.total  # there are strategies with 0.942 of it
    options = {"devices": 8, "mesh": "2x4", "memory_limit": limit}
    (point,) = sensitivity(MODEL, vary=["bandwidth=1"], **options)
    plan = pase.compile(MODEL, **options)
    assert point.best == point.ours == pytest.approx(plan.cost) and plan.cost > free.cost
    assert set(point.others) == set(plan.baselines) - set(plan.too_large)


def test_ranges_are_read():
    assert parse_range("latency=0.5..2:3").factors == (0.5, 1.0, 2.0)
    assert parse_range(" memory = 2..0.5:2 ").factors == (0.5, 1.0, 2.0)
    assert parse_range("flops=1e-1, 10").factors == (0.1, 1.0, 10.0)


@pytest.mark.parametrize(
    "text", ["bandwidth", "bandwidth=2..", "speed=0.5..2", "flops=0,1", "flops=0..1", "flops=1..2:1"]
)
def test_ranges_that_make_no_sense_are_refused(text):
    with pytest.raises(PaseError) as e:
        parse_range(text)
    assert e.value.where.startswith("--vary") and e.value.fix


def test_an_unknown_quantity_lists_those_that_are_known():
    with pytest.raises(PaseError, match="'speed'") as e:
        parse_range("speed=0.5..2")
    assert all(name in e.value.fix for name in QUANTITIES)


def test_a_quantity_is_named_once():
    with pytest.raises(PaseError, match="twice") as e:
        sensitivity(MODEL, devices=2, vary=["flops=1,2", "flops=3,4"])
    assert e.value.where == "--vary"
