"""A plan as FSDP2: the written file runs and gives the unsharded step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from bench.cases.torch_ranks import on_ranks
from pase.backends.registry import emit
from tests.backends.emit.torch_plans import plan_of
from tests.backends.torch.models import case

pytestmark = pytest.mark.torch
RANKS = 4


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_fsdp2_as_written_is_the_unsharded_step(strategy: str, tmp_path: Path) -> None:
    import torch

    c, path = case("tower", RANKS), tmp_path / "fsdp2.py"
    said = emit(plan_of("tower", strategy), "fsdp2", path)
    assert "fully_shard" in said
    written: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), written)
    assert written["UNITS"] == ["layers.0", "layers.1", "layers.2"]
    assert written["RESHARD_AFTER_FORWARD"] == (strategy == "fsdp")

    assert not written["RECOMPUTE"] and written["MICRO_BATCHES"] == 1

    def on_rank(rank: int) -> Any:
        module = written["parallelize"](copy.deepcopy(c.module), "cpu")
        module(*(x.chunk(RANKS)[rank] for x in c.batch)).backward()
        return {k: p.grad.full_tensor() for k, p in module.named_parameters()}

    for gradients in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(gradients, c.gradients)


def test_micro_batches_are_parts_of_containers_too(tmp_path: Path) -> None:
    """Hugging Face's batches are dicts, and may have numbers and arrays of no examples."""
    import torch

    path = tmp_path / "fsdp2.py"
    emit(plan_of("tower", "fsdp"), "fsdp2", path)
    written: dict[str, Any] = {}
    exec(
        compile(path.read_text().replace("MICRO_BATCHES = 1", "MICRO_BATCHES = 2"), str(path), "exec"),
        written,
    )
    layer, x = torch.nn.Linear(3, 1), torch.randn(4, 3)

    def loss(module: Any, batch: Any, scale: float) -> Any:
        assert batch["step"].ndim == 0
        return module(batch["x"]).square().mean() * scale

    batch = {"x": x, "step": torch.tensor(7)}
    value = written["backward"](loss, layer, batch, 0.5)
    torch.testing.assert_close(value, loss(layer, batch, 0.5).detach())
    with pytest.raises(ValueError, match="3 examples do not divide into 2 micro-batches"):
        written["backward"](loss, layer, {"x": x[:3], "step": 7}, 0.5)
