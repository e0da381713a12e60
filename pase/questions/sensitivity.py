"""Tests whether a strategy stays optimal if the machine file is inaccurate.

The machine's figures are multiplied by factors, and the strategy's cost is compared with the optimum for each factor.
"""

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
    """Results on the machine that is scaled by ``factors``. Costs are in the cost model's unit.

    ours: cost of the strategy that was found for the unscaled machine.
    best: cost of the strategy that a new search finds for the scaled machine.
    others: costs of the baselines' strategies for the unscaled machine.
    mesh: the mesh of the new search.
    changed: number of nodes that the new search splits differently; None if its mesh differs.
    """

    factors: Mapping[str, float]
    ours: float
    best: float
    others: Mapping[str, float]
    mesh: tuple[int, ...]
    changed: int | None

    @property
    def regret(self) -> float:
        """How much more ours costs than the best, as a fraction of the best."""
        return self.ours / self.best - 1 if self.best else 0.0

    @property
    def winner(self) -> str:
        return min({"pase": self.ours, **self.others}.items(), key=lambda pair: (pair[1], pair[0] != "pase"))[
            0
        ]


def parse_range(text: str) -> Range:
    """Read a quantity and its factors, as ``pase.files.quantities.parse_factors`` does. Raises PaseError if the text is
    not of this form.

    >>> parse_range("bandwidth=0.25..4").factors
    (0.25, 0.5, 1.0, 2.0, 4.0)
    """
    quantity, equals, factors = text.partition("=")
    if not equals:
        raise PaseError(
            f"'{text}' has no factors",
            where="--vary",
            fix="write bandwidth=0.5..2, bandwidth=0.5..2:9 or bandwidth=0.5,1,2",
        )
    if quantity.strip() not in QUANTITIES:
        raise PaseError(
            f"there is no quantity '{quantity.strip()}'",
            where="--vary",
            fix=f"choose {', '.join(QUANTITIES)}",
        )
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
    """Compare the best strategy with the baselines and with new searches on scaled machines.

    The strategy and the baselines are found for the unscaled machine. Then they are priced on every combination of the
    factors, and a new search is run there.

    model, params, batch: as for ``pase.compile``.
    vary: the quantities and their factors, as ``Range`` or as text for ``parse_range``.
    {options}
    progress: a function that is called with a line of text at each step.
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
    """The implementation of ``sensitivity``, with all arguments by position."""
    from pase.compiler.compilation import compile_model
    from pase.tables.itemize import config_of

    if options.pipeline != "none":
        raise PaseError(
            "pipelined plans are not priced on other machines yet",
            where="--vary",
            fix=f"leave out pipeline={options.pipeline}",
        )
    ranges = [v if isinstance(v, Range) else parse_range(v) for v in vary]
    if len({r.quantity for r in ranges}) < len(ranges):
        raise PaseError(
            "a quantity is given twice",
            where="--vary",
            fix="give all its factors at once, as in bandwidth=0.5,1,2",
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
    """The plan on a machine with one quantity multiplied by a factor. Costs are in the cost model's unit.

    ours: cost of the plan. best: cost of the best strategy on the same mesh, without a memory limit.
    """

    quantity: str
    factor: float
    ours: float
    best: float


def swings(
    plan: PlanData, problem: SplitProblem, factors: Sequence[float] = (0.5, 2.0), seconds: float = 20.0
) -> list[Swing]:
    """Vary one quantity of the machine at a time by each factor. Stops early after ``seconds``."""
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
    """The problem on its machine, scaled by the factors."""
    from pase import costmodels

    machine = scaled(problem.machine, factors)
    return replace(problem, machine=machine, model=costmodels.get(problem.model.name, machine))


class _MemoryLimit(NamedTuple):
    """The memory limit of a device in bytes, and the options that limit the work of the search."""

    nbytes: float
    options: CompileOptions


def _given(problem: SplitProblem, found: Found, strategy: tuple[Mesh, Mapping[str, np.ndarray]]) -> Found:
    """A given strategy as the result of a search, for a search within the limit that ends without a result."""
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
        # The search may also use the baselines' meshes, so that it is never worse than any of them.
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
