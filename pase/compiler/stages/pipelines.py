"""The search over pipelines: number of ranks, number of micro-batches, mesh of each rank's devices, schedule and cuts.

Ranks, micro-batches and meshes form an outer loop over candidates. It starts with the candidate whose ranks have the
least mean work, which no schedule, cuts or splits can undercut. The loop ends when the next candidate's mean work is no
lower than the best pipeline found. Candidates whose mean work is still lower than that are then bounded again, with the
schedules' paths and each rank's memory (``bounds``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import Progress, SplitProblem
from pase.compiler.problem.spent import Spent
from pase.compiler.problem.variants import variants
from pase.compiler.stages.candidates import PipelineCandidate, TablesMade, menu_of, search_candidate
from pase.compiler.stages.chain_places import divided
from pase.compiler.stages.device_groups import arrangements, groups_of, rank_meshes
from pase.compiler.stages.replica_split import ReplicaSplit, search_replica_split
from pase.compiler.stages.search import Staged, StageMenu
from pase.errors import Infeasible, PaseError
from pase.frontends.blocks import block_ways
from pase.pipeline.registry import SCHEDULES

if TYPE_CHECKING:
    from pase.frontends.registry import Traced

__all__ = ["MICRO_BATCHES", "Pipelines", "search_pipelines"]

_MOST_RANKS = 64
MICRO_BATCHES = (1, 2, 4)
"""The numbers of micro-batches to try, as multiples of the number of ranks."""


@dataclass(kw_only=True)
class Pipelines:
    """The result of the search.

    menu: that of ``best``, which is the slowest replica if there are several.
    tried: the number of candidates.
    left: how many of them were only bounded, because the allowed work was spent.
    loose: how many of them were searched but not bounded again, for the same reason, so that their mean work is their
        bound.
    unseen: how many candidates and numbers of micro-batches for replicas were not reached at all.
    spent: all of the work.
    """

    best: Staged | None = None
    menu: StageMenu | None = None
    replica_split: ReplicaSplit | None = None
    """Replicas on the machine's groups, if they take less time than other pipelines."""
    others: dict[str, float] = field(default_factory=dict)
    """Seconds of what else was compared."""
    bound: float = math.inf
    tried: int = 0
    left: int = 0
    loose: int = 0
    unseen: int = 0
    spent: Spent = field(default_factory=Spent)
    seconds: dict[str, float] = field(default_factory=dict)


def search_pipelines(
    problem: SplitProblem,
    traced: Traced,
    options: CompileOptions,
    say: Progress,
    start: float,
    below: float = math.inf,
) -> Pipelines:
    """Return the cheapest pipeline, if it takes less than ``below`` seconds.

    start: when the compilation began, as a ``perf_counter`` time. Its time limit runs from then on; once it is over,
        the search ends with the first pipeline that it has.

    Raises Infeasible if the model cannot be cut, or if nothing fits.
    """
    _check_hands_nothing_on(traced)
    began = time.perf_counter()
    out = Pipelines(spent=Spent.within(options.work, options.time_limit, start))
    candidates = sorted(_candidates(problem, traced, options, say, out), key=lambda c: c.least)
    out.tried = len(candidates)
    out.seconds["tables"] = time.perf_counter() - began
    began = time.perf_counter()
    searched = list[tuple[PipelineCandidate, StageMenu]]()
    for i, c in enumerate(candidates):
        if c.least >= below * (1 - 1e-9):
            break
        if out.spent.over() and math.isfinite(below):
            out.left = len(candidates) - i
            break
        say(str(c))
        found, menu = search_candidate(c, below)
        searched.append((c, menu))
        if found is not None:
            out.best, out.menu, below = found, menu, found.step_s
    shares = search_replica_split(problem, traced, options, say, out.spent)
    out.unseen += shares.left
    if not candidates and not shares.found:
        raise shares.refused or Infeasible(
            f"there is no pipeline of {options.devices} devices (pipeline={options.pipeline})",
            fix="choose numbers of devices and examples that divide, and at most one rank per block",
        )
    if shares.found:
        x = min(shares.found, key=lambda x: x.step_s)
        if x.step_s < below:
            slow = max(x.replicas, key=lambda r: r.staged.step_s)
            out.others |= {} if out.best is None else {"stages on the groups": below}
            out.replica_split, out.best, out.menu, below = x, slow.staged, slow.menu, x.step_s
        else:
            out.others["replicas on the groups"] = x.step_s
    out.seconds["search"] = time.perf_counter() - began
    began = time.perf_counter()
    out.bound = min((c.least for c in candidates[len(searched) :]), default=math.inf)
    out.bound = min(out.bound, below, *(x.bound for x in shares.found), *shares.bounds)
    for c, menu in searched:
        if c.least >= out.bound:
            continue
        if out.spent.over():
            out.loose, out.bound = out.loose + 1, c.least
            continue
        say(f"a bound for {c}")
        least, found = menu.bounded(below)
        if found is not None:
            out.others |= {} if out.replica_split is None else {"replicas on the groups": below}
            out.replica_split, out.best, out.menu, below = None, found, menu, found.step_s
        out.bound = min(out.bound, max(c.least, least))
    out.bound = min(out.bound, below)
    out.seconds["bound"] = time.perf_counter() - began
    if out.best is None and math.isinf(below):
        limit = options.limit_bytes(problem.machine) or math.inf
        unseen = (
            f", and {out.unseen} were not looked at, because the allowed work was spent" if out.unseen else ""
        )
        raise Infeasible(
            f"no pipeline found{_under(options)} that fits {limit / 2**30:.4g} GiB per device{unseen}",
            fix="allow more work or time" if unseen else "use more devices or a smaller batch",
        )
    return out


