"""Starts one program on every host, waits for all of them, and ends them together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.netlab.net import LabError, Network

__all__ = ["ROOT", "on_every_host", "port"]

ROOT = Path(__file__).parents[2]
_next_port = 41000


def port() -> int:
    """Returns a port on which no earlier program of this run listened."""
    global _next_port
    _next_port += 1
    return _next_port


def on_every_host(
    network: Network,
    argv: Callable[[int], list[str]],
    logs: Path,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    watch: Callable[[], None] | None = None,
) -> None:
    """Runs ``python argv(i)`` on each host i and waits. Output goes to logs/host<i>.log. watch: called meanwhile.

    Raises LabError with the end of the log of the first program that fails, or on a timeout; the others are killed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    hosts = network.topology.hosts
    more = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    # With another bandwidth the program is the same.
    more |= {
        "JAX_COMPILATION_CACHE_DIR": str(logs.parent / "xla_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    more |= env or {}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for i in range(hosts):
            with (logs / f"host{i}.log").open("ab") as log:
                command = network.command(i, [sys.executable, *argv(i)])
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env={**os.environ, **more},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        _wait(started, logs, timeout_s, watch)
    finally:
        for p in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(p.pid, signal.SIGKILL)
            p.wait()


def _wait(
    started: list[subprocess.Popen[bytes]], logs: Path, timeout_s: float, watch: Callable[[], None] | None
) -> None:
    until = time.monotonic() + timeout_s
    while any(p.poll() is None for p in started):
        failed = [i for i, p in enumerate(started) if p.poll() not in (None, 0)]
        if failed:
            # The first program that fails makes the others fail, so only its error has the reason. Wait for it.
            time.sleep(1.0)
            break
        if time.monotonic() > until:
            raise LabError(f"not done after {timeout_s:.0f} s; see {logs}")
        time.sleep(0.1)
        if watch is not None:
            watch()
    for i, p in enumerate(started):
        if p.poll() not in (None, 0):
            tail = (logs / f"host{i}.log").read_text(errors="replace")[-1500:]
            raise LabError(f"host {i} ended with status {p.returncode}:\n{tail}")
