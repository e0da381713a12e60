"""Lets ``pase profile`` trace an unchanged program. _site/sitecustomize.py calls the autostart functions.

``pase profile`` starts the program with the variables of ``environment``. In the program, an autostart function runs
once the framework has been imported.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path

from pase.replay.collect.profiling import profile
from pase.replay.collect.profiling_torch import StepHook

__all__ = ["autostart_jax", "autostart_torch", "environment"]

FOLDER, SECONDS = "PASE_PROFILE", "PASE_PROFILE_SECONDS"
SKIP, STEPS = "PASE_PROFILE_SKIP", "PASE_PROFILE_STEPS"
"""Environment variables: the folder, the duration and, for PyTorch, the number of steps to skip and to trace."""
_recording: list[str] = []
"""The framework whose profiler writes into this process's folder: the first one that is used."""


def environment(folder: Path, seconds: float, skip: int = 2, steps: int = 10) -> dict[str, str]:
    """Returns environment variables with which a program and all processes that it starts trace themselves.

    folder: where to write. seconds: how long to trace; 0 traces until the end.
    skip, steps: for PyTorch, the number of steps to skip first, and the number to trace.
    """
    site = str(Path(__file__).parent / "_site")
    inherited = os.environ.get("PYTHONPATH")
    env = {**os.environ, FOLDER: str(folder.resolve()), SECONDS: str(seconds)}
    env |= {SKIP: str(skip), STEPS: str(steps)}
    env["PYTHONPATH"] = site + (os.pathsep + inherited if inherited else "")
    return env


def autostart_jax(folder: str, seconds: float) -> None:
    """Starts tracing once JAX has compiled something, because its backends and process index are then known.

    Tracing ends at exit or, if ``seconds`` is positive, that long after the start.
    """
    import threading

    run = profile(folder, framework="jax")

    def begin(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if _recording or not event.endswith("backend_compile_duration"):
            return
        _recording.append("jax")
        run.start()
        atexit.register(run.stop)
        if seconds > 0:
            timer = threading.Timer(seconds, run.stop)
            timer.daemon = True
            timer.start()

    sys.modules["jax"].monitoring.register_event_duration_secs_listener(begin)


def autostart_torch(folder: str, seconds: float) -> None:
    """Traces some optimizer steps, after the first ones, in which memory and kernels are not yet steady.

    The trace is written after these steps, or at exit. If ``seconds`` is positive, tracing ends with the first step
    after that time.
    """
    skip, steps = (int(os.environ.get(k) or d) for k, d in ((SKIP, 2), (STEPS, 10)))
    run = profile(folder, framework="torch")
    state = {"passed": 0, "began": 0.0}

    def after() -> None:
        state["passed"] += 1
        if _recording == ["jax"]:
            handle.remove()
            return
        done = state["passed"] - max(skip, 1)  # the first step has ended when this hook first runs
        if done == 0:
            _recording.append("torch")
            run.start(between=True)
            state["began"] = time.monotonic()
            atexit.register(run.stop)
        late = seconds > 0 and time.monotonic() - state["began"] > seconds
        if done == steps or (done > 0 and late):
            run.stop(between=True)
            handle.remove()

    handle = StepHook(after)
