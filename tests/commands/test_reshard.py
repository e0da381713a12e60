"""``pase reshard`` and ``pase diff``: two layouts on the command line."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

import pase
from tests.command import printed, reported


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    w, x = (jax.ShapeDtypeStruct(s, "float32") for s in ((4096, 4096), (64, 4096)))
    folder, out = tmp_path_factory.mktemp("layouts"), []
    for mesh in ("8", "16"):
        plan = pase.compile(lambda p, x: (x @ p).mean(), w, x, devices=int(mesh), mesh=mesh, baselines=False)
        out.append(str(folder / f"{mesh}.json"))
        plan.save(out[-1])
    return out[0], out[1]


def test_reshard(layouts: tuple[str, str]) -> None:
    made = reported("reshard", *layouts)
    assert made["parameters"] == 1 and made["moved"] == len(made["moves"])
    assert sum(made["bytes"].values()) == sum(n for m in made["moves"] for n in m["bytes"].values())
    assert f"{made['moved']} of 1 parameters are resharded" in printed("reshard", *layouts)
    assert "0 of 1 parameters are resharded" in printed("reshard", layouts[0], layouts[0])


def test_diff(layouts: tuple[str, str]) -> None:
    assert "mesh:" in printed("diff", *layouts)
    same = printed("diff", layouts[0], layouts[0])
    assert "the layouts are the same" in same and Path(layouts[0]).exists()
