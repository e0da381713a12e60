"""Traces, a plan and layouts that the tests of several commands read."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

import pase
from bench.cases.timelines import ImaginedRun, simulate, write


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return write(simulate(ImaginedRun(ranks=2, iterations=4, noise=0.01)), tmp_path / "traces")


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    w, x = (jax.ShapeDtypeStruct(s, "float32") for s in ((4096, 4096), (64, 4096)))
    folder, out = tmp_path_factory.mktemp("layouts"), []
    for mesh in ("8", "16"):
        plan = pase.compile(lambda p, x: (x @ p).mean(), w, x, devices=int(mesh), mesh=mesh, baselines=False)
        out.append(str(folder / f"{mesh}.json"))
        plan.save(out[-1])
    return out[0], out[1]


@pytest.fixture(scope="session")
def plan() -> pase.Plan:
    """A plan of a zoo model, whose layout can find the model by its name."""
    return pase.compile(
        "zoo:mlp?batch=64&layers=2&features=64&hidden=64&classes=16", devices=4, mesh="2x2", baselines=False
    )
