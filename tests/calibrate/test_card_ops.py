"""The ops of a card's calibration, and their times in a profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from pase.calibrate import card_ops as card_ops_module
from pase.calibrate.card_ops import CardOp, ProfiledKernels, card_ops, kernel_seconds


def test_the_first_ops_are_of_every_kind() -> None:
    """A calibration that ends after its first round has products, convolutions and light ops of both dtypes."""
    first = card_ops()[:30]
    assert {(op.kind, op.dtype) for op in first} == {(op.kind, op.dtype) for op in card_ops()}
    assert {op.form for op in first} == {op.form for op in card_ops()}
    assert not all(op.work.aligned for op in first)
    assert len(set(card_ops())) == len(card_ops()) == len({op.label + op.form for op in card_ops()})


def test_a_profile_tells_ops_of_one_program_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this host's CPU: each op has kernels of its own, and none has those of an op that is not asked for."""
    product = CardOp(kind="matmul", dtype="float32", extents=(1, 64, 64, 64))
    norm = CardOp(kind="memory", dtype="float32", extents=(256, 256), form="norm")
    conv = CardOp(kind="conv", dtype="float32", extents=(2, 14, 16, 16, 3))
    seen: list[list[float]] = []

    def more(folder: Path, count: int) -> list[float]:
        seen.append(kernel_seconds(folder, count + 1))
        return seen[-1][:count]

    monkeypatch.setattr(card_ops_module, "kernel_seconds", more)
    found = ProfiledKernels().seconds([product, norm, conv])
    assert all(s is not None and s > 0 for s in found)
    assert [len(x) for x in seen] == [4] and seen[0][3] == 0
