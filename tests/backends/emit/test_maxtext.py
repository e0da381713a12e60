"""A plan as MaxText's degrees of parallelism."""

from __future__ import annotations

import json
import math
import os
import subprocess
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


@pytest.mark.maxtext
def test_maxtext_lays_out_weights_as_planned(tmp_path: Path) -> None:
    """MaxText's own parser reads the file, and its rules give every weight the layout that the plan priced."""
    path, worker = tmp_path / "pase.yml", Path(__file__).parent / "maxtext_worker.py"
    mesh = {"data": 2, "fsdp": 2, "tensor_sequence": 2}
    asked = ",".join(f"{a}={n}" for a, n in mesh.items())
    plan = pase.compile(MODEL, devices=8, target="maxtext", mesh=asked, accumulate=2, baselines=False)
    emit(plan, "maxtext", path)
    ran = subprocess.run(
        [os.environ["PASE_MAXTEXT"], worker, path], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["batch"] == 64 and found["mesh"] == mesh and found["remat"] == "minimal_with_context"
    assert len(found["layouts"]) == len(plan.parameters) - 1  # the last norm is as those of the layers
    for name, theirs in found["layouts"].items():
        (mine,) = (p for path, p in plan.parameters.items() if path.endswith(name))
        split = [list(axes) for axes in mine.storage if axes]
        assert split == [axes for axes in theirs if axes], name


def test_other_plans_are_refused(tmp_path: Path) -> None:
    plan = pase.compile(MODEL, devices=8, baselines=False)
    with pytest.raises(PaseError, match="--for maxtext"):
        emit(plan, "maxtext", tmp_path / "x.yml")
