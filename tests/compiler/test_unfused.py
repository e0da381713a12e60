"""What a fused kernel would save."""

from __future__ import annotations

from pathlib import Path

import pytest

import pase
from pase.questions.explain import explain
from tests.command import printed


def test_what_a_fused_kernel_would_save_is_what_it_saves(tmp_path: Path) -> None:
    """Compares attention that is written out with the same model with fused attention, under the same split."""
    plain, fused = (
        pase.compile(
            f"zoo:bert_base?layers=2&batch=16&seq=2048&remat=0&attention={a}",
            devices=8,
            mesh="8",
            baselines=False,
        )
        for a in ("plain", "fused")
    )
    found = explain(plain, time_limit=0).unfused
    assert sum(u.cost - u.fused for u in found) == pytest.approx(plain.cost - fused.cost, rel=0.05)
    assert sum(u.kept for u in found) == pytest.approx(
        plain.memory.activations - fused.memory.activations, rel=0.05
    )
    assert not explain(fused, time_limit=0).unfused
    layout = tmp_path / "layout.json"
    plain.save(layout)
    text = printed("explain", layout, "--time-limit", 0)
    assert "a fused kernel would save" in text and "attention=fused" in text
