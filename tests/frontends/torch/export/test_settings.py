"""The Python state that a step reads from its module may not change. Other state may."""

from __future__ import annotations

from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import on_ranks
from pase.errors import PaseError
from tests.backends.torch.settings import model, stepped

pytestmark = pytest.mark.torch


def test_what_the_step_does_not_read_may_change() -> None:
    def change(m: Any) -> None:
        m.epoch, m.config.seen, m.config.scale = 3, 1, float("2.0")
        m.lin.eval()

    before, after = stepped(change)
    assert before == after


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("temperature", r"'temperature', which was 1\.0 .* is 2\.0 now"),
        ("weights", r"'weights\[0\]', which was 1\.0"),
        ("config", r"'config.scale', which was 2\.0 .* is 5\.0"),
        ("rate", r"'drop.p', which was 0\.0 .* is 0\.5"),
        ("mode", r"^drop: .* in evaluation mode, .*; call module.train"),
    ],
)
def test_what_the_step_reads_may_not(name: str, says: str) -> None:
    def change(m: Any) -> None:
        match name:
            case "temperature":
                m.temperature = 2.0
            case "weights":
                m.weights[0] = 3.0
            case "config":
                m.config.scale = 5.0
            case "rate":
                m.drop.p = 0.5
            case "mode":
                m.eval()

    with pytest.raises(PaseError, match=says):
        stepped(change)


def test_another_module_than_the_one_that_was_compiled_is_refused() -> None:
    import torch

    batch = {"a": torch.randn(16, 16), "b": torch.randn(16, 16)}
    plan, other = pase.compile(model(), batch, devices=1).torch, model()
    other.temperature = 0.5

    def on_rank(rank: int) -> None:
        step = plan.parallelize(other)
        with pytest.raises(PaseError, match=r"'temperature', which was 1\.0"):
            step(batch)

    on_ranks(1, on_rank)
