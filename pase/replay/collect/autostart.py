"""How ``pase profile`` reaches into a program that knows nothing of it: _site/sitecustomize.py calls this.

``environment`` is what the program is started with; the autostart functions run in it, once it has imported its
framework.
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
"""Environment variables: where to write, for how long; PyTorch: steps to let pass first, and how many to trace."""
_recording: list[str] = []
"""The framework whose profiler has this process's folder: the first one that does something."""


def environment(folder: Path, seconds: float, skip: int = 2, steps: int = 10) -> dict[str, str]:
    """Environment variables with which a program, and every process it starts, traces itself."""
    site = str(Path(__file__).parent / "_site")
    inherited = os.environ.get("PYTHONPATH")
    env = {**os.environ, FOLDER: str(folder.resolve()), SECONDS: str(seconds)}
    env |= {SKIP: str(skip), STEPS: str(steps)}
    env["PYTHONPATH"] = site + (os.pathsep + inherited if inherited else "")
    return env


def autostart_jax(folder: str, seconds: float) -> None:
    """Start tracing once JAX has compiled something, so that its backends and process index are settled.

    Ends at exit, or ``seconds`` after the start where that is positive.
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
    """Trace some optimizer steps, after those in which memory and kernels settle; write once they are done, or at
    exit. ``seconds``: end with the first step after so long, where positive.
    """
    skip, steps = (int(os.environ.get(k) or d) for k, d in ((SKIP, 2), (STEPS, 10)))
    run = profile(folder, framework="torch")
    state = {"passed": 0, "began": 0.0}

    def after() -> None:
        state["passed"] += 1
        if _recording == ["jax"]:
            handle.remove()
            return
        done = state["passed"] - max(skip, 1)  # the first step is over before anything can be known of it
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
