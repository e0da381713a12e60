"""A plan's timeline shows the step that is priced."""

import pytest

import pase


@pytest.mark.parametrize("model", ["gpt2?layers=6&batch=32", "llama3_8b?layers=4&batch=32"])
def test_the_timeline_shows_the_step_that_is_priced(model):
    plan = pase.compile(f"zoo:{model}", devices=8, mesh="8", baselines=False, overlap="parameters")
    (mark,) = plan.timeline.marks
    assert plan.hidden > 0.01 * plan.cost
    assert (mark.end_ns - mark.start_ns) / 1e9 == pytest.approx(plan.cost, rel=0.02)
