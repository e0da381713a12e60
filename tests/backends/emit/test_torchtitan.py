"""A plan as torchtitan's degrees of parallelism."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import pase
from pase.backends.registry import emit
from tests.backends.emit.torch_plans import plan_of

pytestmark = pytest.mark.torch
RANKS = 4


def test_torchtitan_reads_its_degrees(tmp_path: Path) -> None:
    path = tmp_path / "titan.toml"
    emit(plan_of("tower", "fsdp"), "torchtitan", path)
    found = tomllib.loads(path.read_text())["parallelism"]
    assert (found["data_parallel_shard_degree"], found["tensor_parallel_degree"]) == (RANKS, 1)
    assert found["fsdp_reshard_after_forward"] == "never"


def test_parameters_are_gathered_again_if_the_plan_says_so(tmp_path: Path) -> None:
    """A plan that recomputes its layers gathers them again, too."""
    model, path = "zoo:llama3_8b?layers=3&batch=16&seq=256&vocab=1024&remat=0", tmp_path / "titan.toml"
    for remat, said in (("none", "never"), ("all", "always")):
        plan = pase.compile(
            model, devices=8, target="torchtitan", baselines=False, memory_limit="none", remat=remat
        )
        emit(plan, "torchtitan", path)
        assert tomllib.loads(path.read_text())["parallelism"]["fsdp_reshard_after_forward"] == said


def test_options_say_what_the_file_says(tmp_path: Path) -> None:
    """torchtitan 0.3.0 has exactly these names (its ``ConfigManager`` read this file: 4 shards, no recomputation), and
    wants the subcommand after all options."""
    path, toml = tmp_path / "titan.txt", tmp_path / "titan.toml"
    emit(plan_of("tower", "fsdp"), "torchtitan", path)
    emit(plan_of("tower", "fsdp"), "torchtitan", toml)
    *options, checkpoint = path.read_text().split()
    file = tomllib.loads(toml.read_text())
    assert checkpoint == f"activation-checkpoint:{file.pop('activation_checkpoint')['mode']}"
    assert options == [f"--{s}.{k}={v}" for s, values in file.items() for k, v in values.items()]
    assert "--parallelism.data_parallel_shard_degree=4" in options
