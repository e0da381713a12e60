"""Makes a plan from a strategy of a problem."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

import pase
from pase.compiler.meshes.baselines import NO_RIVALS, Rivals
from pase.compiler.meshes.search import Found
from pase.compiler.problem.limits import without_single
from pase.compiler.problem.problem import SplitProblem
from pase.ir import Graph, Remark
from pase.later import Later, Once
from pase.machine import Mesh
from pase.plan.answer import name_in_words
from pase.plan.assemble import Searched, assemble, axes_by_use
from pase.plan.remarks import remarked
from pase.plan.types import PlanData, Tried
from pase.tables.itemize import collectives, local_work, node_costs

if TYPE_CHECKING:
    from pase.frontends.registry import Traced

__all__ = ["NO_LIMIT", "Fit", "plan_found", "plan_of", "provenance_of"]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The memory limit of a plan in bytes per device; None means no limit.

    misfit: why nothing fits, and what would; None if something fits.
    """

    limit: int | None = None
    misfit: str | None = None


NO_LIMIT = Fit()


def plan_found(
    problem: SplitProblem,
    found: Found,
    name: str,
    traced: Traced,
    seconds: Mapping[str, float],
    rivals: Rivals = NO_RIVALS,
    fit: Fit = NO_LIMIT,
    proven: Mapping[str, str] | None = None,
) -> PlanData:
    """Return the plan of the strategy that the search found.

    fit: the memory limit of that search.
    proven: additional entries of its provenance.
    """
    s, compared = found.solution, Once(lambda: _figures(rivals))
    mesh, configs = found.mesh, found.configs
    if problem.form is not None and problem.form.axes:
        mesh, kept = without_single(mesh)
        configs = {node: c[kept] for node, c in configs.items()}
    searched = Searched(
        cost=s.cost,
        bound=s.bound,
        optimal=s.optimal,
        baselines=Later(lambda: compared().costs),
        skipped=Later(lambda: compared().skipped),
        tried=[Tried(mesh=m.sizes, cost=c) for m, c in found.tried],
        seconds=seconds,
        provenance={**provenance_of(problem.graph, s.method, s.certificate), **(proven or {})},
    )
    plan = _planned(
        problem, axes_by_use(problem.graph, mesh, configs), configs, searched, name=name, traced=traced
    )
    memory = {} if fit.limit is None else Later(lambda: compared().memory)
    fitted = replace(plan, memory_limit=fit.limit, misfit=fit.misfit, baseline_memory=memory)
    said = remarked(fitted, problem.graph, problem.machine)
    return replace(said, noted=(*said.noted, *_plain_fsdp(rivals)))


@dataclass(frozen=True, kw_only=True)
class _Figures:
    """What a plan holds of its baselines, as ``PlanData`` has it."""

    costs: Mapping[str, float]
    skipped: Mapping[str, str]
    memory: Mapping[str, int]


def _figures(rivals: Rivals) -> _Figures:
    given, skipped = rivals.all
    return _Figures(
        costs={b.name: b.cost for b in given},
        skipped={b.name: b.reason for b in skipped},
        memory={b.name: rivals.bytes_of(b) for b in given},
    )


def _plain_fsdp(rivals: Rivals) -> Iterator[Remark]:
    """Yield what plain FSDP cannot split, which makes it large."""
    for note in rivals.noted("fsdp"):
        said = f"{name_in_words('fsdp')} is large: {note}; PyTorch's FSDP stores such dims in unequal parts"
        yield Remark("assumed", said)


def _planned(
    problem: SplitProblem,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    searched: Searched,
    *,
    name: str,
    traced: Traced,
) -> PlanData:
    """Return the plan of a strategy of the problem, with the variant of its step."""
    plan = assemble(
        problem.graph,
        mesh,
        configs,
        problem,
        searched,
        name=name,
        traced=traced,
        overlap=problem.pricing.occupied,
    )
    v = problem.variant
    return replace(
        plan,
        accumulate=v.accumulate,
        remat=tuple(v.blocks),
        once=v.hoisted,
        gathers_again=v.gathers_again and _gathers_again(plan),
    )


def _gathers_again(plan: PlanData) -> bool:
    """Return whether a collective of forward runs once more for backward, outside of recomputed regions."""
    nodes = {n.name: n for n in plan.nodes}
    return any(
        c.phase == "forward" and c.times > nodes[c.node].times and not nodes[c.node].recomputed_in
        for c in plan.collectives
    )


def plan_of(
    problem: SplitProblem, configs: Mapping[str, np.ndarray], mesh: Mesh, name: str, traced: Traced
) -> PlanData:
    """Return the plan of a strategy that was not searched for (a baseline, a transferred one), priced the same way."""
    sent = collectives(problem.graph, mesh, configs, problem.model)
    work = local_work(problem.graph, mesh, configs, problem.model, problem.optimizer)
    costs = node_costs(work, sent)
    cost = problem.pricing.cost(mesh, configs, sum(c.total for c in costs.values()))
    given = Searched(cost=cost, provenance=provenance_of(problem.graph, "given", "none"))
    plan = _planned(problem, mesh, configs, given, name=name, traced=traced)
    return remarked(plan, problem.graph, problem.machine)


def provenance_of(graph: Graph, method: str, certificate: str) -> dict[str, str]:
    """Return how a plan was made, as the plan records it."""
    versions = {"pase": pase.__version__, "python": ".".join(map(str, sys.version_info[:3]))}
    versions |= {k: sys.modules[k].__version__ for k in ("jax", "numpy") if k in sys.modules}
    return {
        **versions,
        **graph.meta,
        "edges": str(len(graph.edges)),
        "search": method,
        "certificate": certificate,
        **({"fixed": json.dumps(sorted(graph.fixed))} if graph.fixed else {}),
    }
