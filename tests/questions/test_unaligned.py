"""What aligned rows of products would save."""

from __future__ import annotations

from pathlib import Path

import pytest

import pase
from pase.questions.explain import explain
from tests.command import printed


def test_what_a_larger_dim_would_save_is_what_it_saves(tmp_path: Path) -> None:
    """Compares a vocabulary of 50,257 with one of 50,260, whose rows of float32 gradients are multiples of 16 bytes."""
    odd, even = (
        pase.compile(f"zoo:gpt2?layers=1&vocab={v}", devices=8, mesh="8", machine="h100x8", baselines=False)
        for v in (50_257, 50_260)
    )
    (found,) = explain(odd, time_limit=0).unaligned
    assert found.sizes == {"v": (50_257, 50_260)}
    assert found.cost - found.padded == pytest.approx(odd.cost - even.cost, rel=0.05)
    assert not explain(even, time_limit=0).unaligned
    layout = tmp_path / "layout.json"
    odd.save(layout)
    assert "v 50,257 → 50,260" in printed("explain", layout, "--time-limit", 0)
