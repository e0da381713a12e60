"""Makes ``plan.jax``: the plan in JAX in the way in which it runs, for arrays or for Flax NNX modules."""

from __future__ import annotations

from pase.backends.jax.make import modules_of, one_program_plan
from pase.backends.jax.modules import JaxModulePlan
from pase.backends.jax.pipeline.modules import StagedModulePlan
from pase.backends.jax.pipeline.replicas import in_stages
from pase.backends.jax.plan import JaxPlan
from pase.plan.types import PlanData
from pase.pytree import Tree

__all__ = ["jax_plan"]


def jax_plan(plan: PlanData) -> JaxPlan[Tree, Tree]:
    """The plan in JAX. Raises PaseError if the plan has no model, or if its model is not a JAX program."""
    modules = modules_of(plan)
    if plan.pipeline is not None:
        staged = in_stages(plan)
        return staged if modules is None else StagedModulePlan(inner=staged, modules=modules)
    whole = one_program_plan(plan)
    return whole if modules is None else JaxModulePlan(inner=whole, modules=modules)
