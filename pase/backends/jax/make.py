"""Makes a ``OneProgramPlan`` from a plan and the model that it was compiled from."""

from __future__ import annotations

from pase.backends.jax.one_program import OneProgramPlan
from pase.frontends.jax.arguments import fixed_devices
from pase.frontends.jax.frontend import TracedJax
from pase.frontends.jax.modules import ModuleFunction
from pase.local.bucket_messages import ProgramSchedule
from pase.plan.buckets import model_of
from pase.plan.constraints import Constraints
from pase.plan.types import PlanData

__all__ = ["modules_of", "one_program_plan", "traced_by_jax", "whole_batch"]


def traced_by_jax(plan: PlanData, micro_batches: int | None = None) -> TracedJax:
    """The model on one micro-batch.

    micro_batches: how many micro-batches the batch has, by default as many as in the plan. Raises PaseError if the plan
    was loaded without its model, or if the model is not a JAX program.
    """
    from pase.frontends.jax.blocks import micro

    return micro(whole_batch(plan), micro_batches or plan.accumulate)


def whole_batch(plan: PlanData) -> TracedJax:
    """The model on the whole batch. Raises PaseError as ``traced_by_jax`` does."""
    return plan.traced_as(
        TracedJax,
        "loss_fn, params, batch",
        "it is not a JAX program; use 'pase emit' to write the plan for other frameworks",
    )


def modules_of(plan: PlanData) -> ModuleFunction | None:
    """The plan's function if it takes Flax NNX modules, otherwise None."""
    return plan.traced.modules if isinstance(plan.traced, TracedJax) else None


def one_program_plan(plan: PlanData) -> OneProgramPlan:
    """The plan in JAX.

    Raises PaseError if the plan has no model, if its model is not a JAX program, or if it is a pipeline (use
    ``in_stages`` for these).
    """
    plan.check_emitted()
    traced = traced_by_jax(plan)
    names = {t.path: t.name for t in traced.graph.tensors.values() if t.role in ("parameter", "input")}
    return OneProgramPlan(
        traced=traced,
        accumulate=plan.accumulate,
        whole=whole_batch(plan),
        blocks=plan.remat,
        hoisted=plan.once,
        accesses=plan.accesses,
        strategy=plan.strategy,
        schedule=ProgramSchedule.of(plan),
        prefetch=plan.overlap is not None,
        model=model_of(plan),
        devices=fixed_devices(plan.traced.shardings)
        if "fixed" in plan.provenance and isinstance(plan.traced, TracedJax)
        else None,
        logical_mesh=plan.mesh,
        constraints=Constraints(
            storage={names[p]: t.storage for p, t in (*plan.parameters.items(), *plan.inputs.items())},
            state={names[p]: t.state for p, t in plan.parameters.items() if t.state is not None},
            define=plan.define,
            read=plan.read,
            copies=plan.copies,
        ),
    )
