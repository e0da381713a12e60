"""A plan as DistributedDataParallel: the written file runs and gives the unsharded step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from bench.cases.torch_ranks import on_ranks
from pase.backends.registry import emit
from pase.errors import PaseError
from tests.backends.emit.torch_plans import plan_of
from tests.backends.torch.models import case

pytestmark = pytest.mark.torch
RANKS = 4


def test_ddp_as_written_is_the_unsharded_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    # A forward puts back the module that it found here. Of ranks on threads, one may put back that of another. PyTorch
    # then compiles the bodies of scan, map and cond as parts of that module, and cannot export them in this process.
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)
    c, path = case("tower", RANKS), tmp_path / "ddp.py"
    emit(plan_of("tower", "data_parallel"), "ddp", path)
    written: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), written)

    def on_rank(rank: int) -> Any:
        module = written["parallelize"](copy.deepcopy(c.module))
        module(*(x.chunk(RANKS)[rank] for x in c.batch)).backward()
        return {k.removeprefix("module."): p.grad for k, p in module.named_parameters()}

    for gradients in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(gradients, c.gradients)


def test_a_plan_that_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PaseError, match="--for ddp"):
        emit(plan_of("tower", "fsdp"), "ddp", tmp_path / "ddp.py")
