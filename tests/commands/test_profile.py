"""``pase profile``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.command import printed, reported, run

TRAIN = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
x = jax.device_put(jnp.ones((64, 128)), NamedSharding(mesh, P("d")))
w = jax.device_put(jnp.ones((128, 128)) / 128, NamedSharding(mesh, P()))
step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).sum())(w))
for _ in range(6):
    w = step(w, x).block_until_ready()
"""


def test_profile_collects_what_replay_reads(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    report = _profiled(tmp_path / "traces", script)
    assert len(report["traces"]) == 1
    replayed = reported("replay", tmp_path / "traces")
    assert [r["rank"] for r in replayed["ranks"]] == [0, 1]
    assert len(replayed["iterations"]) >= 4
    manifest = json.loads((tmp_path / "traces" / "rank0" / "manifest.json").read_text())
    assert manifest["local_devices"] == 2


def _profiled(folder: Path, script: Path) -> dict[str, Any]:
    return json.loads(printed("profile", "--json", "-o", folder, "--", sys.executable, script))


def test_profile_passes_the_programs_failure_on(tmp_path: Path) -> None:
    code, _, err = run("profile", "-o", tmp_path / "t", "--", sys.executable, "-c", "raise SystemExit(3)")
    assert code == 2
    assert "ended with status 3" in " ".join(err.split())
