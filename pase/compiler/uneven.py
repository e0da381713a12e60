"""Dims that the devices do not divide: the model is searched with them padded, too, and the cheaper plan is taken.

A padded model is a program of its own, which computes the same numbers (``frontends/jax_padding``). So its price has
all that padding costs: work, bytes and memory of the padded extents, and the masks. A search starts with dims padded
for all devices; then every dim is padded no further than its plan splits it, and the search is repeated, until nothing
changes. Further searches start with dims padded for fewer devices, if that saves padding, and with each dim of the best
plan left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pase.errors import Infeasible
from pase.frontends.padding import as_padded, extents_to_pad
from pase.frontends.registry import Traced

if TYPE_CHECKING:
    from pase.compiler.compilation import Compiled
    from pase.compiler.problem import Progress
    from pase.plan.types import PlanData

__all__ = ["or_padded"]


def or_padded(
    whole: Compiled, compiled: Callable[[Traced], Compiled], micro_batches: int | None, say: Progress
) -> Compiled:
    """What was compiled as written, or with dims padded if that is cheaper. compiled: compiles another trace.
    micro_batches: those that the user asks for.

    The bound holds for the model as written and for every padding that was searched; the plan says how many
    (``provenance["paddings"]``). Raises PaseError if the model
    cannot be padded.
    """
    plan = whole.plan
    tried, seen = [whole], list[Mapping[int, int]]()

    def search(sizes: Mapping[int, int]) -> None:
        while sizes and sizes not in seen:
            say("with dims padded: " + ", ".join(f"{n} to {wide}" for n, wide in sizes.items()))
            seen.append(sizes)
            try:
                found = compiled(as_padded(whole.traced, sizes))
            except Infeasible:  # the padded model does not fit a limit; the one as written does
                return
            tried.append(found)
            sizes = dict(_as_split(found.plan, sizes))

    for sizes in _starts(whole.traced, plan.devices, micro_batches or 1):
        search(sizes)
    while True:
        best = min(tried, key=lambda c: (not c.plan.fits, c.plan.cost))
        wide = best.plan.padding
        fewer = [{k: v for k, v in wide.items() if k != n} for n in wide]
        if not (new := [sizes for sizes in fewer if sizes and sizes not in seen]):
            break
        for sizes in new:
            search(sizes)
    rivals = [c.plan for c in tried if c.plan.fits or not best.plan.fits]
    seconds = {k: sum(c.plan.seconds.get(k, 0.0) for c in tried) for k in best.plan.seconds}
    others = {} if best is whole else {"no_padding": plan.cost}
    memory = {} if best is whole or not best.plan.baseline_memory else {"no_padding": plan.memory.total}
    scope = {"paddings": str(len(seen))} if seen else {}
    chosen = replace(
        best.plan,
        bound=min(p.bound for p in rivals),
        optimal=best.plan.optimal and all(p.optimal or p.bound >= best.plan.cost for p in rivals),
        work=plan.work,
        seconds=seconds,
        provenance={**best.plan.provenance, **scope},
        baselines={**best.plan.baselines, **others},
        baseline_memory={**best.plan.baseline_memory, **memory},
    )
    return replace(best, plan=chosen)


def _starts(traced: Traced, devices: int, micro_batches: int) -> Iterator[Mapping[int, int]]:
    """Paddings for all devices, for half of them, …, as far as less padding saves a hundredth of some extent."""
    last: Mapping[int, int] = {}
    for ways in range(devices, 1, -1):
        if devices % ways:
            continue
        sizes = extents_to_pad(traced, ways, micro_batches)
        if not last or any(wide > 1.01 * sizes.get(n, n) for n, wide in last.items()):
            yield sizes
            last = sizes


def _as_split(plan: PlanData, sizes: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """(extent, padded extent) of what the plan splits, padded no further than it is split."""
    ways: dict[int, int] = {}
    axes = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))

    def count(size: int, split: tuple[str, ...]) -> None:
        ways[size] = math.lcm(ways.get(size, 1), math.prod(axes[a] for a in split))

    for node in plan.nodes:
        for dim, size in node.sizes.items():
            count(size, node.split.get(dim, ()))
    for t in (*plan.parameters.values(), *plan.inputs.values()):
        for size, *splits in zip(t.shape, t.storage, *(() if t.state is None else (t.state,)), strict=True):
            for split in splits:
                count(size, split)
    for n, wide in sizes.items():
        w = ways.get(wide, 1)
        if (least := -(-n // w) * w) != n:
            yield n, least
