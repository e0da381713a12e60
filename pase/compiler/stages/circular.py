"""Prices the circular schedule: all stages in one program, in which each iteration takes as long as the slowest stage.

``pase.backends.jax.pipeline.circular`` runs it. All stages have the same split and the same number of blocks. What
comes before and after the blocks runs before and after the scan, with its micro-batches divided over the ranks, which
all hold its parameters. JAX moves gathers of weights out of the scan, so that they run once per step even if gradients
are summed in each micro-batch. The step is therefore one sum over nodes and edges, with a separate weight for each kind
of seconds, and one search finds the split with the least sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pase.compiler.stages.features import direction, running
from pase.compiler.stages.menu import StageRole, StageSplit, StageTables
from pase.machine import mesh_from
from pase.once import once
from pase.pipeline.cuts import CutProblem, Cuts, StageBytes
from pase.pipeline.simulate import simulate
from pase.pipeline.types import Schedule
from pase.search import Solution

if TYPE_CHECKING:
    from pase.compiler.stages.search import StageMenu

__all__ = ["CircularStages", "circular_bound_s", "circular_problem", "circular_staged"]

_HELD_AN_ITERATION = 2
"""How many copies of the activations that cross between stages are held per iteration in addition to residuals, and how
many of their gradients: one that is fed to the scan, and one that its iterations return."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CircularStages:
    """The stages of a circular schedule. split: that of every stage. problem: its times and bytes."""

    split: StageSplit
    problem: CutProblem
    cuts: Cuts


def circular_staged(
    menu: StageMenu, s: Schedule, below: float, prices: tuple[float, ...]
) -> tuple[CircularStages | None, bool]:
    """Return (the best split under the schedule, if it takes less than ``below``; whether any fits).

    prices: of bytes, as multiples of the step for all of a device's memory.
    """
    n, rest = divmod(menu.places.blocks, s.stages)
    if rest or len(set(menu.groups)) > 1:
        return None, True
    best, fits, counts = None, False, np.full(s.stages, n)
    for t in _tables(menu):
        for _, found in _priced(menu, s, t, prices):
            w = t.split_by(_ROLE, found.choice)
            problem = circular_problem(menu, s, w)
            rows, room = problem.memory_rows
            if len(rows) and (rows @ counts > room * (1 + 1e-9)).any():
                continue
            fits, done = True, simulate(s, problem.times(counts))
            done = replace(done, busy=_busy_s(menu, s, w))
            if done.step_s < below:
                below = done.step_s
                cuts = Cuts(counts=(n,) * s.stages, simulated=done, bound=done.step_s, simulations=1)
                best = CircularStages(split=w, problem=problem, cuts=cuts)
    return best, fits


def _busy_s(menu: StageMenu, s: Schedule, w: StageSplit) -> np.ndarray:
    """Seconds that each rank works, float64 [ranks]: its stage on all micro-batches, both ends on its part of them."""
    p = menu.problem(s, (w,) * s.stages)
    each: np.ndarray = p.each.full * (menu.places.blocks / s.stages) + p.fixed.full / s.ranks
    return s.micro_batches * each


def circular_bound_s(menu: StageMenu, s: Schedule, prices: tuple[float, ...] = ()) -> float:
    """Return a lower bound on the seconds of any split under the schedule, within the limit.

    prices: as in ``circular_staged``. For every price of a byte, seconds plus the price of the bytes is a sum whose
    least value is known; a split that fits pays for at most the limit.
    """
    sent = (_iterations(s) + 2 * _handed(s)) * sum(menu.least_send_s()) if s.ranks > 1 else 0.0
    crossing = _HELD_AN_ITERATION * _iterations(s) * sum(menu.least_bytes(menu.places.crossing))
    least = np.inf
    for t in _tables(menu):
        room = float(menu.limits.min()) - t.least_buffers(_ROLE) - crossing
        if room >= 0:  # otherwise none of its splits fits
            found = _priced(menu, s, t, prices)
            least = min(least, max(float(x.bound) - (price * room if price else 0.0) for price, x in found))
    return sent + least


@once
def _priced(
    menu: StageMenu, s: Schedule, t: StageTables, prices: tuple[float, ...]
) -> tuple[tuple[float, Solution], ...]:
    """Return (price of a byte, the split with the least sum of seconds and priced bytes), the price 0 first.

    The bound and the search read the same ones. prices: as in ``circular_staged``.
    """
    free, limit = t.least_sum(*_weights(s)), float(menu.limits.min())
    more = tuple(p * float(free.bound) / limit for p in prices if free.bound)
    return (0.0, free), *((price, t.least_sum(*_weights(s, price))) for price in more)


def _tables(menu: StageMenu) -> list[StageTables]:
    return [t.in_one_program() for t in menu.tables]


_ROLE = StageRole(first=True, last=True)


def _iterations(s: Schedule) -> int:
    return s.micro_batches + s.ranks - 1


def _handed(s: Schedule) -> float:
    """Micro-batches that the first rank receives from the others, before the blocks. As many leave the last rank."""
    return s.micro_batches * (1 - 1 / s.ranks)


def _weights(s: Schedule, price: float = 0.0) -> tuple[tuple[np.ndarray, float, float], ...]:
    """Return (features, weight of both ends, weight of all blocks): a rank's seconds, and its bytes at a price."""
    iterations, part = _iterations(s), s.micro_batches / s.ranks
    return (
        (running(forward=1, input=1, weight=1) + price * direction(kept=1), part, iterations / s.ranks),
        (direction(before=1, sums=1, after=1) + price * direction(static=1), 1.0, 1 / s.ranks),
    )


def circular_problem(menu: StageMenu, s: Schedule, w: StageSplit) -> CutProblem:
    """Return the times and bytes if every stage has this split."""
    splits = (w,) * s.stages
    p = menu.problem(s, splits)
    f, part, (send, back) = p.fixed, s.micro_batches / s.ranks, p.fixed.send.max(axis=1, initial=0.0)
    assert p.hoisted is not None and p.bytes_fixed is not None
    handed = 2 * _handed(s)
    ends = [
        menu.gradient_bytes(w, name)
        for name, parts in menu.places.parts.items()
        if _of_ends(menu, name, parts)
    ]
    mesh = mesh_from(f"stage={s.ranks},inner={menu.mesh.devices}", s.ranks * menu.mesh.devices)
    model = menu.models[menu.groups[0]]
    summed = float(model.collective("all_reduce", mesh, 1, sum(ends))) if sum(ends) and s.ranks > 1 else 0.0
    none = np.zeros(s.stages)
    return replace(
        p,
        fixed=replace(
            f,
            forward=none + send,  # the next iteration waits for what this one sends
            input=none + back,
            weight=none,
            recompute=none,
            send=np.zeros((2, s.stages - 1)),
            before=f.before + part * f.forward + handed * send,
            after=f.after
            - menu.tied_after(s, splits)
            + summed
            + handed * back
            + part * (f.recompute + f.input + f.weight),
        ),
        hoisted=replace(
            p.hoisted, slow=np.ones(s.ranks)
        ),  # a scan waits for all of its operands, and returns all sums
        bytes_fixed=StageBytes(
            held=p.bytes_fixed.held + part * p.bytes_fixed.kept,
            kept=np.full(s.stages, _HELD_AN_ITERATION * sum(menu.sent_bytes(w))),
            for_weights=none,
        ),
    )


def _of_ends(menu: StageMenu, name: str, parts: tuple[str, ...]) -> bool:
    """Whether it is a parameter that is read before or after the blocks."""
    return menu.graph.node[name].kind == "parameter" and parts != ("block",)
