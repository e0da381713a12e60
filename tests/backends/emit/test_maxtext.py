"""A plan as MaxText's degrees of parallelism."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import pase
from pase.backends.registry import emit
from pase.errors import PaseError

MODEL = "zoo:llama3_8b?layers=2&batch=64&seq=64&vocab=1024&remat=0"


def test_degrees_within_and_across_nodes_multiply_to_the_devices(tmp_path: Path) -> None:
    path = tmp_path / "pase.yml"
    plan = pase.compile(
        MODEL,
        devices=32,
        machine="h100x8",
        target="maxtext",
        mesh="data=2,fsdp=8,tensor_sequence=2",
        accumulate=2,
        baselines=False,
    )
    assert "MaxText" in emit(plan, "maxtext", path)
    lines = [line.partition(": ") for line in path.read_text().splitlines() if ": " in line]
    found = {key: value.strip('"') for key, _, value in lines}
    degrees = {k: int(v) for k, v in found.items() if k.endswith("_parallelism")}
    assert math.prod(n for k, n in degrees.items() if k.startswith("ici_")) == 8
    assert math.prod(n for k, n in degrees.items() if k.startswith("dcn_")) == 4
    for axis, size in plan.mesh.by_name.items():
        assert degrees[f"ici_{axis}_parallelism"] * degrees[f"dcn_{axis}_parallelism"] == size
    assert float(found["per_device_batch_size"]) * 32 * int(found["gradient_accumulation_steps"]) == 64


def test_other_plans_are_refused(tmp_path: Path) -> None:
    plan = pase.compile(MODEL, devices=8, baselines=False)
    with pytest.raises(PaseError, match="--for maxtext"):
        emit(plan, "maxtext", tmp_path / "x.yml")
