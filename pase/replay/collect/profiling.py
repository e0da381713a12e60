"""Collects traces for ``pase replay`` from a running JAX or PyTorch program, with one folder per process.

    with pase.replay.profile("traces") as run:
        for batch in data:
            with run.step():
                state = train_step(state, batch)

``pase profile -o traces -- python train.py`` does the same for an unchanged program. Then run ``pase replay traces``.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError
from pase.files.json_values import JsonObject

if TYPE_CHECKING:
    from types import ModuleType

    from pase.replay.collect.profiling_torch import TorchTrace

__all__ = ["profile"]


class profile:
    """Context manager that traces the devices of this process into ``folder``/rank<process index>.

    framework: "jax" or "torch". None chooses the one that the program has imported, and JAX if it has imported both.

    Without step(), iterations are the executions of the program's main module (JAX), or the intervals between steps of
    the optimizer (PyTorch). Raises PaseError if the program has imported neither, or if a profiler is already running.
    """

    def __init__(self, folder: str | Path, *, rank: int | None = None, framework: str | None = None) -> None:
        self.folder, self.rank, self.path = Path(folder), rank, Path(folder)
        self.framework = framework
        self._number = 0
        self._running = False
        self._torch: TorchTrace | None = None
        self._hook: Any = None

    def __enter__(self) -> profile:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    def step(self, number: int | None = None) -> AbstractContextManager[None]:
        """Returns a context manager that marks one iteration. Without ``number``, iterations are counted."""
        if not self._running:
            return nullcontext()
        if self._torch is not None:
            return self._torch_step(self._torch, number)
        self._number = self._number if number is None else number
        mark = _jax().profiler.StepTraceAnnotation("step", step_num=self._number)
        self._number += 1
        return mark

    @contextmanager
    def _torch_step(self, trace: TorchTrace, number: int | None) -> Iterator[None]:
        if self._hook is not None:  # the program marks its steps itself
            self._hook.remove()
            self._hook, self._number = None, 0
        self._number = self._number if number is None else number
        trace.mark(self._number)
        self._number += 1
        try:
            yield
        finally:
            trace.unmark()

    def _start_torch(self, between: bool) -> None:
        from pase.replay.collect.profiling_torch import StepHook, TorchTrace, world

        rank = world()[0] if self.rank is None else self.rank
        self.path = self.folder / f"rank{rank}"
        if self.path.exists():
            shutil.rmtree(self.path)
        try:
            trace = self._torch = TorchTrace(self.path / "trace.json.gz")
        except RuntimeError as e:
            raise PaseError(
                f"cannot start tracing: {e}", where=str(self.path), fix="stop any other profiler"
            ) from e
        self._about = {"rank": rank, "processes": world()[1], "torch": str(sys.modules["torch"].__version__)}

        def next_step() -> None:
            trace.mark(self._number)
            self._number += 1

        if between:
            next_step()
        self._hook = StepHook(next_step)
        self._running = True

    def _stop_torch(self, trace: TorchTrace) -> None:
        self._running, self._torch = False, None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        trace.stop()
        self._manifest(self._about)

    def _manifest(self, about: JsonObject) -> None:
        head = {"schema": "pase.profile/1", **about, "host": socket.gethostname(), "command": sys.argv}
        (self.path / "manifest.json").write_text(json.dumps(head, indent=1) + "\n")

    def start(self, *, between: bool = False) -> None:
        """Starts tracing. between: for PyTorch, whether a step has just ended, so that the next one begins here."""
        if (self.framework or _imported()) == "torch":
            self._start_torch(between)
            return
        jax = _jax()
        rank = jax.process_index() if self.rank is None else self.rank
        self.path = self.folder / f"rank{rank}"
        if self.path.exists():
            # Remove the old trace, because a rank must not have two files.
            shutil.rmtree(self.path)
        options = jax.profiler.ProfileOptions()
        # Tracing Python frames is expensive, and replay does not need them.
        options.python_tracer_level = 0
        options.host_tracer_level = 2
        try:
            jax.profiler.start_trace(str(self.path), profiler_options=options)
        except RuntimeError as e:
            raise PaseError(
                f"cannot start tracing: {e}", where=str(self.path), fix="stop any other profiler"
            ) from e
        self._running = True

    def stop(self, *, between: bool = False) -> None:
        """Stops tracing and writes the trace. between: for PyTorch, whether a step has just ended."""
        if not self._running:
            return
        if self._torch is not None:
            if between:
                self._torch.unmark()
            self._stop_torch(self._torch)
            return
        jax = _jax()
        self._running = False
        jax.profiler.stop_trace()
        self._manifest(
            {
                "rank": jax.process_index() if self.rank is None else self.rank,
                "processes": jax.process_count(),
                "local_devices": jax.local_device_count(),
                "jax": jax.__version__,
            }
        )


def _imported() -> str:
    return "torch" if "torch" in sys.modules and "jax" not in sys.modules else "jax"


def _jax() -> ModuleType:
    """Returns the JAX module that the program has imported. This function never imports JAX itself."""
    jax = sys.modules.get("jax")
    if jax is None:
        raise PaseError(
            "this program has imported neither jax nor torch",
            where="pase.replay.profile",
            fix="import the framework before profiling",
        )
    return jax
