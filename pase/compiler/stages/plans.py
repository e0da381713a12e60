"""Makes the plan of a pipeline that the search found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pase.compiler.meshes.plans import provenance_of
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.stages.chain_search import ChainMenu
from pase.compiler.stages.costs import CostKind
from pase.compiler.stages.menu import StageSplit
from pase.compiler.stages.pipelines import MICRO_BATCHES, Pipelines
from pase.compiler.stages.replica_split import ReplicaSplit
from pase.compiler.stages.search import Staged, StageMenu
from pase.ir.blocks import Hoisted, micro_batches_of
from pase.ir.recompute import gathering_again
from pase.machine import GroupedMachine, Mesh
from pase.memory.account import Memory
from pase.pipeline.simulate import peak_bytes, simulate
from pase.plan.assemble import Searched, assemble, axes_by_use
from pase.plan.pipeline import PipelinePlan, ReplicaPlan, StagePlan
from pase.plan.remarks import remarked
from pase.plan.types import NodePlan, PlanData, Tried
from pase.tables.itemize import Collective, NodeCost, split_of

if TYPE_CHECKING:
    from pase.frontends.registry import Traced

__all__ = ["plan_staged"]


def plan_staged(
    problem: SplitProblem, traced: Traced, name: str, found: Pipelines, seconds: dict[str, float]
) -> PlanData:
    """Return the plan of what the search found: its mesh, and a middle stage's nodes and storage, with the splits of
    both ends.
    """
    s, menu = found.best, found.menu
    assert s is not None and menu is not None and s.cuts.simulated is not None and s.cuts.counts is not None
    step_s = s.step_s if found.replica_split is None else found.replica_split.step_s
    middle = _middle(s)
    configs = _as_cut(s, menu)
    t = next(t for t in menu.tables if t.variant == middle.variant)
    mesh = axes_by_use(t.graph, s.mesh, configs)
    bound = min(found.bound, step_s)
    ways = {split.weights for split in s.splits}
    searched = Searched(
        cost=step_s,
        bound=bound,
        optimal=not found.unseen and bound >= step_s * (1 - 1e-6),
        tried=[Tried(mesh=s.mesh.sizes, cost=step_s)],
        seconds=seconds,
        provenance=provenance_of(
            t.graph,
            "stages: tables of one graph, cuts by paths",
            "paths of the schedules, with each rank's memory",
        ),
    )
    # As ``costs`` prices it, unless a stage gathers in each micro-batch: gathers are hoisted, or also sums.
    once: Hoisted = "all" if ways == {"hoisted"} else "gathers"
    hoisted = replace(t.graph, facts=replace(t.graph.facts, hoisted=once))
    graph = gathering_again(t.graph) if "each" in ways else hoisted
    plan = assemble(graph, mesh, configs, problem, searched, name=name, traced=traced)
    memory = _memory(s)
    # The plan lists all micro-batches. A replica runs only some of them, and sends accordingly less, except for hoisted
    # collectives.
    micro_batches = micro_batches_of(t.graph)
    run = s.micro_batches / micro_batches
    counted = [(c, run if c.times >= micro_batches else 1.0) for c in plan.collectives]
    sent = _sent_by_node(counted)
    staged = replace(
        plan,
        accumulate=s.micro_batches,
        remat=tuple(middle.variant.blocks),
        devices=problem.devices,
        overlap=problem.pricing.occupied,
        memory=max(memory, key=lambda m: m.total),
        memory_limit=None if np.isinf(menu.limits).all() else int(menu.limits.max()),
        nodes=tuple(_shared(n, 1 / s.schedule.ranks, run, sent) for n in plan.nodes),
        collectives=tuple(replace(c, cost=c.cost * part / s.schedule.ranks) for c, part in counted),
        pipeline=replace(
            _pipeline(s, menu, mesh, _scope(found, menu.only), _names(problem)),
            replicas=()
            if found.replica_split is None
            else _replicas(found.replica_split, found, _names(problem)),
            sum_s=None if found.replica_split is None else found.replica_split.sum_s,
            equal_s=_equal_s(s, found, isinstance(problem.machine, GroupedMachine)),
        ),
    )
    return remarked(staged, t.graph, problem.machine)


def _sent_by_node(counted: Iterable[tuple[Collective, float]]) -> dict[str, tuple[float, float]]:
    """Return node -> (cost of its collectives, the part of it that a replica runs)."""
    sent: dict[str, tuple[float, float]] = {}
    for c, part in counted:
        before, after = sent.get(c.node, (0.0, 0.0))
        sent[c.node] = (before + c.cost, after + c.cost * part)
    return sent


def _names(problem: SplitProblem) -> tuple[str, ...]:
    """Return the names of the machine's groups; empty if its devices are equal."""
    machine = problem.machine
    return tuple(g.name for g in machine.groups) if isinstance(machine, GroupedMachine) else ()


