"""Which units of a model each stage has."""

from __future__ import annotations

import pytest

from tests.backends.torch.pipeline.pipelines import (
    alone,
    branching,
    check,
    funnel,
    planned,
    staged,
)

pytestmark = pytest.mark.torch


def test_a_model_without_equal_layers_is_cut_between_its_units() -> None:
    """With the cuts and splits that the plan chose."""
    module, batch = funnel()
    plan = planned(module, batch)
    assert plan.pipeline is not None and plan.pipeline.cut_points
    assert {len(s.enters) for s in plan.torch.stages} == {0, 1}
    check(plan, module, batch, alone(module, batch))


@pytest.mark.minutes
def test_branches_within_layers_run_in_stages() -> None:
    """What is sent is not compared, because the plan lists the messages of both branches."""
    module, batch = branching()
    plan, wanted = planned(module, batch), alone(module, batch)
    cuts = (1, sum(plan.pipeline.cuts) - 1)
    check(staged(plan, "1f1b", 1, cuts, 1), module, batch, wanted, counted=False)
