"""``pase verify`` for PyTorch models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pase
from pase.errors import PaseError
from tests.command import reported, run

pytestmark = pytest.mark.torch


def model() -> tuple[Any, Any]:
    """A module and a batch, for the command line."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: Any) -> Any:
            return self.down(torch.relu(self.up(x))).square().mean()

    return Net(), torch.empty(64, 64)


@pytest.fixture(scope="module")
def plan() -> pase.Plan:
    return pase.compile(f"{__name__}:model", devices=4, mesh="4", target="fsdp2", baselines=False)


def test_a_rank_s_step_is_followed_and_compared(plan: pase.Plan, tmp_path: Path) -> None:
    """In text, JSON and Python: memory by kind, and collectives as listed, joined and dispatched."""
    found = plan.verify(rank=3)
    assert found.to_json()["memory"] == plan.torch.memory(3).to_json() | {
        "predicted": found.to_json()["memory"]["predicted"]
    }
    layout, text = tmp_path / "layout.json", tmp_path / "step.py"
    plan.save(layout)
    words = ("verify", layout, "--rank", "3", "--strict")
    said = reported(*words, "--text", text)
    assert said == found.to_json() and said["exact"] and said["bytes_equal"] and said["fits"]
    assert text.read_text().startswith(f"# {__name__}:model: rank 3 of 4")
    listed = {kind: (s["listed"], s["planned"], s["sent"]) for kind, s in said["collectives"].items()}
    assert listed == {"all_gather": (4, 1, 1), "all_reduce": (1, 1, 1), "reduce_scatter": (4, 1, 1)}
    weights = 4 * sum(p.numel() for p in model()[0].parameters())
    assert said["collectives"]["all_gather"]["sent_bytes"] == weights
    assert said["memory"]["parameters"] == said["memory"]["predicted"]["parameters"] == weights // 4
    code, out, _ = run(*words)
    assert code == 0 and "messages are those of the plan" in out and "rank 3 of 4" in out


def test_what_has_no_such_step_is_refused(plan: pase.Plan) -> None:
    with pytest.raises(PaseError, match="no rank 4: the plan is for 4 devices"):
        plan.verify(rank=4)
    with pytest.raises(PaseError, match="a PyTorch step has no lowering"):
        plan.verify(lowering="manual")
    whole = pase.compile("zoo:mlp?batch=64&layers=2&features=64&hidden=64", devices=4, baselines=False)
    with pytest.raises(PaseError, match="all devices run one program"):
        whole.verify("cpu", rank=1)
