"""The stages of a rank, called in the order of a schedule's list."""

from __future__ import annotations

import pytest

from pase.pipeline.registry import SCHEDULES
from tests.backends.torch.pipeline.pipelines import (
    check,
    model,
    planned,
    staged,
)

pytestmark = pytest.mark.torch
LAYERS = 4


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_under_any_schedule_are_the_model_alone(name: str) -> None:
    """A step of AdamW. Labels are counted over all micro-batches, and embeddings are tied (zb-v and dualpipev have the
    first and the last stage on one rank). Each stage is split at random, and sums gradients either per micro-batch or
    once per step. Within stages, exactly the collectives on the plan's list are sent."""
    module, batch, plan, wanted = model()
    chunks, seed = max(SCHEDULES[name].chunks[0], 1), list(SCHEDULES).index(name)
    cuts = (1,) * LAYERS if chunks == 2 else ((1, 3), (2, 2), (3, 1))[seed % 3]
    check(staged(plan, name, chunks, cuts, seed), module, batch, wanted)


def test_recomputed_stages_are_the_model_alone() -> None:
    module, batch, _, wanted = model()
    plan = planned(module, batch, remat="all")
    assert plan.torch.splits[0].blocks
    check(staged(plan, "zb-h1", 1, (1, 3), 5), module, batch, wanted)
