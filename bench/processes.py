"""Rows of a bench, each in a process of its own with limits of CPU time and memory; one that dies or hangs says so."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["children_s", "forks_of", "row_apart"]

IDLE = 10
"""A process that has used no more than its limit of CPU time is ended after this many times as many seconds: on a busy
machine it waits for its turn, and the limit is not to be a verdict about that; but it may wait for ever."""


def children_s() -> float:
    """CPU seconds of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def forks_of(modules: Sequence[str]) -> Any:
    """Where processes come from: forks of one that has imported these modules, and done nothing else."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([__name__, *modules])
    return made


def _work(
    row: Callable[..., dict[str, Any]],
    args: tuple[Any, ...],
    cpu_s: int,
    memory: int | None,
    answer: Any,
    said: str,
) -> None:
    """The whole of a row's process. What it says goes to the file ``said``, its row to ``answer`` as JSON."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    made = row(*args)
    used = resource.getrusage(resource.RUSAGE_SELF)
    made["cpu_s"] = round(used.ru_utime + used.ru_stime, 1)
    answer.send_bytes(json.dumps(made).encode())


def row_apart(
    processes: Any,
    row: Callable[..., dict[str, Any]],
    *args: Any,
    cpu_s: int,
    memory: int | None = None,
) -> dict[str, Any]:
    """``row(*args)`` with ``cpu_s``, the CPU seconds that it took; ``{"error": …}`` if its process did not end well.

    cpu_s: the system ends it after so many seconds of CPU time. memory: bytes of address space, where limited. row: a
    function of a module, that returns what JSON holds.
    """
    ours, theirs = processes.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        one = processes.Process(target=_work, args=(row, args, cpu_s, memory, theirs, str(said)))
        one.start()
        theirs.close()
        try:
            if not ours.poll(cpu_s * IDLE):
                one.kill()
                return {"error": f"not done: waited {cpu_s * IDLE} s and used less than {cpu_s} s"}
            made: dict[str, Any] = json.loads(ours.recv_bytes())
            return made
        except EOFError:
            one.join()
            if one.exitcode == -signal.SIGXCPU:
                return {"error": f"not done within {cpu_s} s of CPU time"}
            return {"aborted": one.exitcode, "error": said.read_text(errors="replace")[-1000:]}
        finally:
            one.join()
