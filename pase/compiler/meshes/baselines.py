"""Strategies that do not come from the search: baselines, and strategies of which a part is given."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from pase.baselines import Baseline, Intent, Skipped
from pase.baselines.fill_in import cheapest_by_name, fill_in, fill_in_if_allowed, intended, may_be_noted
from pase.compiler.meshes.search import Found
from pase.compiler.problem.problem import SplitProblem
from pase.errors import Infeasible
from pase.garbage import uncollected
from pase.ir import Node
from pase.machine import Mesh
from pase.memory.account import Memory

__all__ = ["NO_RIVALS", "Rivals", "complete", "memory_of", "never_worse", "price_baselines"]


class Rivals:
    """The baselines of a problem. What each intends is known at once; it is priced when it is first asked for.

    Of the problem's tables, those are used that its other users keep alive; others are built again, so that a plan that
    nobody compares with its baselines does not keep tables.
    """

    def __init__(self, problem: SplitProblem | None) -> None:
        """problem: None for no baselines. Raises PaseError as the baselines' rules do."""
        self._intended: Sequence[Intent | Skipped] = ()
        self._made: dict[str, Baseline | Skipped] = {}
        if problem is not None:
            self._kept, self._alone = weakref.ref(problem), replace(problem)
            self._intended = intended(problem.graph, problem.devices, problem.machine)

    @property
    def _problem(self) -> SplitProblem:
        return self._kept() or self._alone

    def where(self, may: Callable[[Mesh], bool]) -> list[Baseline]:
        """Return those of which a variant is on a mesh of this kind."""
        return self._priced({i.name for i in self._intended if isinstance(i, Intent) and may(i.mesh)})[0]

    def noted(self, name: str) -> tuple[str, ...]:
        """Return the notes of a baseline: what it could not do. It is priced only if it can have some."""
        mine = [i for i in self._intended if isinstance(i, Intent) and i.name == name]
        if not any(may_be_noted(i, self._problem.graph) for i in mine):
            return ()
        return tuple(note for b in self._priced({name})[0] for note in b.notes)

    def bytes_of(self, b: Baseline) -> int:
        """Return the bytes that a baseline needs on a device."""
        return memory_of(self._problem, b.strategy, b.mesh).total

    @cached_property
    def all(self) -> tuple[list[Baseline], list[Skipped]]:
        """The baselines, and those that do not apply to the problem."""
        return self._priced({i.name for i in self._intended})

    @uncollected()
    def _priced(self, names: Collection[str]) -> tuple[list[Baseline], list[Skipped]]:
        asked = [i for i in self._intended if i.name in names and i.name not in self._made]
        if asked:
            problem = self._problem
            made = cheapest_by_name(fill_in_if_allowed(i, problem.graph, problem.tables) for i in asked)
            price = problem.pricing.cost
            self._made |= {
                b.name: replace(b, cost=price(b.mesh, b.strategy, b.cost)) if isinstance(b, Baseline) else b
                for b in made
            }
        found = [self._made[name] for name in dict.fromkeys(i.name for i in self._intended) if name in names]
        return [b for b in found if isinstance(b, Baseline)], [b for b in found if isinstance(b, Skipped)]


NO_RIVALS = Rivals(None)


def price_baselines(problem: SplitProblem) -> tuple[list[Baseline], list[Skipped]]:
    """Return the baselines, priced on this problem, and those that do not apply to it."""
    return Rivals(problem).all


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
