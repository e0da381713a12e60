"""A plan as torchtitan's degrees of parallelism."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pase.backends.registry import emit
from tests.backends.emit.torch_plans import plan_of

pytestmark = pytest.mark.torch
RANKS = 4


def test_torchtitan_reads_its_degrees(tmp_path: Path) -> None:
    path = tmp_path / "titan.toml"
    emit(plan_of("tower", "fsdp"), "torchtitan", path)
    found = tomllib.loads(path.read_text())["parallelism"]
    assert (found["data_parallel_shard_degree"], found["tensor_parallel_degree"]) == (RANKS, 1)
    assert found["fsdp_reshard_after_forward"] == "always"
