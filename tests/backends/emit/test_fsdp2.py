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
