"""Strategies of a model on a machine, and the step times of their programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.netlab.models import model

__all__ = ["Cell", "Running", "in_turn", "plans", "timed"]

METHODS = ("data_parallel", "fsdp", "owt", "megatron")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One strategy of one model, as a layout on disk; what its step is predicted to take."""

    model: str
    batch: int
    strategy: str
    layout: str
    mesh: tuple[int, ...]
    predicted_s: float
    predicted_compute_s: float
    same_as: str | None = None
    """Another strategy of this model that is this one; it is measured once."""


def plans(name: str, batch: int, devices: int, machine: Path, folder: Path) -> list[Cell]:
    """Ours and every method's cheapest, priced on the machine file, as layouts in a folder; cheapest first."""
    from pase.api import compare
    from pase.machine import load as load_machine

    m = model(name, batch)
    found = compare(m.loss_fn, m.params, m.batch, devices=devices, machine=load_machine(machine))
    cells: list[Cell] = []
    seen: dict[str, Any] = {}
    for strategy, plan in found:
        method = next((x for x in METHODS if strategy.startswith(x)), "ours" if strategy == "pase" else None)
        if method is None or any(c.strategy == method for c in cells):
            continue  # found is sorted: the first of a method is its cheapest
        same = next((s for s, other in seen.items() if _same(plan, other)), None)
        path = folder / f"{name}_{batch}_{method}.json"
        plan.save(path)
        cells.append(
            Cell(
                model=name,
                batch=batch,
                strategy=method,
                layout=str(path),
                mesh=plan.mesh.sizes,
                predicted_s=plan.cost,
                predicted_compute_s=plan.compute,
                same_as=same,
            )
        )
        if same is None:
            seen[method] = plan
    return cells


def _same(a: Any, b: Any) -> bool:
    """The same split of everything over a mesh of the same sizes; axes may be named otherwise."""
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


class Running:
    """A cell's step on this process, compiled and warm. All processes call it alike."""

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
        self.step = jp.train_step(optimizer).lower(params, state, self.batch).compile()
        self.compile_s = time.perf_counter() - began
        self.held, self.times = (params, state), list[float]()
        self.run(2)
        self.times.clear()

    def run(self, steps: int, traces: Path | None = None) -> None:
        """Steps, each waited for; under the profiler where a folder is given."""
        import jax

        from pase.replay import profile

        with profile(traces) if traces else nullcontext() as run:
            for i in range(steps):
                with run.step(i) if run is not None else nullcontext():
                    start = time.perf_counter()
                    *held, loss = self.step(*self.held, self.batch)
                    self.held = (held[0], held[1])
                    jax.block_until_ready((held, loss))
                    self.times.append(time.perf_counter() - start)


def timed(cell: Cell, repeats: int, traces: Path | None = None) -> dict[str, Any]:
    """Seconds of each step of one cell; traces: a folder in which they are profiled as well."""
    running = Running(cell)
    running.run(repeats, traces)
    return {"steps_s": running.times, "compile_s": running.compile_s}


def in_turn(
    cells: Sequence[tuple[Cell, int]], rounds: int, begin: Callable[[int], None]
) -> list[dict[str, Any]]:
    """The steps of several cells, some of each in every round: what drifts in a run drifts under all of them.

    begin: told the number of each cell before it is compiled.
    """
    running = []
    for i, (cell, _) in enumerate(cells):
        begin(i)
        running.append(Running(cell))
    for _ in range(rounds):
        for r, (_, repeats) in zip(running, cells, strict=True):
            r.run(-(-repeats // rounds))
    return [{"steps_s": r.times, "compile_s": r.compile_s} for r in running]
