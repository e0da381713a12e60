"""Strategies of a model on a machine, and the step times of their programs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.netlab.models import LOOPED, RANKS, model

if TYPE_CHECKING:
    from pase.backends.jax.spmd.lower import Lowering

__all__ = ["ALONE", "PIPELINE", "ROUNDS", "Cell", "Running", "in_turn", "planned", "timed"]

ALONE = "no split"
"""Every host does the whole step; a strategy has to be faster than that."""
PIPELINE = "pipeline"
BASELINES = (
    "ours",
    "data_parallel",
    "fsdp",
    "owt",
    "expert",
    "megatron",
    ALONE,
    *(f"{PIPELINE} {n}" for n in RANKS),
)
ROUNDS = 3
DISTURBED, TRIES = 0.2, 3
"""How many cores other programs may take while a run is traced, and the number of tries."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One strategy of one model, as a layout on disk, and the predicted time of its step."""

    model: str
    batch: int
    strategy: str
    layout: str
    mesh: tuple[int, ...]
    predicted_s: float
    predicted_compute_s: float
    same_as: str | None = None
    """Another strategy of this model that is identical to this one; it is measured once."""
    lowering: Lowering = "annotated"


def planned(name: str, batch: int, devices: int, machine: Path, folder: Path, stamp: str = "") -> list[Cell]:
    """Writes layouts of our strategy, the cheapest one of every baseline and the unsharded one, priced on the machine
    file, to a folder; returns them cheapest first. A model with a loop over its layers also has ours in stages, for
    each number in ``RANKS``: `auto` takes the cheapest of ours. stamp: plans with the same stamp are read instead."""
    from pase.api import Plan
    from pase.compiler.compilation import compile_model
    from pase.compiler.meshes.baselines import price_baselines
    from pase.compiler.meshes.plans import plan_of
    from pase.compiler.problem.options import CompileOptions
    from pase.machine import load as load_machine

    kept = folder / f"{name}_{batch}.cells.json"
    if stamp and kept.exists() and (before := json.loads(kept.read_text()))["stamp"] == stamp:
        return [Cell(**{**c, "mesh": tuple(c["mesh"])}) for c in before["cells"]]
    m = model(name, batch)
    options = CompileOptions(devices=devices, machine=load_machine(machine))
    c = compile_model(m.loss_fn, m.params, (m.batch,), options)
    whole = {n.name: np.full(len(c.plan.mesh.sizes), -1, dtype=np.int8) for n in c.problem.graph.nodes}
    made = [(b.name, b.strategy, b.mesh) for b in c.given or price_baselines(c.problem)[0]]
    made.append((ALONE, whole, c.plan.mesh))
    found = [("ours", c.plan)]
    found += [(n, plan_of(c.problem, strategy, mesh, c.plan.model, c.traced)) for n, strategy, mesh in made]
    for ranks in RANKS if name in LOOPED else ():  # one program: these hosts are processes
        staged = replace(options, pipeline=ranks, stage_schedule="circular")
        found.append((f"{PIPELINE} {ranks}", compile_model(m.loss_fn, m.params, (m.batch,), staged).plan))
    cells: list[Cell] = []
    seen: dict[str, Any] = {}
    for strategy, plan in sorted(found, key=lambda pair: (pair[1].cost, pair[0] != "ours")):
        method = next((x for x in BASELINES if strategy.startswith(x)), None)
        if method is None or any(c.strategy == method for c in cells):
            continue  # sorted: the first of a baseline is its cheapest
        same = next((s for s, other in seen.items() if _same(plan, other)), None)
        path = folder / f"{name}_{batch}_{method}.json"
        Plan.of(plan).save(path)
        cells.append(
            Cell(
                model=name,
                batch=batch,
                strategy=method,
                layout=str(path),
                mesh=plan.mesh.sizes if plan.pipeline is None else (plan.pipeline.degree, *plan.mesh.sizes),
                predicted_s=plan.cost,
                predicted_compute_s=plan.compute,
                same_as=same,
                lowering="annotated" if plan.pipeline is None else "manual",
            )
        )
        if same is None:
            seen[method] = plan
    kept.write_text(json.dumps({"stamp": stamp, "cells": [asdict(c) for c in cells]}))
    return cells


