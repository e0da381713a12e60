"""Does a strategy stay optimal if the machine file is inaccurate? Compares its cost with the optimum at each factor."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pase.compiler.meshes.baselines import memory_of
from pase.compiler.meshes.fit import fit_limit
from pase.compiler.meshes.search import Found, search_meshes
from pase.compiler.problem.options import CompileOptions, takes_options
from pase.compiler.problem.spent import Spent
from pase.errors import PaseError
from pase.files.quantities import parse_factors
from pase.machine.scale import QUANTITIES, scaled
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.compiler.problem.problem import SplitProblem
    from pase.machine import Mesh
    from pase.plan.types import PlanData

__all__ = ["Point", "Range", "Swing", "parse_range", "sensitivity", "swings", "vary_machine"]


@dataclass(frozen=True, kw_only=True)
class Range:
    """Factors to try for one quantity of the machine."""

    quantity: str
    factors: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """Results on the machine scaled by ``factors``; costs in the cost model's unit.

    ours: cost on this machine of the strategy found for the unscaled one. best: cost found by a new search here.
    others: costs here of the other methods' unchanged strategies. winner: the cheapest among ours and others.
    changed: nodes that the new search splits in another way (None if its mesh differs).
    """

    factors: Mapping[str, float]
    ours: float
    best: float
    others: Mapping[str, float]
    mesh: tuple[int, ...]
    changed: int | None

    @property
    def regret(self) -> float:
        """How much more ours costs than the best here, as a fraction of the best."""
        return self.ours / self.best - 1 if self.best else 0.0

    @property
    def winner(self) -> str:
        return min({"pase": self.ours, **self.others}.items(), key=lambda pair: (pair[1], pair[0] != "pase"))[
            0
        ]


def parse_range(text: str) -> Range:
    """Reads a quantity and its factors; see ``pase.files.quantities.parse_factors``. Raises PaseError if it cannot.

    >>> parse_range("bandwidth=0.25..4").factors
    (0.25, 0.5, 1.0, 2.0, 4.0)
    """
    quantity, equals, factors = text.partition("=")
    if not equals:
        raise PaseError(
            f"cannot read --vary '{text}': write bandwidth=0.5..2, bandwidth=0.5..2:9 or bandwidth=0.5,1,2"
        )
    if quantity.strip() not in QUANTITIES:
        raise PaseError(f"cannot vary '{quantity.strip()}'; known: {', '.join(QUANTITIES)}")
    return Range(quantity=quantity.strip(), factors=parse_factors(factors, f"--vary '{text}'"))


@takes_options
def sensitivity(
    model: Tree,
    params: Tree = None,
    *batch: Tree,
    options: CompileOptions,
    vary: Sequence[str | Range],
    progress: Callable[[str], None] | None = None,
) -> list[Point]:
    """Finds the best strategy on the machine as it is, then prices it, the other methods' and a new search's on
    every combination of the factors.

    model, params, batch: as for ``pase.compile``.
    vary: what to vary and by which factors; text as ``parse_range`` reads it.
    {options}
    """
    return vary_machine(model, params, batch, options, vary, progress)


def vary_machine(
    model: Tree,
    params: Tree,
    batch: Sequence[Tree],
    options: CompileOptions,
    vary: Sequence[str | Range],
    progress: Callable[[str], None] | None,
) -> list[Point]:
    """What ``sensitivity`` does."""
    from pase.compiler.compilation import compile_model
    from pase.tables.itemize import config_of

    if options.pipeline != "none":
        raise PaseError(
            f"what a pipeline's stages take on other machines is not asked yet: leave out pipeline={options.pipeline}"
        )
    ranges = [v if isinstance(v, Range) else parse_range(v) for v in vary]
    if len({r.quantity for r in ranges}) < len(ranges):
        raise PaseError(
            "--vary names a quantity twice; give all of its factors at once, as bandwidth=0.5,1,2"
        )
    done = compile_model(model, params, batch, options, progress)
    ours = {
        n.name: config_of(done.problem.graph.node[n.name], n.split, done.plan.mesh) for n in done.plan.nodes
    }
    fitting = [b for b in done.given if b.name not in done.plan.too_large]
    strategies = {"pase": (done.plan.mesh, ours)} | {b.name: (b.mesh, b.strategy) for b in fitting}
    limit = done.plan.memory_limit if done.plan.misfit is None else None
    within = None if limit is None else _MemoryLimit(limit, options)
    return _points(done.problem, strategies, ranges, options.mesh, options.max_axes, within, progress)


@dataclass(frozen=True, kw_only=True)
class Swing:
    """One quantity of the machine times a factor: the cost of the plan then, and of the best strategy found on the same
    mesh (without a memory limit), in the cost model's unit."""

    quantity: str
    factor: float
    ours: float
    best: float


