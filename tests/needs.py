"""Needs of tests that a machine with the default extras may not have, and how to run the tests that have them.

A test declares a need with the mark of its name (``@pytest.mark.torch``). ``conftest.py`` skips the test if the need is
not met, and lists at the end of a run what was skipped and how to run it. Under CI, a test that is skipped for any
other reason fails the run.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

from bench.cases import SHARED

__all__ = ["NEEDS", "SHARED", "Need"]


@dataclass(frozen=True, kw_only=True)
class Need:
    """Something that some tests need and that not every machine has."""

    what: str
    how: str
    """The command that runs the tests, on a machine that has it."""
    missing: Callable[..., str | None]
    """Returns the reason why a test with this mark and its arguments cannot run here; None if it can."""
    asked: bool = False
    """Whether such tests run only if the mark is selected with ``-m``."""

    @property
    def reason(self) -> str:
        return f"needs {self.what}: {self.how}"


def _installed(*names: str) -> str | None:
    absent = [n for n in names if importlib.util.find_spec(n) is None]
    return f"{', '.join(absent)} not installed" if absent else None


def _data(path: str = ".") -> str | None:
    return None if (SHARED / path).exists() else f"no {SHARED / path}"


def _network_laboratory() -> str | None:
    from bench.netlab import net

    return net.unavailable()


NEEDS = {
    "torch": Need(
        what="PyTorch, too large to be installed by default",
        how="make test-all",
        missing=lambda: _installed("torch", "onnxscript", "transformers"),
    ),
    "gpu_compiler": Need(
        what="XLA's compiler for CUDA, too large to be installed by default",
        how="make test-gpu-compiler",
        missing=lambda: _installed("jax_cuda12_plugin", "flatbuffers"),
    ),
    "minutes": Need(
        what="minutes, because it starts a program as users do",
        how="make test-all",
        missing=lambda: None,
        asked=True,
    ),
    "release": Need(
        what="minutes: the same test on more models, a bench in its smallest setting, or a page's commands",
        how="make test-release",
        missing=lambda: None,
        asked=True,
    ),
    "corpus": Need(
        what="the libraries of the programs in bench/programs",
        how="make test-corpus",
        missing=_installed,
    ),
    "maxtext": Need(
        what="MaxText, which needs Python 3.12 and an environment of its own",
        how="make test-maxtext PASE_MAXTEXT=PYTHON, one that has MaxText",
        missing=lambda: None if os.environ.get("PASE_MAXTEXT") else "PASE_MAXTEXT names no interpreter",
    ),
    "root": Need(
        what="root and iproute2, for networks of namespaces",
        how="make test-root",
        missing=_network_laboratory,
    ),
    "data": Need(
        what="recorded data that is not in the repository",
        how="make test-data PASE_DATA=FOLDER",
        missing=_data,
    ),
}
"""Mark -> need."""
