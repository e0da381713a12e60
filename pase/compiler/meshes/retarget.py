"""A plan's problem, and a plan on another machine: the same splits at that machine's prices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pase.compiler.meshes.plans import plan_of
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import ProductPrecision, Variant
from pase.errors import PaseError
from pase.ir import FixedLayout, FixedMesh
from pase.machine import CostModel, Machine, load
from pase.plan.targets import form_of
from pase.plan.transfer import transferred
from pase.plan.types import PlanData
from pase.tables.decompose import Decompose

if TYPE_CHECKING:
    from pase.frontends.registry import Traced

__all__ = ["priced_on", "problem_of"]


def problem_of(plan: PlanData, traced: Traced, machine: Machine) -> SplitProblem:
    """The problem whose solution the plan is, on this machine."""
    form = form_of(plan.provenance.get("target", ""), plan.provenance.get("form", "any"))
    overlap = "none" if plan.overlap is None else "parameters"
    problem = SplitProblem.of(
        traced.graph,
        plan.devices,
        machine,
        plan.cost_model,
        plan.optimizer,
        overlap,
        form,
        _fixed(plan, traced),
    )
    precision: ProductPrecision = "fp8" if plan.provenance.get("precision") == "fp8" else "model"
    decompose: Decompose = "products" if plan.provenance.get("decompose") == "products" else "none"
    variant = Variant(
        accumulate=plan.accumulate,
        blocks=plan.remat,
        precision=precision,
        hoisted=plan.once,
        gathers_again=plan.gathers_again,
        decompose=decompose,
    )
    return problem if variant == Variant() else problem.varied(traced, variant)


def _fixed(plan: PlanData, traced: Traced) -> dict[str, FixedLayout]:
    """The layouts that were fixed when the plan was made, on the plan's mesh."""
    names: list[str] = json.loads(plan.provenance.get("fixed", "[]"))
    mesh, stored = plan.mesh, {**plan.inputs, **plan.parameters}
    paths = {name: traced.graph.tensors[name].path for name in names}
    own = FixedMesh(names=mesh.names, sizes=mesh.sizes)
    return {n: FixedLayout(path=path, mesh=own, dims=stored[path].storage) for n, path in paths.items()}


def priced_on(plan: PlanData, name_or_path: str | Path | None) -> tuple[PlanData, CostModel]:
    """(the plan at the prices of a machine, the cost model on it).

    name_or_path: None for the machine that the plan was made for. The splits, the schedule and what is recomputed stay
    the same; costs and memory are those on this machine. Raises PaseError if the plan has no model attached, is
    pipelined, or has costs that are not seconds.
    """
    if plan.traced is None or plan.pipeline is not None or plan.unit != "s":
        why = (
            "it was loaded without its model"
            if plan.traced is None
            else "it is pipelined"
            if plan.pipeline is not None
            else f"its costs are in {plan.unit}"
        )
        raise PaseError(
            f"it cannot be priced on another machine: {why}",
            where=f"the plan for '{plan.model}'",
            fix="compile the model for that machine with cost_model='analytic' and without stages",
        )
    machine = load(plan.machine if name_or_path is None else name_or_path)
    problem = problem_of(plan, plan.traced, machine)
    if machine.digest == plan.machine_digest:
        return plan, problem.model
    configs, dropped = transferred(plan, problem.graph, plan.mesh)
    lost = [*dropped, *(n.name for n in problem.graph.nodes if n.name not in configs)]
    if lost:
        raise PaseError(
            f"this version of pase does not split '{lost[0]}' as the plan does",
            where=f"the plan for '{plan.model}'",
            fix="compile the plan again",
        )
    made = plan_of(problem, configs, plan.mesh, plan.model, plan.traced)
    return replace(plan, **{f: getattr(made, f) for f in _PRICED}), problem.model


_PRICED = (
    *("nodes", "collectives", "memory", "work", "cost", "overlap"),
    *("machine", "machine_digest", "device_memory"),
)
"""The fields of a plan that depend on the machine."""
