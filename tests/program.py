"""Runs programs as users start them, each in its own process.

The process is a fork of one that has imported JAX and pase but has not used them. A program therefore starts at once,
without three seconds of imports.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.processes import forks_of

__all__ = ["COMPILED_QUICKLY", "Started", "run", "start"]

COMPILED_QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1"
)
"""XLA flags for tests, which compile much and run little.

XLA does not optimise machine code, uses the emitters that take a third of the time, and does not split a program to
compile its parts in parallel, which costs a tenth of a test's time. The optimised HLO program is the same.
"""

IMPORTED = (
    "jax",
    "optax",
    "scipy.optimize",
    "sympy",
    "numba",
    "pase.api",
    "pase.cli",
    "pase.compiler.compilation",
)


class Started:
    """A program that is running or has ended."""

    def __init__(self, words: tuple[str, ...], folder: Path, environment: Mapping[str, str]) -> None:
        self.words = words
        self._said = tempfile.TemporaryDirectory()
        forks: Any = forks_of([*IMPORTED, __name__])
        self._process = forks.Process(
            target=_become, args=(words, folder, dict(environment), self._said.name)
        )
        self._process.start()

    def ended(self, seconds: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Wait for the end, and return the exit status and the output. Raises AssertionError if it still runs then."""
        self._process.join(seconds)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        with self._said as folder:
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        assert code is not None, f"{self.words} still ran after {seconds} s\n{out[-1000:]}\n{err[-2000:]}"
        return subprocess.CompletedProcess(self.words, code, out, err)


def start(*words: object, folder: Path, environment: Mapping[str, str] = os.environ) -> Started:
    """Start ``pase …``, ``python FILE …`` or ``python -m MODULE …`` in a folder."""
    return Started(tuple(map(str, words)), folder, environment)


def run(
    *words: object, folder: Path, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Start a program and wait for its end."""
    return start(*words, folder=folder, environment=environment).ended()


def _become(words: tuple[str, ...], folder: Path, environment: dict[str, str], said: str) -> None:
    """The main function of the process: become the program. said: the folder for its output."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(said, name), os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    program, *rest = words
    if program == "pase":
        program, *rest = "python", "-m", "pase.cli", *rest
    assert program == "python", program
    if rest[0] == "-m":
        for name in [n for n in sys.modules if n.partition(".")[0] == "bench"]:
            del sys.modules[name]  # the folder may have its own copy
        sys.argv, sys.path[:0] = rest[1:], [str(folder)]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = rest, [str(Path(folder, rest[0]).parent)]
        runpy.run_path(rest[0], run_name="__main__")
