"""Former names of modules import the present module, whose own name and spec stay unchanged."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORMER = {
    "pase.backends.mtf_ops": "pase.backends.mesh_tf.runtime_ops",
    "pase.backends.mtf_run": "pase.backends.mesh_tf.run",
    "pase.backends.mtf_shim": "pase.backends.mesh_tf.shim",
    "pase.backends.to_dtensor": "pase.backends.emit.tf_dtensor",
    "pase.backends.to_jax": "pase.backends.jax.plan",
    "pase.backends.to_jax_buckets": "pase.backends.jax.bucket_runner",
    "pase.backends.to_names": "pase.backends.emit.shardings_json",
    "pase.backends.to_torch": "pase.backends.emit.ddp_hook",
    "pase.frontends.from_jax": "pase.frontends.jax.frontend",
    "pase.frontends.jax_rules": "pase.frontends.jax.rules",
    "pase.replay.clocks": "pase.replay.measurement.clocks",
    "pase.replay.streams": "pase.replay.reports.streams",
}


def test_a_former_name_imports_the_module_that_is_there_now() -> None:
    for former, name in FORMER.items():
        module = importlib.import_module(former)
        assert module is importlib.import_module(name)
        assert module.__name__ == name and module.__spec__ is not None and module.__spec__.name == name


@pytest.mark.parametrize(
    "program",
    [
        "from pase.backends import to_names; print(to_names.__name__)",
        "import pase.backends.to_names as m; print(m.__name__)",
        "from pase.backends.to_names import emit; print(emit.__module__)",
    ],
)
def test_every_form_of_import_knows_former_names(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("pase.backends.emit.shardings_json\n", "")


def test_a_name_that_never_was_is_refused() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pase\.backends\.to_nothing"):
        importlib.import_module("pase.backends.to_nothing")