def _same(a: Any, b: Any) -> bool:
    """Returns whether everything is split in the same way over a mesh of the same sizes; axis names may differ.
    Pipelines are never equal to other strategies here."""
    if a.pipeline is not None or b.pipeline is not None:
        return False
    if not any(split for p in (a, b) for split in map(_taken, p.strategy.values())):
        return True  # neither splits anything, so the mesh does not matter
    if a.mesh.sizes != b.mesh.sizes:
        return False
    number = [{n: i for i, n in enumerate(p.mesh.names)} for p in (a, b)]
    x, y = (
        {
            node: {d: [axes[n] for n in names] for d, names in split.items() if names}
            for node, split in p.strategy.items()
        }
        for p, axes in zip((a, b), number, strict=True)
    )
    return x == y


def _taken(split: Any) -> bool:
    return any(names for names in split.values())


class Running:
    """A cell's step on this process, compiled and warm. All processes call it in the same way."""

    def __init__(self, cell: Cell) -> None:
        import jax
        import optax

        from pase import load

        m = model(cell.model, cell.batch)
        params, batch = m.init(0)
        jp = load(cell.layout).bind(m.loss_fn, m.params, m.batch).jax
        optimizer = optax.adam(1e-3)
        began = time.perf_counter()
        params, self.batch = jp.device_put(params, batch)
        state = jax.jit(optimizer.init, out_shardings=jp.state_shardings(optimizer))(params)
        self.step = (
            jp.train_step(optimizer, lowering=cell.lowering).lower(params, state, self.batch).compile()
        )
        self.compile_s = time.perf_counter() - began
        self.held, self.times = (params, state), list[float]()
        self.forget()
        self.run(2)
        self.forget()

    def forget(self) -> None:
        """Resets the measurements."""
        self.times.clear()
        self.cpu_s = self.busy_s = 0.0

    def run(self, steps: int, traces: Path | None = None, late_s: float = 0.0) -> None:
        """Runs steps and waits for each, under the profiler if a folder is given. late_s: how long this process idles
        before it launches each step, like a host that prepares its batch.

        All hosts start together. Otherwise a step that sends nothing could have this machine's cores to itself while
        the others do something else.
        """
        import jax
        from jax.experimental import multihost_utils

        from pase.calibrate.here import busy_s
        from pase.replay import profile

        multihost_utils.sync_global_devices("steps")
        with profile(traces) if traces else nullcontext() as run:
            worked, busy = time.process_time(), busy_s()
            for i in range(steps):
                with run.step(i) if run is not None else nullcontext():
                    start = time.perf_counter()
                    time.sleep(late_s)
                    *held, loss = self.step(*self.held, self.batch)
                    self.held = (held[0], held[1])
                    jax.block_until_ready((held, loss))
                    self.times.append(time.perf_counter() - start)
            self.cpu_s += time.process_time() - worked
            self.busy_s += busy_s() - busy

    @property
    def measured(self) -> dict[str, Any]:
        """Returns steps_s: each until the last host is done; cpu_s: CPU time of this process per step, including
        sending; others_cores: how many of this machine's cores other programs took (all hosts use the first host's
        value)."""
        from jax.experimental import multihost_utils

        own = np.array([self.cpu_s, self.busy_s, *self.times])
        of_all = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, len(own))
        steps_s = of_all[:, 2:].max(axis=0)
        return {
            "steps_s": steps_s.tolist(),
            "compile_s": self.compile_s,
            "cpu_s": self.cpu_s / max(len(self.times), 1),
            "others_cores": float((of_all[0, 1] - of_all[:, 0].sum()) / steps_s.sum()),
        }


def timed(
    cell: Cell,
    repeats: int,
    traces: Path | None = None,
    late_s: float = 0.0,
) -> dict[str, Any]:
    """Returns the seconds of each step of one cell. traces: a folder in which the steps are also profiled. late_s: see
    ``run``. If other programs disturb the steps, they run again, up to a number of tries."""
    running = Running(cell)
    for _ in range(TRIES):
        running.forget()
        running.run(repeats, traces, late_s)
        made = running.measured
        if made["others_cores"] <= DISTURBED:
            break
    return made


def in_turn(
    cells: Sequence[tuple[Cell, int]], rounds: int, begin: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Runs the steps of several cells, some of each in every round, so that drift during a run affects all of them.

    begin: called with the number of each cell before it is compiled.
    """
    running = []
    for i, (cell, _) in enumerate(cells):
        begin(i)
        running.append(Running(cell))
    for _ in range(rounds):
        for r, (_, repeats) in zip(running, cells, strict=True):
            r.run(-(-repeats // rounds))
    return [r.measured for r in running]
