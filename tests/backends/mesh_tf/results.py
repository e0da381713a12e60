"""What the worker measured in Mesh-TensorFlow, once per process of tests."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HAVE = all(importlib.util.find_spec(m) for m in ("tensorflow", "mesh_tensorflow"))


needs_mesh_tf = pytest.mark.skipif(
    not HAVE, reason="needs tensorflow and mesh-tensorflow (pip install '.[tf]')"
)


ENV = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}


@cache
def worker(*sections):
    """The results of these sections of ``worker.py``; by default of all, each model under its first strategy."""
    sections = sections or [
        "rules",
        "moves",
        "functions",
        "refused",
        "scans",
        "mlp",
        "alexnet",
        "rows",
        "lstm",
        "transformer",
        "parts",
        "images",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.mesh_tf.worker", *sections],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_steps_are_tensorflows(model, *strategies):
    """The steps of a model are TensorFlow's under its first strategy, or under these."""
    results = worker(*(f"{model}={s}" for s in strategies))
    found = [v for k, v in results.items() if k.partition(" ")[0] == model]
    assert len(found) == max(1, len(strategies))
    for step in found:
        assert step["rules"] and step["lowered"], "nothing is split"
        assert step["loss_error"] <= 2e-6 * abs(step["loss"])
        assert step["gradient_error"] < 5e-6
        assert step["update_error"] < 1e-6
