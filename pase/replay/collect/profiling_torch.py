"""Traces a PyTorch program with PyTorch's profiler (Kineto), for ``pase.replay.collect.profiling``.

Each process writes one Chrome trace, with the kernels of its devices, if any, and the collectives of NCCL and gloo with
their sizes. Iterations end with the step of the first optimizer, unless the program marks them itself.
"""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["StepHook", "TorchTrace", "world"]

_MARK = "ProfilerStep#"
_TWO = (
    "pase profile records this program with torch.profiler, which can record only once at a time: run it without the "
    "program's own profiler, or give that one's trace to pase diagnose"
)
_ALONE = (
    "pase profile: this program computes on the CPU, in one process, so its trace has no device op and no collective: "
    "pase replay and pase diagnose have nothing to replay; open it in Perfetto (ui.perfetto.dev)"
)


def _refused(_: object) -> None:
    raise RuntimeError(_TWO)


def world() -> tuple[int, int]:
    """Returns (rank, number of processes), from the process group or else from torchrun's environment."""
    dist = sys.modules["torch"].distributed
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_rank()), int(dist.get_world_size())
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return (int(rank), int(size)) if rank.isdigit() and size.isdigit() else (0, 1)


class TorchTrace:
    """Runs torch.profiler. ``mark`` begins an iteration, and ``stop`` writes the trace to ``path``."""

    def __init__(self, path: Path) -> None:
        torch = sys.modules["torch"]
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.path = path
        # Shapes give the bytes of collectives. Stacks are expensive, and replay does not need them.
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._open: AbstractContextManager[object] | None = None
        self._number = -1
        try:
            self._profiler.start()
        except RuntimeError as e:  # "Profiler is already enabled on this thread"
            raise RuntimeError(_TWO) from e
        self._start = torch.profiler.profile.start
        torch.profiler.profile.start = _refused
        if len(activities) == 1 and world()[1] == 1:
            print(_ALONE, file=sys.stderr)

    def mark(self, number: int) -> None:
        """Begins iteration ``number``, which lasts until the next mark or ``unmark``."""
        self.unmark()
        self._number = number
        opened = sys.modules["torch"].profiler.record_function(f"{_MARK}{number}")
        opened.__enter__()
        self._open = opened

    def unmark(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def stop(self) -> None:
        sys.modules["torch"].profiler.profile.start = self._start
        self._profiler.stop()
        cut = self._number if self._open is not None else None
        self.unmark()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Under a name that no reader takes for a trace, until it is whole.
        written = self.path.with_name(f"{self.path.name}.writing.gz")
        self._profiler.export_chrome_trace(str(written))
        if cut is not None:
            _rename(written, f'"{_MARK}{cut}"', '"after the last step"')
        written.replace(self.path)


def _rename(path: Path, old: str, new: str) -> None:
    """Renames the mark that the profiler may have written after the last step, where no iteration begins."""
    fresh = path.with_name(f"{path.name}.renamed.gz")
    with gzip.open(path, "rt", encoding="utf-8") as f, gzip.open(fresh, "wt", encoding="utf-8") as out:
        for line in f:
            out.write(line.replace(old, new))
    fresh.replace(path)


class StepHook:
    """Calls ``then()`` after every step of the optimizer that steps first, until remove()."""

    _all: ClassVar[list[StepHook]] = []
    _registered = False

    def __init__(self, then: Callable[[], None]) -> None:
        self._then, self._first = then, 0
        StepHook._all.append(self)
        if not StepHook._registered:
            # Register one hook permanently: PyTorch iterates over its hooks while they run, so a hook must not add or
            # remove any.
            StepHook._registered = True
            sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(_stepped)

    def remove(self) -> None:
        if self in StepHook._all:
            StepHook._all.remove(self)

    def after(self, optimizer: Optimizer) -> None:
        self._first = self._first or id(optimizer)
        if id(optimizer) == self._first:
            self._then()


def _stepped(optimizer: Optimizer, *_: object) -> None:
    for hook in list(StepHook._all):
        hook.after(optimizer)