def swings(
    plan: PlanData, problem: SplitProblem, factors: Sequence[float] = (0.5, 2.0), seconds: float = 20.0
) -> list[Swing]:
    """Varies one quantity of the machine at a time, slower and faster; stops early at the time limit in seconds."""
    from pase.tables.itemize import config_of

    start, out = time.perf_counter(), list[Swing]()
    configs = {n.name: config_of(problem.graph.node[n.name], n.split, plan.mesh) for n in plan.nodes}
    for quantity, factor in itertools.product(QUANTITIES, factors):
        if time.perf_counter() - start > seconds:
            break
        pricing = _on(problem, {quantity: factor}).pricing
        ours = pricing.cost(plan.mesh, configs)
        best = min(pricing.solve(plan.mesh).cost, ours)
        out.append(Swing(quantity=quantity, factor=factor, ours=ours, best=best))
    return out


def _on(problem: SplitProblem, factors: Mapping[str, float]) -> SplitProblem:
    """The problem on its machine, scaled."""
    from pase import costmodels

    machine = scaled(problem.machine, factors)
    return replace(problem, machine=machine, model=costmodels.get(problem.model.name, machine))


class _MemoryLimit(NamedTuple):
    """Memory limit of a device in bytes, and the options that say how much to work for it."""

    nbytes: float
    options: CompileOptions


def _given(problem: SplitProblem, found: Found, strategy: tuple[Mesh, Mapping[str, np.ndarray]]) -> Found:
    """A strategy as what was found: where a search within the limit ends before it finds one."""
    mesh, configs = strategy
    space = problem.pricing.space(mesh)
    solution = replace(found.solution, choice=space.index(configs), cost=problem.pricing.cost(mesh, configs))
    return replace(found, mesh=mesh, space=space, solution=solution)


def _points(
    problem: SplitProblem,
    strategies: Mapping[str, tuple[Mesh, Mapping[str, np.ndarray]]],
    ranges: Sequence[Range],
    mesh: str | None,
    max_axes: int,
    within: _MemoryLimit | None,
    progress: Callable[[str], None] | None,
) -> list[Point]:
    out = []
    for factors in itertools.product(*(r.factors for r in ranges)):
        at = dict(zip((r.quantity for r in ranges), factors, strict=True))
        if progress:
            progress(", ".join(f"{k} × {v:g}" for k, v in at.items()))
        here = _on(problem, at)
        over = here.meshes(mesh, max_axes)
        known = {m.sizes for m in over}
        # If a method has its own mesh, the search may use it too, so that it is never worse than any method.
        over += [m for m in {m.sizes: m for m, _ in strategies.values()}.values() if m.sizes not in known]
        found = search_meshes(here, over)
        if within is not None and memory_of(here, found.configs, found.mesh).total > within.nbytes:
            fitting, _ = fit_limit(
                here,
                found,
                over,
                within.nbytes,
                Spent.within(within.options.work, within.options.time_limit),
                progress or (lambda _: None),
            )
            found = fitting or _given(here, found, strategies["pase"])
        prices = {}
        for name, (its, configs) in strategies.items():
            prices[name] = here.pricing.cost(its, configs)
        its, ours = strategies["pase"]
        same = found.mesh.sizes == its.sizes
        changed = sum(not np.array_equal(found.configs[n], c) for n, c in ours.items()) if same else None
        out.append(
            Point(
                factors=at,
                ours=prices.pop("pase"),
                best=found.solution.cost,
                others=prices,
                mesh=found.mesh.sizes,
                changed=changed,
            )
        )
    return out
