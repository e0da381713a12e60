"""The search over pipelines: number of ranks, number of micro-batches, mesh of each rank's devices, schedule and cuts.

Ranks, micro-batches and meshes form an outer loop. It starts with the candidate that has the lowest mean work of its
ranks, which no schedule, cuts or splits can undercut. The loop ends when the next one's is no lower than the best
pipeline found. What remains of the candidates before it is bounded again, now with the schedules' paths and each rank's
memory (``stage_bounds``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pase.compiler.options import CompileOptions
from pase.compiler.plans import provenance_of
from pase.compiler.problem import Progress, SplitProblem
from pase.compiler.stage_menu import StageTables
from pase.compiler.stage_places import Places, places_of
from pase.compiler.stage_search import Staged, StageMenu
from pase.compiler.variants import Variant, graph_of, variants
from pase.errors import Infeasible, PaseError
from pase.ir import Graph, digest
from pase.machine import Mesh, mesh_from, meshes
from pase.memory.account import Memory
from pase.pipeline.simulate import peak_bytes
from pase.plan.assemble import assemble, axes_by_use
from pase.plan.pipeline import PipelinePlan, StagePlan
from pase.plan.types import NodePlan, PlanData, Tried
from pase.tables.itemize import NodeCost, split_of

if TYPE_CHECKING:
    from pase.frontends.registry import Traced

__all__ = ["plan_staged", "search_pipelines"]

_MOST_RANKS = 64
_MICRO_BATCHES = (1, 2, 4)
"""The numbers of micro-batches to try, as multiples of the number of ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidate:
    """A number of ranks, a number of micro-batches and a mesh.

    least: seconds that none of its pipelines beats. tables: for each way to run the step, made on demand.
    """

    ranks: int
    micro_batches: int
    mesh: Mesh
    least: float
    tables: Callable[[], tuple[StageTables, ...]]


@dataclass(kw_only=True)
class Pipelines:
    """The result of the search. tried: candidates that were searched.

    left: those among them that were only bounded, because time ran out. unseen: candidates that were not reached at
    all.
    """

    best: Staged | None = None
    menu: StageMenu | None = None
    bound: float = math.inf
    tried: int = 0
    left: int = 0
    unseen: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def search_pipelines(
    problem: SplitProblem, traced: Traced, options: CompileOptions, say: Progress, below: float = math.inf
) -> Pipelines:
    """The cheapest pipeline, if it takes less than ``below`` seconds.

    Raises Infeasible if the model cannot be cut, or if nothing fits.
    """
    began = time.perf_counter()
    limit = options.limit_bytes(problem.machine) or math.inf
    out = Pipelines()
    half = began + options.time_limit / 2
    candidates = sorted(_candidates(problem, traced, options, say, out, half), key=lambda c: c.least)
    if not candidates:
        raise Infeasible(
            f"no pipeline of {options.devices} devices (pipeline={options.pipeline}): it takes devices and a batch "
            f"that divide, and a block for each rank"
        )
    out.tried = len(candidates)
    out.seconds["tables"] = time.perf_counter() - began
    began, end = time.perf_counter(), time.perf_counter() + options.time_limit / 2
    searched = list[tuple[_Candidate, StageMenu]]()
    for i, c in enumerate(candidates):
        if c.least >= below * (1 - 1e-9):
            break
        if time.perf_counter() > end:
            out.left = len(candidates) - i
            break
        say(f"{c.ranks} ranks of {'×'.join(map(str, c.mesh.sizes))}, {c.micro_batches} micro-batches")
        found, menu = _search(c, limit, below)
        searched.append((c, menu))
        if found is not None:
            out.best, out.menu, below = found, menu, found.step_s
    out.seconds["search"] = time.perf_counter() - began
    began = time.perf_counter()
    out.bound = min((c.least for c in candidates[len(searched) :]), default=math.inf)
    out.bound = min(out.bound, below)
    for c, menu in searched:
        seen = c.least >= out.bound or time.perf_counter() > end
        if not seen:
            say(f"a bound for {c.ranks} ranks of {'×'.join(map(str, c.mesh.sizes))}")
        out.bound = min(out.bound, c.least if seen else max(c.least, menu.bounded_s(out.bound)))
    out.seconds["bound"] = time.perf_counter() - began
    if out.best is None and math.isinf(below):
        raise Infeasible(
            f"no pipeline found that fits {limit / 2**30:.4g} GiB a device: use more devices or a smaller batch"
        )
    return out


