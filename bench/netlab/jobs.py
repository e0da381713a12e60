"""Jobs for the hosts: calibration of their network, and lists of cells to measure."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.netlab.launch import on_every_host, port
from bench.netlab.net import LabError, Network

__all__ = ["calibrated", "results_of"]


def calibrated(network: Network, folder: Path, budget_s: float) -> Path:
    """The machine file of this network, measured by ``pase calibrate`` on its hosts; taken up where one is there."""
    out = folder / f"{network.topology.slug}.toml"
    if out.exists():
        return out
    _seeded(out, network.topology.hosts)
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
        # Two cores under four hosts: a wide spread is no news here, and is recorded.
        return ["-m", "pase.cli", "calibrate", "-o", str(out), "--max-spread", "3", *team, *more]

    on_every_host(network, argv, folder / f"logs_{network.topology.slug}", timeout_s=6 * budget_s + 300)
    return out


def _seeded(out: Path, hosts: int) -> None:
    """A journal for this network with the compute samples of another with as many hosts: they are the same hosts,
    and only the collectives are its own."""
    journal = out.with_name(out.name + ".journal")
    other = next(iter(sorted(out.parent.glob(f"{hosts}hosts_*.toml.journal"))), None)
    if journal.exists() or other is None or "p" in out.name.partition("hosts")[0]:
        return
    journal.write_text("".join(line for line in other.open() if " over [" not in line))


def results_of(
    network: Network, folder: Path, name: str, cells: Sequence[Mapping[str, Any]], *, kind: str = "steps",
    timeout_s: float = 900.0, **more: Any,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """key -> what was measured (or {"failed": why}) of each cell, all in one program where none of them fails."""
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / f"{name}.jsonl"
    results.unlink(missing_ok=True)
    done: dict[str, dict[str, Any]] = {}
    while True:
        left = [c for c in cells if c["key"] not in done]
        if not left:
            return done
        job = folder / f"{name}.job.json"
        coordinator = f"{network.address(0)}:{port()}"
        told = {
            "kind": kind,
            "coordinator": coordinator,
            "hosts": network.topology.hosts,
            "results": str(results),
        }
        job.write_text(json.dumps({**told, "cells": left, **more}))
        why = "died"
        try:
            on_every_host(
                network,
                lambda i, job=job: ["-m", "bench.netlab.worker", str(job), str(i)],
                folder / f"logs_{name}",
                timeout_s=timeout_s,
            )
        except LabError as e:
            why = str(e)
        begun = None
        for line in results.read_text().splitlines() if results.exists() else ():
            row = json.loads(line)
            if "begun" in row:
                begun = row["key"]
            else:
                done[row["key"]] = row
        stuck = begun if begun not in done else None
        if stuck is None and any(c["key"] not in done for c in cells):
            raise LabError(f"{name}: no cell can be begun: {why}")
        if stuck is not None:
            print(f"{name}: {stuck} failed: {why.splitlines()[-1]}", file=sys.stderr)
            done[stuck] = {"key": stuck, "failed": why[-600:]}
