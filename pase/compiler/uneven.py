"""Padding of dims that the devices do not divide: the padded model is searched too, and the cheaper plan is taken.

A padded model is a program of its own, which computes the same numbers (``frontends/jax/padding/program``). Its price
therefore includes all that padding costs: work, bytes and memory of the padded extents, and the masks. A search starts
with dims padded for all devices. Then every dim is padded only as far as its plan splits it, and the search is
repeated until nothing changes. Further searches start with dims padded for fewer devices, if that saves padding, and
with each padded dim of the best plan left unpadded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pase.errors import Infeasible
from pase.frontends.blocks import as_padded, extents_to_pad
from pase.frontends.registry import Traced
from pase.plan.throughput import StepWork, step_work

if TYPE_CHECKING:
    from pase.compiler.compilation import Compiled
    from pase.compiler.problem.problem import Progress, SplitProblem
    from pase.plan.types import PlanData

__all__ = ["or_padded"]


def or_padded(
    problem: SplitProblem,
    traced: Traced,
    written: Compiled | Infeasible,
    compiled: Callable[[Traced], Compiled],
    micro_batches: int | None,
    say: Progress,
) -> Compiled:
    """Return what was compiled as written, or with padded dims if that is cheaper or the only one that fits.

    The bound holds for the model as written and for every padding that was searched. The plan says how many
    (``provenance["paddings"]``). Raises PaseError if the model cannot be padded. Raises ``written`` if it is Infeasible
    and no padding fits either.

    problem: the problem of the model as written.
    compiled: compiles another trace.
    micro_batches: the number that the user asks for.
    """
    whole = None if isinstance(written, Infeasible) else written
    tried, seen = [] if whole is None else [whole], list[Mapping[int, int]]()

    def search(sizes: Mapping[int, int]) -> None:
        while sizes and sizes not in seen:
            say("with dims padded: " + ", ".join(f"{n} to {wide}" for n, wide in sizes.items()))
            seen.append(sizes)
            try:
                found = compiled(as_padded(traced, sizes))
            except Infeasible:  # this padding does not fit the limit, but others may
                return
            tried.append(found)
            sizes = dict(_as_split(found.plan, sizes))

    # A padded batch is not cut into micro-batches. If memory requires some, the batch is also searched unpadded.
    asked = {micro_batches or 1, micro_batches or (2 if whole is None else whole.plan.accumulate)}
    for k in sorted(asked):
        for sizes in _starts(traced, problem.devices, k):
            search(sizes)
    while tried:
        best = min(tried, key=lambda c: (not c.plan.fits, c.plan.cost))
        wide = best.plan.padding
        fewer = [{k: v for k, v in wide.items() if k != n} for n in wide]
        if not (new := [sizes for sizes in fewer if sizes and sizes not in seen]):
            return _chosen(best, whole, tried, len(seen), step_work(problem.graph, problem.machine))
        for sizes in new:
            search(sizes)
    assert isinstance(written, Infeasible)
    raise written


def _chosen(
    best: Compiled, whole: Compiled | None, tried: Sequence[Compiled], paddings: int, work: StepWork
) -> Compiled:
    """Return the best of what was tried, with the bound over all of them. work: that of the model as written."""
    rivals = [c.plan for c in tried if c.plan.fits or not best.plan.fits]
    seconds = {k: sum(c.plan.seconds.get(k, 0.0) for c in tried) for k in best.plan.seconds}
    beside = None if whole is None or best is whole else whole.plan
    others = {} if beside is None else {"no_padding": beside.cost}
    memory = {} if beside is None or not best.plan.baseline_memory else {"no_padding": beside.memory.total}
    scope = {"paddings": str(paddings)} if paddings else {}
    chosen = replace(
        best.plan,
        bound=min(p.bound for p in rivals),
        optimal=best.plan.optimal and all(p.optimal or p.bound >= best.plan.cost for p in rivals),
        work=work if whole is None else whole.plan.work,
        seconds=seconds,
        provenance={**best.plan.provenance, **scope},
        baselines={**best.plan.baselines, **others},
        baseline_memory={**best.plan.baseline_memory, **memory},
    )
    return replace(best, plan=chosen)


def _starts(traced: Traced, devices: int, micro_batches: int) -> Iterator[Mapping[int, int]]:
    """Yield paddings for all devices, half of them, …, as long as less padding saves 1% of some extent."""
    last: Mapping[int, int] = {}
    for ways in range(devices, 1, -1):
        if devices % ways:
            continue
        sizes = extents_to_pad(traced, ways, micro_batches)
        if not last or any(wide > 1.01 * sizes.get(n, n) for n, wide in last.items()):
            yield sizes
            last = sizes


def _as_split(plan: PlanData, sizes: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Yield (extent, padded extent) of what the plan splits, padded only as far as it is split."""
    ways: dict[int, int] = {}
    axes = plan.mesh.by_name

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
