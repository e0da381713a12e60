"""A plan on another machine has the same splits, and the costs that a search there would give them."""

from __future__ import annotations

import dataclasses

import pytest

import pase
from pase.compiler.meshes.retarget import priced_on
from pase.compiler.resolve import attached, resolve
from pase.errors import PaseError

SPEC = "zoo:mlp?batch=64&layers=2&features=64&hidden=64&classes=16"


@pytest.fixture(scope="module")
def plans():
    """The best plan on one machine, and data parallelism on two."""
    made = {m: dict(pase.compare(SPEC, devices=4, mesh="4", machine=m)) for m in ("h100x8", "a100x8")}
    return {m: p["data_parallel"] for m, p in made.items()}


def test_it_costs_what_it_costs_when_it_is_compiled_there(plans):
    there, model = priced_on(plans["h100x8"], "a100x8")
    assert model.machine.name == there.machine == "a100x8"
    expected = plans["a100x8"]
    assert there.cost == pytest.approx(expected.cost, rel=1e-12) and there.cost != plans["h100x8"].cost
    assert there.memory == expected.memory and there.strategy == plans["h100x8"].strategy
    assert [c.cost for c in there.collectives] == pytest.approx([c.cost for c in expected.collectives])


def test_on_its_own_machine_it_is_the_plan(plans):
    plan = plans["h100x8"]
    assert priced_on(plan, None)[0] is plan and priced_on(plan, "h100x8")[0] is plan


def test_a_plan_without_a_model_or_without_seconds_is_refused(plans):
    bare = dataclasses.replace(plans["h100x8"], traced=None)
    with pytest.raises(PaseError, match="without its model"):
        priced_on(bare, "a100x8")
    assert priced_on(attached(bare, resolve(SPEC)), "a100x8")[0].machine == "a100x8"
    with pytest.raises(PaseError, match="FLOP"):
        priced_on(dataclasses.replace(plans["h100x8"], unit="FLOP"), "a100x8")
