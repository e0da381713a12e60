"""Leaves devices idle if a step on fewer of them is faster.

37 devices divide none of a model's sizes, so that all of them would do the same work. The best plan for 32 of them is
then many times as fast. Which numbers are worth a search follows from the plan for all devices: it gives the time of
each layer's work, and the sizes of the layer say how many devices can share it evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pase.errors import Infeasible
from pase.frontends.blocks import PADDINGS
from pase.ir import Remark

if TYPE_CHECKING:
    from pase.compiler.compilation import Compiled
    from pase.compiler.problem.options import CompileOptions
    from pase.compiler.problem.problem import Progress
    from pase.plan.types import PlanData

__all__ = ["ALL_DEVICES", "or_fewer", "repeated_work"]

ALL_DEVICES = "all_devices"
"""The entry of ``PlanData.baselines`` for the best plan that leaves no device idle."""

_REPEATED = 1.05
"""How many times the step's work the devices must do together, before fewer devices are searched."""
_WASTED = 1.5
"""The same, from which on a plan for all devices says so."""
_FASTER = 0.95
"""The step of fewer devices, relative to that of all, from which on devices are left idle."""
_MOST_SEARCHES = 3


def or_fewer(
    made: Compiled, options: CompileOptions, compiled: Callable[[CompileOptions], Compiled], say: Progress
) -> Compiled:
    """Return what was compiled for all devices, or for fewer of them if that is at least 5% faster.

    A plan of either kind says in a remark what it leaves unused, and which batch would divide.

    compiled: compiles with other options.
    """
    plan = made.plan
    if plan.pipeline is not None or plan.unit != "s" or repeated_work(plan) <= _REPEATED:
        return made
    if options.idle == "none" or options.mesh is not None or made.problem.graph.fixed:
        return _or_warned(made)
    best = made
    for count, least_s in _promising(plan):
        if least_s >= _FASTER * best.plan.cost and best.plan.misfit is None:
            break
        say(f"on {count} of the {plan.devices} devices")
        try:
            fewer = compiled(replace(options, devices=count))
        except Infeasible:
            continue
        if (fewer.plan.misfit is not None, fewer.plan.cost) < (
            best.plan.misfit is not None,
            best.plan.cost * (_FASTER if best is made else 1),
        ):
            best = fewer
    if best is made:
        return _or_warned(made)
    chosen = replace(
        best.plan,
        idle=plan.devices - best.plan.devices,
        baselines={**best.plan.baselines, ALL_DEVICES: plan.cost},
        baseline_memory=(
            {**best.plan.baseline_memory, ALL_DEVICES: plan.memory.total} if best.plan.baseline_memory else {}
        ),
    )
    return replace(best, plan=_noted(chosen, _idle_text(chosen, plan)))


def repeated_work(plan: PlanData) -> float:
    """Return how many times the step's work the devices of a plan without stages do together: 1 if none is repeated."""
    done = sum(n.cost.compute for n in plan.nodes) * plan.devices
    needed = sum(seconds for seconds, _ in _work(plan))
    return done / needed if needed else 1.0


def _work(plan: PlanData) -> Iterator[tuple[float, int]]:
    """Yield the seconds of each node on one device, and the number of points that devices can share."""
    axes = plan.mesh.by_name
    for n in plan.nodes:
        ways = math.prod(axes[a] for split in n.split.values() for a in split)
        yield n.cost.compute * ways, math.prod(n.sizes.values())


def _promising(plan: PlanData) -> list[tuple[int, float]]:
    """Return smaller numbers of devices with the least seconds that a step's work takes on them, most promising first.

    Divisors of the plan's number are left out: its meshes include those on which the rest repeats the work.
    """
    work = list(_work(plan))
    counts = (n for n in range(plan.devices - 1, 1, -1) if plan.devices % n)
    found = [(n, _least_s(work, n)) for n in counts]
    return sorted(found, key=lambda pair: (pair[1], pair[0]))[:_MOST_SEARCHES]


def _or_warned(made: Compiled) -> Compiled:
    """Return it with a remark if its devices repeat each other's work and do not divide the batch."""
    plan, times = made.plan, repeated_work(made.plan)
    if times < _WASTED or not (batches := _batches_text(plan)):
        return made
    said = f"the {plan.devices} devices together do {times:.3g} times the step's work"
    return replace(made, plan=_noted(plan, f"{said}{batches}"))


def _least_s(work: Sequence[tuple[float, int]], count: int) -> float:
    """Return the least seconds that the work takes on a number of devices, if what they divide is shared evenly."""
    return sum(seconds / math.gcd(count, points) for seconds, points in work)


def _noted(plan: PlanData, what: str) -> PlanData:
    return replace(plan, noted=(*plan.noted, Remark("assumed", what)))


def _idle_text(plan: PlanData, whole: PlanData) -> str:
    idle, offered = plan.idle, whole.devices
    left = f"{idle} of the {offered} devices {'is' if idle == 1 else 'are'} left idle"
    if whole.misfit is not None and plan.misfit is None:
        return f"{left}: no plan for all of them fits{_batches_text(whole)}"
    times = whole.cost / plan.cost
    return (
        f"{left}: the best plan for all of them takes {times:.3g} times as long, because they would repeat each "
        f"other's work{_batches_text(whole)}"
    )


def _batches_text(plan: PlanData) -> str:
    """Name the batches next to the plan's that all devices divide."""
    examples = None if plan.work is None else plan.work.examples
    if examples is None or examples % plan.devices == 0:
        return ""
    least = examples // plan.devices * plan.devices
    sizes = [str(n) for n in (least, least + plan.devices) if n]
    pads = (
        ""
        if plan.padding or plan.traced is None or plan.traced.frontend not in PADDINGS
        else ", and uneven='padded' pads it"
    )
    return (
        f"; a batch of {' or '.join(sizes)} instead of {examples} would divide over all {plan.devices}{pads}"
    )