def _candidates(
    problem: SplitProblem, traced: Traced, options: CompileOptions, say: Progress, out: Pipelines, end: float
) -> Iterator[_Candidate]:
    """Fewest micro-batches per rank first, until ``end``."""
    from pase.frontends.jax_blocks import batch_size, blocks_of

    if problem.model.unit != "s":
        raise PaseError(f"a pipeline is priced in seconds, but cost model '{problem.model.name}' has none")
    if traced.frontend != "jax":
        raise PaseError(
            f"'{traced.graph.name}' was read by the {traced.frontend} frontend: micro-batches of a pipeline need a JAX "
            f"model"
        )
    blocks = blocks_of(traced)  # type: ignore[arg-type]
    places = places_of(problem.graph, blocks)
    examples = batch_size(traced)  # type: ignore[arg-type]
    limited = options.limit_bytes(problem.machine) is not None
    graphs: dict[Variant, tuple[Graph, Places]] = {}

    def tables(variant: Variant, mesh: Mesh) -> StageTables:
        if variant not in graphs:
            graph = graph_of(traced, variant)
            graphs[variant] = graph, places_of(graph, blocks)
        return StageTables(*graphs[variant], variant, mesh, problem.model, problem.optimizer, "once")

    tried = sorted(
        (
            (m / ranks, ranks, m, mesh)
            for ranks in _degrees(options, places.blocks)
            for m in _micro_batches(options, ranks, examples)
            for mesh in _stage_meshes(problem, options, ranks)
        ),
        key=lambda t: t[:3],
    )
    for i, (_, ranks, m, mesh) in enumerate(tried):
        if time.perf_counter() > end:
            out.unseen = len(tried) - i
            return
        say(f"what {ranks} ranks of {'×'.join(map(str, mesh.sizes))} take, {m} micro-batches")
        ways = tuple(next(variants(traced, problem.graph, m, options.remat, limited, options.precision)))
        least = StageMenu([tables(ways[0], mesh)], ranks, m, math.inf).least_s()
        yield _Candidate(
            ranks=ranks, micro_batches=m, mesh=mesh, least=least, tables=partial(_tables, tables, ways, mesh)
        )


def _tables(
    made: Callable[[Variant, Mesh], StageTables], ways: tuple[Variant, ...], mesh: Mesh
) -> tuple[StageTables, ...]:
    return tuple(made(v, mesh) for v in ways)


def _degrees(options: CompileOptions, blocks: int) -> Iterator[int]:
    devices = options.devices
    if options.ranks is not None:
        if devices % options.ranks:
            raise PaseError(f"pipeline={options.ranks} does not divide {devices} devices")
        if options.ranks > blocks:
            raise Infeasible(f"{blocks} blocks do not fill {options.ranks} stages")
        yield options.ranks
        return
    yield from (p for p in range(2, min(devices, blocks, _MOST_RANKS) + 1) if devices % p == 0)


def _micro_batches(options: CompileOptions, ranks: int, examples: int) -> Iterator[int]:
    if options.accumulate is not None:
        if examples % options.accumulate:
            raise PaseError(f"a batch of {examples} is not {options.accumulate} equal micro-batches")
        yield options.accumulate
        return
    yield from (
        ranks * k for k in _MICRO_BATCHES if examples % (ranks * k) == 0 and examples >= 2 * ranks * k
    )


