"""Applies a pipelined plan to the same model at another size and on fewer devices, in order to try it there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pase.compiler.meshes.baselines import complete
from pase.compiler.meshes.plans import plan_of
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import Variant, recomputed
from pase.compiler.stages.chain_places import UnitPlaces, divided
from pase.errors import Infeasible
from pase.frontends.blocks import block_ways
from pase.frontends.registry import Traced
from pase.pipeline.registry import SCHEDULES, schedule
from pase.plan.pipeline import PipelinePlan
from pase.plan.transfer import shrunk_mesh, transferred
from pase.plan.types import PlanData
from pase.tables.itemize import split_of

__all__ = ["staged_elsewhere"]


def staged_elsewhere(plan: PlanData, traced: Traced, devices: int) -> tuple[PlanData, tuple[str, ...]]:
    """Transfer the plan's schedule and splits, with equal cuts, to this model on this many devices.

    Returns (the plan, the nodes for which an axis had to be dropped). The seconds and bytes of the stages remain those
    of the plan. Raises Infeasible if there are too few blocks, devices or examples for the schedule.
    """
    p = plan.pipeline
    assert p is not None
    problem = SplitProblem.of(traced.graph, devices, plan.machine, plan.cost_model, plan.optimizer)
    ways = block_ways(traced)
    places = divided(problem.graph, ways.blocks_of(traced))
    blocks = places.blocks
    ranks, chunks, m = _shape(p, plan, blocks, ways.batch_size(traced), devices)
    mesh = shrunk_mesh(plan.mesh, devices // ranks)
    strategies, again, dropped = [], [], dict[str, None]()
    for i, strategy in enumerate(p.strategies):
        how = {b.recompute for b in p.recomputed_blocks(i, plan.remat)}
        again.append(
            recomputed(traced, next(w for w in ("light", "attention", "all") if w in how)) if how else ()
        )
        varied = problem.varied(traced, Variant(accumulate=m, blocks=again[-1]))
        of = replace(plan, nodes=tuple(replace(n, split=strategy[n.name]) for n in plan.nodes))
        pinned, lost = transferred(of, varied.graph, mesh)
        configs = complete(varied, pinned, mesh)
        strategies.append({n.name: split_of(n, configs[n.name], mesh) for n in varied.graph.nodes})
        dropped |= dict.fromkeys(lost)
    made = plan_of(varied, configs, mesh, plan.model, traced)
    rank_of = schedule(p.schedule, ranks, m, chunks).rank_of
    many, last = len(rank_of), len(p.stages) - 1
    like = [0 if k == 0 else last if k == many - 1 else last // 2 for k in range(many)]
    cuts = tuple(blocks // many + (k < blocks % many) for k in range(many))
    stages = tuple(
        replace(p.stages[s], rank=r, blocks=n) for s, r, n in zip(like, rank_of, cuts, strict=True)
    )
    pipeline = replace(
        p,
        degree=ranks,
        chunks=chunks,
        micro_batches=m,
        cuts=cuts,
        cut_points=isinstance(places, UnitPlaces),
        stages=stages,
        strategies=tuple(strategies),
        recompute=tuple(again),
        stages_of=places.stages_of(cuts),
    )
    return replace(made, devices=devices, pipeline=pipeline), tuple(dropped)


def _shape(p: PipelinePlan, plan: PlanData, blocks: int, examples: int, devices: int) -> tuple[int, int, int]:
    """Return (ranks, stages per rank, micro-batches): those of the plan, or the most that model and devices allow."""
    d = SCHEDULES[p.schedule]

    def every() -> Iterator[tuple[int, int, int]]:
        for chunks in range(p.chunks, 0, -1):
            for ranks in range(min(p.degree, blocks // chunks, devices), 0, -1):
                for m in range(min(p.micro_batches, examples), 0, -1):
                    if examples % m == 0:
                        yield ranks, chunks, m

    for ranks, chunks, m in every():
        inner = devices // ranks
        if devices % ranks == 0 and plan.mesh.devices % inner == 0 and not d.refuses(ranks, m, chunks):
            return ranks, chunks, m
    raise Infeasible(
        f"{blocks} blocks and {examples} examples on {devices} devices cannot be run as the plan's stages are ({p}, "
        f"{plan.mesh.devices} devices each)",
        fix=f"use a divisor of its {plan.devices} devices, or leave out --reduced",
    )