def _candidates(
    problem: SplitProblem, traced: Traced, options: CompileOptions, say: Progress, out: Pipelines
) -> Iterator[PipelineCandidate]:
    """Yield the candidates, those with the fewest micro-batches per rank first, until half of the work is spent;
    at least one."""
    if problem.model.unit != "s":
        raise PaseError(
            f"a pipeline is priced in seconds, but cost model '{problem.model.name}' has none",
            fix="use cost_model='analytic', or leave out pipeline",
        )
    ways = block_ways(traced)
    blocks = ways.blocks_of(traced)
    places = divided(problem.graph, blocks)
    examples = ways.batch_size(traced)
    limited = options.limit_bytes(problem.machine) is not None
    one = not places.numbers and ways.one_loop(traced, places.blocks)
    groups = groups_of(problem, options)
    made = TablesMade(traced, blocks, problem.optimizer, keep=len(groups) > 1, spent=out.spent)
    tried = sorted(
        (
            (m / ranks, ranks, m, mesh, place)
            for ranks in _degrees(options, places.blocks)
            for m in _micro_batches(options, ranks, examples)
            for mesh in rank_meshes(groups, options, problem.devices // ranks)
            for place in arrangements(problem, groups, ranks)
        ),
        key=lambda t: t[:3],
    )
    for i, (_, ranks, m, mesh, place) in enumerate(tried):
        if i and out.spent.over(1 / 2):
            out.unseen = len(tried) - i
            return
        say(f"pricing {ranks} ranks of {'×'.join(map(str, mesh.sizes))}, {m} micro-batches")
        some = tuple(
            next(
                variants(
                    traced,
                    problem.graph,
                    replace(options, accumulate=m, once="none", regather="none"),
                    limited,
                )
            )
        )
        least = menu_of(made.all(some[:1], mesh, place.groups), m, place).least_s()
        yield PipelineCandidate(
            ranks=ranks,
            micro_batches=m,
            mesh=mesh,
            least=least,
            place=place,
            schedule="every" if one and options.stage_schedule == "auto" else options.stage_schedule,
            tables=partial(made.all, some, mesh, place.groups),
        )


def _check_hands_nothing_on(traced: Traced) -> None:
    """Raise Infeasible if a call passes values on to the next."""
    if not traced.carried:
        return
    paths = (*traced.param_paths, *traced.input_paths)
    some = ", ".join(paths[i] for i in sorted(traced.carried)[:3]) + (
        ", …" if len(traced.carried) > 3 else ""
    )
    raise Infeasible(
        f"stages cannot pass values on to the next step, but '{traced.graph.name}' does (its modules' Variables, or "
        f"carry=: {some})",
        fix="leave out pipeline (--pipeline), or write a loss that writes nothing (model.eval(), dropout by a key that "
        "is an argument, statistics that are only used)",
    )


def _degrees(options: CompileOptions, blocks: int) -> Iterator[int]:
    devices = options.devices
    if options.ranks is not None:
        if devices % options.ranks:
            raise PaseError(
                f"{options.ranks} does not divide {devices} devices",
                where="pipeline",
                fix="use a divisor of devices",
            )
        if options.ranks > blocks:
            raise Infeasible(
                f"{blocks} blocks do not fill {options.ranks} stages",
                where="pipeline",
                fix=f"use at most {blocks}",
            )
        yield options.ranks
        return
    yield from (p for p in range(2, min(devices, blocks, _MOST_RANKS) + 1) if devices % p == 0)


def _micro_batches(options: CompileOptions, ranks: int, examples: int) -> Iterator[int]:
    if options.accumulate is not None:
        if examples % options.accumulate:
            raise PaseError(
                f"a batch of {examples} is not {options.accumulate} equal micro-batches",
                where="accumulate",
                fix="use a divisor of the batch",
            )
        yield options.accumulate
        return
    yield from (ranks * k for k in MICRO_BATCHES if examples % (ranks * k) == 0 and examples >= 2 * ranks * k)


def _under(options: CompileOptions) -> str:
    """Return what the requested schedule needs, in words."""
    if options.stage_schedule == "auto":
        return ""
    d = SCHEDULES[options.stage_schedule]
    needs = " with equal stages of equal blocks, as many micro-batches as ranks or a multiple, and"
    return f" under schedule '{d.name}'{needs if d.lockstep else ''}"