def _stage_meshes(problem: SplitProblem, options: CompileOptions, ranks: int) -> list[Mesh]:
    """Meshes of one rank's devices: the given one; or all devices as one axis, or one axis within a node and one across
    nodes.

    The ranks of a pipeline are the outermost axis, so that transfers between them cross the slowest link.
    """
    devices = problem.devices // ranks
    if options.mesh is not None:
        return [mesh_from(options.mesh, devices)]
    near = problem.machine.levels[0].ways or devices
    every = meshes(devices, problem.machine, min(options.max_axes, 2))
    return [m for m in every if len(m.sizes) == 1 or m.sizes[-1] <= near]


def _search(c: _Candidate, limit: float, below: float) -> tuple[Staged | None, StageMenu]:
    """The candidate's best pipeline that takes less than ``below``.

    Gathers and sums at each micro-batch take longer but need less memory. They are tried if nothing fits without them.
    """
    once = c.tables()
    for each in (False, True):
        tables = [
            *once,
            *(
                StageTables(t.graph, t.places, t.variant, t.mesh, t.model, t.optimizer, "each")
                for t in (once if each else ())
            ),
        ]
        menu = StageMenu(tables, c.ranks, c.micro_batches, limit)
        best, top, fits = None, below, False
        for d, chunks in menu.schedules():
            found, fitted = menu.staged(d, chunks, top)
            fits |= fitted
            if found is not None:
                best, top = found, found.step_s
        if fits or math.isinf(limit):
            break
    return best, menu


