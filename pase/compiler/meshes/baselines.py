"""Strategies that do not come from the search: baselines, and strategies of which a part is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pase.baselines import Baseline, Intent, Skipped, baselines
from pase.baselines.fill_in import fill_in
from pase.compiler.meshes.search import Found
from pase.compiler.problem.problem import SplitProblem
from pase.errors import Infeasible
from pase.garbage import uncollected
from pase.ir import Node
from pase.machine import Mesh
from pase.memory.account import Memory

__all__ = ["complete", "memory_of", "never_worse", "price_baselines"]


@uncollected()
def price_baselines(problem: SplitProblem) -> tuple[list[Baseline], list[Skipped]]:
    """Return the baselines, priced on this problem, and those that do not apply to it."""
    made = baselines(problem.graph, problem.devices, problem.machine, problem.model, tables_of=problem.tables)
    price = problem.pricing.cost
    given = [replace(b, cost=price(b.mesh, b.strategy, b.cost)) for b in made if isinstance(b, Baseline)]
    return given, [b for b in made if not isinstance(b, Baseline)]


def never_worse(problem: SplitProblem, found: Found, given: Sequence[Baseline]) -> Found:
    """Return the answer, or a baseline's strategy if that is cheaper. given: the baselines that fit.

    A baseline can be cheaper only if the search left a gap, or if the baseline uses another mesh.
    """
    best = min(given, key=lambda b: b.cost, default=None)
    if best is None or best.cost >= found.solution.cost * (1 - 1e-9):
        return found
    space = problem.pricing.space(best.mesh)
    solution = replace(
        found.solution,
        choice=space.index(best.strategy),
        cost=best.cost,
        optimal=False,
        bound=min(found.solution.bound, best.cost),
        method=f"the strategy of {best.name}",
    )
    return replace(found, mesh=best.mesh, space=space, solution=solution)


def memory_of(problem: SplitProblem, configs: Mapping[str, np.ndarray], mesh: Mesh) -> Memory:
    """Return the memory that a strategy needs on a device. configs: node name -> int8 [axes]."""
    return problem.account.memory(problem.graph, mesh, configs, problem.optimizer)


def complete(problem: SplitProblem, pinned: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, np.ndarray]:
    """Return the cheapest strategy in which these nodes have these configs: node name -> int8 [axes].

    Raises Infeasible if there is none.
    """

    def allow(node: Node, cfg: np.ndarray, _: Mesh) -> np.ndarray:
        alike = (cfg == pinned[node.name]).all(axis=1) if node.name in pinned else cfg[:, 0] == cfg[:, 0]
        return np.asarray(alike)

    found = fill_in(Intent(name="pinned", mesh=mesh, allow=allow), *problem.tables(mesh))
    if isinstance(found, Skipped):
        raise Infeasible(found.reason)
    return dict(found.strategy)
