"""Sums and verdicts of a plan, by hand on a small plan with changed fields."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pase.errors import PaseError
from pase.ir import Remark
from pase.machine import Mesh
from pase.plan.types import TensorPlan
from tests.plan.plans import mlp, staged

MESH = Mesh(names=("a", "b"), sizes=(2, 4))


def test_bytes_of_a_tensor_on_a_device() -> None:
    t = TensorPlan(shape=(64, 32), dtype="bfloat16", storage=(("a", "b"), ()))
    assert t.elements == 2048 and t.local_bytes(MESH) == 4096 // 8
    assert t.local_bytes(MESH, ((), ("b",))) == 1024
    assert replace(t, unpadded=(63, 32)).elements == 63 * 32
    assert replace(t, unpadded=(63, 32)).local_bytes(MESH) == 512  # devices hold the padding, too


def test_a_plan_fits_by_its_limit_and_with_gradients_that_wait() -> None:
    plan = mlp()
    used = plan.memory.total
    assert replace(plan, memory_limit=None).memory_there == plan.device_memory
    assert replace(plan, memory_limit=used).fits and not replace(plan, memory_limit=used - 1).fits
    waiting = replace(plan, memory_limit=used + 9, buckets={"evaluation": {"waiting_bytes": 10}})
    assert waiting.waiting_bytes == 10 and not waiting.fits
    needs = {"dp": used + 1, "fsdp": used}
    assert replace(plan, memory_limit=used, baseline_memory=needs).too_large == ("dp",)


def test_a_doubtful_remark_makes_a_plan_unsound() -> None:
    plan = replace(mlp(), memory_limit=None, noted=())
    assert plan.sound and plan.remarks == ()
    for kind, sound in (("assumed", True), ("empty", False)):
        remark = Remark(kind, "no parameters")  # type: ignore[arg-type]
        noted = replace(plan, noted=(remark,))
        assert noted.sound is sound and noted.remarks == (str(remark),)


def test_what_is_hidden_is_the_parts_above_the_cost() -> None:
    plan = mlp()
    parts = plan.compute + plan.communication
    assert parts == pytest.approx(sum(n.cost.total for n in plan.nodes))
    assert replace(plan, cost=0.75 * parts).hidden == pytest.approx(0.25 * parts)
    assert (
        replace(plan, cost=parts * (1 + 1e-9)).hidden == replace(plan, cost=parts * (1 - 1e-9)).hidden == 0.0
    )
    assert staged(hidden_s=0.125).hidden == 0.125


def test_a_plan_without_its_model_says_how_to_bind_it() -> None:
    loose = replace(mlp(), traced=None)
    with pytest.raises(PaseError, match="loaded without its model") as e:
        _ = loose.graph
    assert "plan.bind" in e.value.fix
    with pytest.raises(PaseError, match="read by the jax frontend, so nothing"):
        mlp().traced_as(int, "model", "nothing")


def test_the_objective_says_what_is_hidden() -> None:
    plan = replace(mlp(), overlap=None, cost=mlp().compute + mlp().communication)
    assert plan.objective == "nothing hidden behind compute"
    assert replace(plan, overlap=0.1).objective == "collectives of parameters hidden behind compute"
    assert "not hidden" in replace(staged(), overlap=None).objective
