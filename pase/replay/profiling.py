"""Collect what replay needs from a running JAX program, one folder a process.

    with pase.replay.profile("traces") as run:
        for batch in data:
            with run.step():
                state = train_step(state, batch)

``pase profile -o traces -- python train.py`` does it without touching the program. Then ``pase replay traces``.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from pase.errors import PaseError

__all__ = ["FOLDER", "SECONDS", "autostart", "environment", "profile"]

FOLDER, SECONDS = "PASE_PROFILE", "PASE_PROFILE_SECONDS"
"""Environment variables by which ``pase profile`` tells the program where to write and for how long."""


class profile:
    """Context manager that traces the devices of this process into ``folder``/rank<process index>.

    Without step() the executions of the program's main module are taken as iterations. PaseError where the
    program has not imported JAX, or a trace is already being taken.
    """

    def __init__(self, folder: str | Path, *, rank: int | None = None) -> None:
        self.folder, self.rank, self.path = Path(folder), rank, Path(folder)
        self._number = 0
        self._running = False

    def __enter__(self) -> profile:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    def step(self, number: int | None = None) -> AbstractContextManager[Any]:
        """Marks one iteration; numbers count up where none is given."""
        if not self._running:
            return nullcontext()
        self._number = self._number if number is None else number
        mark = _jax().profiler.StepTraceAnnotation("step", step_num=self._number)
        self._number += 1
        return mark

    def start(self) -> None:
        jax = _jax()
        rank = jax.process_index() if self.rank is None else self.rank
        self.path = self.folder / f"rank{rank}"
        if self.path.exists():
            # Old traces beside new ones would be two files of one rank.
            shutil.rmtree(self.path)
        options = jax.profiler.ProfileOptions()
        # Python frames are the dear part and replay does not need them.
        options.python_tracer_level = 0
        options.host_tracer_level = 2
        try:
            jax.profiler.start_trace(str(self.path), profiler_options=options)
        except RuntimeError as e:
            raise PaseError(f"cannot start tracing into {self.path}: {e}") from e
        self._running = True

    def stop(self) -> None:
        if not self._running:
            return
        jax = _jax()
        self._running = False
        jax.profiler.stop_trace()
        about = {
            "schema": "pase.profile/1",
            "rank": jax.process_index() if self.rank is None else self.rank,
            "processes": jax.process_count(),
            "local_devices": jax.local_device_count(),
            "host": socket.gethostname(),
            "jax": jax.__version__,
            "command": sys.argv,
        }
        (self.path / "manifest.json").write_text(json.dumps(about, indent=1) + "\n")


def _jax() -> Any:
    """The JAX that the program has imported; it is the program that is traced, so this never imports one."""
    jax = sys.modules.get("jax")
    if jax is None:
        raise PaseError(
            "pase.replay.profile traces JAX programs, and this one has not imported jax; for PyTorch use "
            "torch.profiler, export_chrome_trace one file a rank, and give their folder to pase"
        )
    return jax


def environment(folder: Path, seconds: float) -> dict[str, str]:
    """Environment in which a program, and every process it starts, traces itself: see _site/sitecustomize.py."""
    site = str(Path(__file__).parent / "_site")
    inherited = os.environ.get("PYTHONPATH")
    env = {**os.environ, FOLDER: str(folder.resolve()), SECONDS: str(seconds)}
    env["PYTHONPATH"] = site + (os.pathsep + inherited if inherited else "")
    return env


def autostart(folder: str, seconds: float) -> None:
    """Start tracing once JAX has compiled something, so that its backends and process index are settled.

    Ends at exit, or ``seconds`` after the start where that is positive.
    """
    import threading

    run = profile(folder)
    state = {"started": False}

    def begin(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if state["started"] or not event.endswith("backend_compile_duration"):
            return
        state["started"] = True
        run.start()
        atexit.register(run.stop)
        if seconds > 0:
            timer = threading.Timer(seconds, run.stop)
            timer.daemon = True
            timer.start()

    _jax().monitoring.register_event_duration_secs_listener(begin)
