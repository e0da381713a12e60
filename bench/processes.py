"""Measures rows in their own processes with limits of CPU time and memory; a crash or a hang is an error in its row."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["children_s", "cpu_of", "forks_of", "row_apart", "rows_apart"]

IDLE = 10
"""A process that stays below its limit of CPU time is killed after this many times the limit in wall time. It may only
be waiting on a busy machine, which must not count as a failure, but it may also wait forever."""
TOGETHER = 25
"""Cases of one child, which takes about a second to start and keeps what it compiled."""
QUIET_S = 900
"""A child without a message for this many seconds is killed even if it uses no CPU time: it may wait forever."""


def children_s() -> float:
    """Returns the CPU seconds of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def forks_of(modules: Sequence[str]) -> Any:
    """Returns a context whose processes are forks of a server that has only imported these modules."""
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
    """Runs a row in the child process. Its output goes to the file ``said``, and its row as JSON to ``answer``."""
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
    """Returns ``row(*args)`` with its CPU seconds as ``cpu_s``, or ``{"error": …}`` if its process failed.

    row: a function of a module that returns a JSON object. cpu_s: the limit of CPU time in seconds, which the system
    enforces. memory: the limit of the address space in bytes; None for no limit.
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


def _several(row: Callable[..., Any], cases: Sequence[tuple[Any, ...]], answer: Any, said: str) -> None:
    """Runs several rows in the child process, and announces each before it starts."""
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    gc.freeze()
    gc.set_threshold(200_000)
    for case in cases:
        answer.send(True)
        answer.send(row(*case))


def cpu_of(pid: int) -> float:
    """Returns the CPU seconds that a process has used."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _heard(child: Any, pipe: Any, cpu_s: float) -> Any:
    """Returns the next message of a child. Raises EOFError if it died, TimeoutError if it took too long."""
    began, quiet = cpu_of(child.pid), 0.0
    while not pipe.poll(2):
        quiet += 2
        if cpu_of(child.pid) - began > cpu_s or quiet > QUIET_S:
            child.kill()
            raise TimeoutError
    return pipe.recv()


def rows_apart(
    processes: Any,
    row: Callable[..., dict[str, Any]],
    cases: Sequence[tuple[Any, ...]],
    *,
    cpu_s: float,
    alone: Callable[[tuple[Any, ...]], bool] = lambda case: False,
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields (case, ``row(*case)``) in order, with several cases in each child process.

    If a child dies or takes too long, its case has ``{"end": "aborted" or "too long", "message": …}``, and the next
    cases run in another child. cpu_s: the limit of CPU time for each case. alone: whether a case needs its own child.
    """
    left = list(cases)
    while left:
        apart = [i for i, case in enumerate(left[:TOGETHER]) if alone(case)]
        together = left[: max(apart[0], 1)] if apart else left[:TOGETHER]
        with tempfile.NamedTemporaryFile() as said:
            ours, theirs = processes.Pipe(duplex=False)
            child = processes.Process(target=_several, args=(row, together, theirs, said.name))
            child.start()
            theirs.close()
            begun = False
            try:
                for case in together:
                    begun = _heard(child, ours, cpu_s)
                    made = _heard(child, ours, cpu_s)
                    del left[0]
                    yield case, made
            except (EOFError, TimeoutError) as e:
                child.join()
                words = Path(said.name).read_text(errors="replace")
                if not begun:
                    raise RuntimeError(f"a child ended before its first case:\n{words[-2000:]}") from e
                why = [line for line in words.splitlines() if "Check failed" in line or line.startswith("F0")]
                message = f"exit {child.exitcode}: {(why or [words[-500:]])[0][-500:]}"
                yield (
                    left.pop(0),
                    {"end": "too long" if isinstance(e, TimeoutError) else "aborted", "message": message},
                )
            finally:
                child.kill()
                child.join()
