"""Plans as PyTorch's own parallel styles. The written files run and give the unsharded step. A plan that does not have
a style is refused."""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bench.cases.torch_ranks import on_ranks
from pase.backends.registry import emit
from pase.errors import PaseError
from tests.backends.torch.models import case

pytestmark = pytest.mark.torch
RANKS = 4


def plan_of(model: str, strategy: str) -> Any:
    plan = case(model, RANKS).case.plan(strategy)
    assert plan is not None
    return plan


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

    def on_rank(rank: int) -> Any:
        module = written["parallelize"](copy.deepcopy(c.module), "cpu")
        module(*(x.chunk(RANKS)[rank] for x in c.batch)).backward()
        return {k: p.grad.full_tensor() for k, p in module.named_parameters()}

    for gradients in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(gradients, c.gradients)


def test_a_tp_plan_as_written_is_the_unsharded_step(tmp_path: Path) -> None:
    """The plan is applied by PyTorch's parallelize_module, whose styles transformers uses."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    c, path = case("tower", RANKS), tmp_path / "tp.json"
    emit(plan_of("tower", "megatron/megatron_1x4"), "tp-plan", path)
    styles = json.loads(path.read_text())
    assert styles == {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def on_rank(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (RANKS,))
        made = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        module = parallelize_module(copy.deepcopy(c.module), mesh, {k: made[v]() for k, v in styles.items()})
        module(*c.batch).backward()
        grads = {k: p.grad for k, p in module.named_parameters()}
        return {k: g.full_tensor() if hasattr(g, "full_tensor") else g for k, g in grads.items()}

    for gradients in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(gradients, c.gradients)


def test_torchtitan_reads_its_degrees(tmp_path: Path) -> None:
    path = tmp_path / "titan.toml"
    emit(plan_of("tower", "fsdp"), "torchtitan", path)
    found = tomllib.loads(path.read_text())["parallelism"]
    assert (found["data_parallel_shard_degree"], found["tensor_parallel_degree"]) == (RANKS, 1)
    assert found["fsdp_reshard_after_forward"] == "always"


@pytest.mark.parametrize(
    ("strategy", "target", "what"),
    [
        ("data_parallel", "fsdp2", "shards neither parameters"),
        ("megatron/megatron_1x4", "fsdp2", "does not split the batch"),
        ("fsdp", "tp-plan", "do not split the batch"),
        ("megatron/megatron_1x4", "torchtitan", "all_reduce over model"),
        ("random1@2x2", "fsdp2", "FSDP2"),
        ("random1@2x2", "tp-plan", "tp_plan"),
    ],
)
def test_another_way_of_splitting_is_refused(strategy: str, target: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(PaseError) as e:
        emit(plan_of("tower", strategy), target, tmp_path / "out")
    assert what in e.value.what and e.value.fix
    assert not (tmp_path / "out").exists()