def plan_staged(
    problem: SplitProblem, traced: Traced, name: str, found: Pipelines, seconds: dict[str, float]
) -> PlanData:
    """The plan of what the search found: the mesh, the nodes and storage of a middle stage, with the splits of both
    ends.
    """
    s, menu = found.best, found.menu
    assert s is not None and menu is not None and s.cuts.simulated is not None and s.cuts.counts is not None
    middle = s.splits[len(s.splits) // 2]
    of = {"first": s.splits[0], "block": middle, "last": s.splits[-1]}
    t = next(t for t in menu.tables if t.variant == middle.variant)
    configs = {n.name: of[t.places.of(n.name)].configs[n.name] for n in t.graph.nodes}
    mesh = axes_by_use(t.graph, s.mesh, configs)
    bound = min(found.bound, s.step_s)
    plan = assemble(
        t.graph,
        mesh,
        configs,
        model=problem.model,
        machine=problem.machine,
        name=name,
        optimizer=problem.optimizer,
        cost=s.step_s,
        bound=bound,
        optimal=not found.unseen and bound >= s.step_s * (1 - 1e-6),
        baselines={},
        skipped={},
        tried=[Tried(mesh=s.mesh.sizes, cost=s.step_s)],
        seconds=seconds,
        provenance=provenance_of(
            t.graph,
            "stages: tables of one graph, cuts by paths",
            "paths of the schedules, with each rank's memory",
        ),
        traced=traced,
        graph_digest=digest(traced.graph),
        accumulate=s.micro_batches,
        remat=middle.variant.blocks,
    )
    memory = _memory(s)
    return replace(
        plan,
        devices=problem.devices,
        memory=max(memory, key=lambda m: m.total),
        memory_limit=None if math.isinf(menu.limit) else int(menu.limit),
        nodes=tuple(_shared(n, 1 / s.schedule.ranks) for n in plan.nodes),
        pipeline=_pipeline(s, menu, mesh, memory, found),
    )


def _shared(n: NodePlan, part: float) -> NodePlan:
    """A node's costs and work as the average per rank. Each stage lists its own memory."""
    cost = NodeCost(
        compute=n.cost.compute * part, communication=n.cost.communication * part, update=n.cost.update * part
    )
    work = tuple(replace(w, times=w.times * part, cost=w.cost * part) for w in n.work)
    return replace(n, cost=cost, work=work, keeps={}, kept_again=0)


def _pipeline(s: Staged, menu: StageMenu, mesh: Mesh, memory: list[Memory], found: Pipelines) -> PipelinePlan:
    sim, counts = s.cuts.simulated, s.cuts.counts
    assert sim is not None and counts is not None
    times = s.problem.times(np.array(counts))
    kept, waiting = _kept(s)
    places = next(t for t in menu.tables if t.variant == s.splits[len(s.splits) // 2].variant).places
    strategies = list(dict.fromkeys(s.splits))
    stages = tuple(
        StagePlan(
            rank=rank,
            blocks=n,
            strategy=strategies.index(split),
            recomputes=bool(split.variant.blocks),
            weights=split.weights,
            forward_s=float(times.forward[k]),
            backward_s=float(times.full[k] - times.forward[k]),
            memory_bytes=memory[rank].total,
            weight_s=float(times.weight[k]),
            again_s=float(times.again[k]),
            send_s=float(times.send[k]) if k < len(times.send) else 0.0,
            send_bytes=round(menu.sent_bytes(split)) if k < len(times.send) else 0,
            kept_bytes=round(kept[k]),
            waiting_bytes=round(waiting[k]),
        )
        for k, (rank, n, split) in enumerate(zip(s.schedule.rank_of, counts, s.splits, strict=True))
    )
    others = {}
    for d, chunks in menu.schedules():
        if (d.name, chunks * s.schedule.ranks) != (s.schedule.name, s.schedule.stages):
            other, _ = menu.staged(d, chunks)
            if other is not None:
                others[f"{d.name} ×{chunks}" if chunks > 1 else d.name] = other.step_s
    where = {n.name: n for n in menu.graph.nodes}
    return PipelinePlan(
        degree=s.schedule.ranks,
        chunks=s.schedule.stages // s.schedule.ranks,
        micro_batches=s.micro_batches,
        schedule=s.schedule.name,
        cuts=counts,
        bubble=sim.bubble,
        imbalance=sim.imbalance,
        cuts_bound=s.cuts.bound,
        stages=stages,
        others=others,
        strategies=tuple(
            {name: split_of(where[name], cfg, mesh) for name, cfg in split.configs.items()}
            for split in strategies
        ),
        scope=_scope(found),
        again=tuple(split.variant.blocks for split in strategies),
        before_s=tuple(map(float, times.before)),
        after_s=tuple(map(float, times.after)),
        stages_of=places.stages_of(counts),
    )


def _scope(found: Pipelines) -> str:
    left = f"; {found.left} of them were bounded only, in the time" if found.left else ""
    left += f"; {found.unseen} more were not looked at, in the time" if found.unseen else ""
    return (
        f"the bound is over {found.tried} choices of ranks, micro-batches ({', '.join(map(str, _MICRO_BATCHES))} times "
        f"the ranks, or as given) and meshes of at most two axes{left}; it holds for every cut, and every split of "
        f"each stage, under all schedules but 'circular', within the memory limit; ranks are the outermost axis"
    )


def _kept(s: Staged) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of one micro-batch on a device of each stage, float64 [stages]: until its backward, and the part of them
    that stays until its weights' gradients."""
    counts, f, e = np.array(s.cuts.counts), s.problem.bytes_fixed, s.problem.bytes_each
    assert f is not None and e is not None
    return f.kept + counts * e.kept, f.for_weights + counts * e.for_weights


def _memory(s: Staged) -> list[Memory]:
    """Memory on a device of each rank."""
    counts = np.array(s.cuts.counts)
    active = peak_bytes(s.schedule, *_kept(s))
    out = []
    for r in range(s.schedule.ranks):
        mine = [k for k, rank in enumerate(s.schedule.rank_of) if rank == r]
        kinds = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 0.0)
        for k in mine:
            for many, part in [(counts[k], s.splits[k].block), *((1, end) for end in s.splits[k].ends)]:
                for kind, nbytes in part.memory.items():
                    kinds[kind] += many * nbytes
        kinds["activations"] += float(active[r])
        buffers = max(s.splits[k].buffers() for k in mine)
        out.append(Memory(buffers=round(buffers), **{k: round(v) for k, v in kinds.items()}))
    return out
