"""What crosses between stages."""

from __future__ import annotations

import pytest

from tests.backends.torch.pipeline.pipelines import (
    funnel,
    model,
    planned,
)

pytestmark = pytest.mark.torch


def test_what_crosses_is_what_the_plan_says() -> None:
    """Bytes per micro-batch from a device of one stage to the next stage, and of gradients back."""
    import torch

    from pase.backends.torch.pipeline.p2p import Letter, StageLinks
    from pase.backends.torch.spmd.process_groups import AxisGroups

    for plan in (model()[2], planned(*funnel(), machine="v100x8")):
        run, device = plan.torch, torch.device("cpu")
        groups = AxisGroups(mesh=plan.mesh, devices=None, place=(0,))  # type: ignore[arg-type]
        links = StageLinks(plan=run, groups=groups, device=device, rank=0, inner=0, channels={})
        for k, stage in enumerate(plan.pipeline.stages[:-1]):
            letters = Letter("there", k, k + 1, 0), Letter("back", k + 1, k, 0)
            there, back = (sum(x.nbytes for x in links.blank(letter)) for letter in letters)
            assert (there, back) == (stage.send_bytes, stage.back_bytes) and there and back