def _middle(s: Staged) -> StageSplit:
    return s.splits[len(s.splits) // 2]


def _as_cut(s: Staged, menu: StageMenu) -> dict[str, np.ndarray]:
    """Return node -> int8 [axes]: a middle stage's split of the blocks, and the splits of both ends.

    For unequal units, this is the split of the first stage that has the node.
    """
    if isinstance(menu, ChainMenu):
        inside = [(w, w.role.units) for w in s.splits if w.role.units is not None]
        has = {n.name: [w for w, u in inside if menu.places.share(n.name, u)] for n in menu.graph.nodes}
        return {name: (has[name] or s.splits)[0].configs[name] for name in has}
    of = {"first": s.splits[0], "block": _middle(s), "last": s.splits[-1]}
    return {n.name: of[menu.places.of(n.name)].configs[n.name] for n in menu.graph.nodes}


def _equal_s(s: Staged, found: Pipelines, unequal: bool) -> float | None:
    """Return the seconds of the step if unequal devices had equal shares: of the micro-batches for replicas, otherwise
    of the blocks. None if devices are equal, or if equal shares do not fit."""
    if not unequal:
        return None
    if found.replica_split is not None:
        return None if np.isinf(found.replica_split.equal_s) else found.replica_split.equal_s
    p, many = s.problem, s.schedule.stages
    counts = np.array([p.blocks // many + (k < p.blocks % many) for k in range(many)])
    rows, room = p.memory_rows
    if len(rows) and (rows @ counts > room * (1 + 1e-9)).any():
        return None
    return simulate(s.schedule, p.times(counts)).step_s


def _replicas(split: ReplicaSplit, found: Pipelines, names: tuple[str, ...]) -> tuple[ReplicaPlan, ...]:
    out = []
    for r in split.replicas:
        mesh = axes_by_use(r.menu.graph, r.staged.mesh, _as_cut(r.staged, r.menu))
        out.append(
            ReplicaPlan(
                group=r.group.name,
                micro_batches=r.micro_batches,
                step_s=r.staged.step_s,
                mesh=mesh.by_name,
                pipeline=_pipeline(r.staged, r.menu, mesh, _scope(found, r.menu.only), names),
            )
        )
    return tuple(out)


def _shared(n: NodePlan, part: float, run: float, sent: Mapping[str, tuple[float, float]]) -> NodePlan:
    """Return a node's costs and work as the average per rank. Each stage lists its own memory.

    run: the fraction of the micro-batches that is run.
    sent: the seconds of a node's collectives, for all micro-batches and for those that are run.
    """
    before, after = sent.get(n.name, (0.0, 0.0))
    cost = NodeCost(
        compute=n.cost.compute * part * run,
        communication=n.cost.communication * part * (after / before if before else run),
        update=n.cost.update * part,
    )
    of = {"update": part}
    work = tuple(
        replace(w, times=w.times * of.get(w.phase, part * run), cost=w.cost * of.get(w.phase, part * run))
        for w in n.work
    )
    return replace(n, cost=cost, work=work, keeps={}, kept_for_recompute=0)


def _pipeline(s: Staged, menu: StageMenu, mesh: Mesh, scope: str, groups: tuple[str, ...]) -> PipelinePlan:
    memory = _memory(s)
    sim, counts = s.cuts.simulated, s.cuts.counts
    assert sim is not None and counts is not None
    times = s.problem.times(np.array(counts))
    kept, waiting = _kept(s)
    last = s.schedule.stages - 1
    strategies = list(dict.fromkeys(s.splits))
    stages = tuple(
        StagePlan(
            rank=rank,
            blocks=n,
            strategy=strategies.index(split),
            recomputes=bool(split.variant.blocks),
            weights="hoisted" if split.weights == "hoisted" else "each",
            forward_s=float(times.forward[k]),
            backward_s=float(times.full[k] - times.forward[k]),
            memory_bytes=memory[rank].total,
            weight_s=float(times.weight[k]),
            recompute_s=float(times.recompute[k]),
            send_s=float(times.send[0, k]) if k < last else 0.0,
            back_s=float(times.send[1, k]) if k < last else 0.0,
            send_bytes=round(menu.sent_bytes(split)[0]) if k < last else 0,
            back_bytes=round(menu.sent_bytes(s.splits[k + 1], split)[1]) if k < last else 0,
            kept_bytes=round(kept[k]),
            waiting_bytes=round(waiting[k]),
        )
        for k, (rank, n, split) in enumerate(zip(s.schedule.rank_of, counts, s.splits, strict=True))
    )
    others = {}
    for d, chunks in menu.schedules():
        if (d.name, chunks * s.schedule.ranks) != (s.schedule.name, s.schedule.stages):
            other = menu.compared(d, chunks)
            if other is not None:
                others[f"{d.name} ×{chunks}" if chunks > 1 else d.name] = other.step_s
    where = {n.name: n for n in menu.graph.nodes}
    return PipelinePlan(
        degree=s.schedule.ranks,
        chunks=s.schedule.stages // s.schedule.ranks,
        micro_batches=s.micro_batches,
        schedule=s.schedule.name,
        cuts=counts,
        cut_points=isinstance(menu, ChainMenu),
        bubble=sim.bubble,
        imbalance=sim.imbalance,
        cuts_bound=s.cuts.bound,
        stages=stages,
        others=others,
        strategies=tuple(
            {name: split_of(where[name], cfg, mesh) for name, cfg in split.configs.items()}
            for split in strategies
        ),
        scope=scope,
        groups=tuple(groups[i] for i in menu.groups) if groups else (),
        recompute=tuple(split.variant.blocks for split in strategies),
        before_s=tuple(map(float, times.before)),
        after_s=tuple(map(float, times.after)),
        hidden_s=float(np.mean(s.problem.hidden(np.array(counts)))),
        stages_of=next(t for t in menu.tables if t.variant == _middle(s).variant).places.stages_of(counts),
    )


def _scope(found: Pipelines, only: str) -> str:
    schedules = {"every": "all schedules", "auto": "all schedules but 'circular'"}.get(
        only, f"schedule '{only}'"
    )
    counted = (
        (found.left, "of them were bounded only"),
        (found.loose, "of them are bounded by the mean work of their ranks alone"),
        (found.unseen, "more were not looked at"),
    )
    left = "".join(f"; {n} {what}, within the given work" for n, what in counted if n)
    return (
        f"the bound is over {found.tried} choices of ranks, micro-batches ({', '.join(map(str, MICRO_BATCHES))} times "
        f"the ranks, or as given) and meshes of at most two axes{left}; it holds for every cut, and every split of "
        f"each stage, under {schedules}, within the memory limit; ranks are the outermost axis"
    )


def _kept(s: Staged) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of one micro-batch on a device of each stage, float64 [stages]: until its backward, and the part
    of them that stays until its weights' gradients."""
    counts, f, e = np.array(s.cuts.counts), s.problem.bytes_fixed, s.problem.bytes_each
    assert f is not None and e is not None
    return f.kept + counts * e.kept, f.for_weights + counts * e.for_weights


def _memory(s: Staged) -> list[Memory]:
    """Return the memory on a device of each rank."""
    counts = np.array(s.cuts.counts)
    active = peak_bytes(s.schedule, *_kept(s))
    if s.schedule.lockstep:  # the ends' micro-batches are divided over the ranks, and kept until backward
        active += s.micro_batches / s.schedule.ranks * s.splits[0].fixed(CostKind.KEPT)
    out = []
    for r in range(s.schedule.ranks):
        mine = [k for k, rank in enumerate(s.schedule.rank_of) if rank == r]
        kinds = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 0.0)
        for k in mine:
            for many, part in [(counts[k], s.splits[k].block), *((1, end) for end in s.splits[k].ends)]:
                for kind, nbytes in part.memory.items():
                    kinds[kind] += many * nbytes
        kinds["activations"] += float(active[r])
        buffers = max(s.splits[k].buffers for k in mine)
        out.append(Memory(buffers=round(buffers), **{k: round(v) for k, v in kinds.items()}))
    return out
