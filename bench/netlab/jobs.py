"""Jobs for the hosts: calibration of their network, and lists of cells to measure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.netlab.launch import on_every_host, port
from bench.netlab.net import LabError, Network, Topology
from bench.netlab.session import Session, rows_of

__all__ = ["calibrated", "results_of"]


def calibrated(network: Network, session: Session) -> Path:
    """Returns the machine file of this network, measured by ``pase calibrate`` on its hosts, or read if it exists."""
    folder = session.folder
    # Racks have three kinds of tables: of each level alone, and of both together.
    budget_s = session.calibrate_s * (1 if len(network.topology.racks) == 1 else 3)
    out = folder / f"{network.topology.slug}.toml"
    if out.exists():
        return out
    session.say(f"{network.topology.name}: calibrating, {budget_s:g} s and what the coarsest tables need")
    _seeded(out, network.topology)
    coordinator = f"{network.address(0)}:{port()}"

    def argv(i: int) -> list[str]:
        team = [
            "--coordinator",
            coordinator,
            "--processes",
            str(network.topology.hosts),
            "--process-id",
            str(i),
        ]
        more = ["--levels", network.topology.levels, "--dtypes", "float32", "--budget", f"{budget_s:g}s"]
        # Four hosts share two cores: a wide spread is expected here, and is recorded.
        return ["-m", "pase.cli", "calibrate", "-o", str(out), "--max-spread", "3", *team, *more]

    on_every_host(network, argv, folder / f"logs_{network.topology.slug}", timeout_s=6 * budget_s + 300)
    return out


def _seeded(out: Path, topology: Topology) -> None:
    """Writes a journal for this network with the compute samples of another one with the same number of hosts. The
    hosts are the same, with or without racks, and only the collectives differ. Hosts with their own cores are
    different."""
    journal = out.with_name(out.name + ".journal")
    others = sorted(out.parent.glob(f"{topology.hosts}hosts_*.toml.journal"))
    other = next((o for o in others if "acore" not in o.name), None)
    if journal.exists() or other is None or topology.hosts_a_core:
        return
    first, *samples = other.read_text().splitlines(keepends=True)
    head = json.loads(first)
    levels = (level.split("=") for level in topology.levels.split(","))
    head["fingerprint"]["levels"] = [[name, int(ways)] for name, ways in levels]
    kept = "".join(line for line in samples if " over [" not in line)
    journal.write_text(json.dumps(head) + "\n" + kept)


def results_of(
    network: Network,
    session: Session,
    name: str,
    cells: Sequence[Mapping[str, Any]],
    *,
    kind: str = "steps",
    stamp: str = "",
    timeout_s: float = 900.0,
    on_row: Callable[[dict[str, dict[str, Any]]], None] | None = None,
    **more: Any,
) -> dict[str, dict[str, Any]]:
    """Returns the measured row of each cell by key; all cells run in one program if none fails.

    A cell that fails has {"failed": why}, and a cell for which there was no time {"left_out": why}. Rows are written to
    a journal as they are measured. on_row: called with all rows so far, as they come.
    """
    session.folder.mkdir(parents=True, exist_ok=True)
    results = session.folder / f"{name}.jsonl"
    stamp = stamp or session.stamp()
    if not session.resume:
        results.unlink(missing_ok=True)
    wanted = {c["key"] for c in cells}
    failed: dict[str, dict[str, Any]] = {}
    lines = 0

    def so_far() -> dict[str, dict[str, Any]]:
        return {k: r for k, r in (rows_of(results, stamp)[0] | failed).items() if k in wanted}

    def watch() -> None:
        nonlocal lines
        now = results.read_text().count("\n") if results.exists() else 0
        if on_row is not None and now != lines:
            on_row(so_far())
        lines = now

    while True:
        done = so_far()
        left = [c for c in cells if c["key"] not in done]
        if not left or not session.has(0.0):
            if on_row is not None:
                on_row(done)
            return done | {c["key"]: {"key": c["key"], "left_out": "no time"} for c in left}
        job = session.folder / f"{name}.job.json"
        told = {
            "kind": kind,
            "coordinator": f"{network.address(0)}:{port()}",
            "hosts": network.topology.hosts,
            "results": str(results),
            "stamp": stamp,
            "until": min(session.until, 1e12),
        }
        job.write_text(json.dumps({**told, "cells": left, **more}))
        before, began = len(done), time.time()
        try:
            on_every_host(
                network,
                lambda i, job=job: ["-m", "bench.netlab.worker", str(job), str(i)],
                session.folder / f"logs_{name}",
                timeout_s=timeout_s,
                watch=watch,
            )
        except LabError as e:
            stuck = rows_of(results, stamp, since=began)[1]
            if stuck is None or stuck in so_far():
                raise LabError(f"{name}: no cell can be begun: {e}") from e
            session.say(f"{name}: {stuck} failed: {str(e).splitlines()[-1]}")
            failed[stuck] = {"key": stuck, "failed": str(e)[-600:]}
        else:
            if len(so_far()) == before and session.has(0.0):
                raise LabError(
                    f"{name}: the hosts ended without a result; see {session.folder / f'logs_{name}'}"
                )
