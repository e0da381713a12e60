"""A plan's communication as a scheduling problem: each collective, when it can start, and what waits for it.

The input is the plan's nodes with their costs, and its collectives. The problem is derived as follows:

- Nodes run in the listed order, one micro-batch after the other: forward, then backward. Neighbors that run equally
  often in a micro-batch, and more than once, form a repeated layer and alternate. Forward and backward take what the
  plan lists as their work. If the plan lists none, forward takes a third of a node's compute and backward two thirds
  (one product for each operand). If the plan's price overlaps collectives with compute, compute is slower by the part
  of the device that they occupy. An optimizer update is charged to the forward block that uses the parameter, which
  would wait for a late gradient. Adding up the gradients of micro-batches is charged to the backward block that makes
  them.
- A collective on a tensor that a parameter node makes can be scheduled. In backward it synchronizes a gradient. It is
  ready after its node's backward, and the next collective on the same tensor follows it. In forward it gathers a
  parameter. It is needed before its node's forward of the next iteration, and it starts after the gradient is
  synchronized and the parameter updated. A second gather in the same pass gathers the parameter for backward of the
  same iteration; it starts in backward, one message ahead of its use, because it would take memory before. A gather of
  an updated parameter (phase "update") is needed by its first user in the next forward, one layer's part at a time.
- A micro-batch begins when the previous one has ended, with everything that it sends. A gather that is repeated in each
  micro-batch starts in its own, and the sums of its gradients end there. Hoisted collectives run once per step: gathers
  in the first micro-batch, sums in the last.
- Any other collective comes between one op and the next, so it counts as time on the compute stream.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pase.errors import Infeasible, PaseError
from pase.machine import CollectiveKind, CostModel, Machine, Mesh
from pase.plan.types import NodePlan, PlanData
from pase.schedule.types import AxisGroup, ComputeBlock, Link, ScheduleProblem, SendTime, Transfer
from pase.tables.itemize import Collective

__all__ = [
    "CurveOf",
    "TransferOrigin",
    "communication_problem",
    "curves_from_model",
    "middle_run",
    "transfer_origins",
]

CurveOf = Callable[[CollectiveKind, tuple[str, ...]], tuple[str, SendTime]]
"""(kind, axes) -> (name of the link it runs on, its cost curve)."""

FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, kw_only=True)
class _Execution:
    """One execution of a node. repeat: its index among the node's executions."""

    node: str
    repeat: int


@dataclass(frozen=True, kw_only=True)
class TransferOrigin:
    """The collective of the step from which a tensor of the scheduling problem comes.

    node, source, tensor: those of the plan's collective.
    gradient: whether it sums a gradient.
    stage: the index among the collectives of this tensor for this node, from 0.
    repeat: the index of the node's run.
    times: how often the node runs.
    recompute: 0 for the first time in a run.
    updated: whether it gathers a parameter after its update, before the step reads it.
    """

    node: str
    source: str
    tensor: str
    gradient: bool
    stage: int
    repeat: int
    times: int
    recompute: int = 0
    updated: bool = False


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """The order of a step's blocks.

    forward, backward: execution -> its block.
    begins: the first block of each micro-batch.
    """

    forward: Mapping[_Execution, int]
    backward: Mapping[_Execution, int]
    begins: Sequence[int]


def runs_in_each(times: int, micro_batches: int) -> int:
    """Return how often a node runs in each micro-batch, given its runs in a step; all runs if that does not divide."""
    return times if times % micro_batches else times // micro_batches


def middle_run(times: int, micro_batches: int) -> int:
    """Return the index of the middle run in the middle micro-batch, for a node with this many runs in a step."""
    each = runs_in_each(times, micro_batches)
    return times // each // 2 * each + each // 2


_MOST_RUNS = 1_000_000


def communication_problem(
    plan: PlanData, *, where: str, links: tuple[Link, ...] = (), curve_of: CurveOf | None = None
) -> ScheduleProblem:
    """Return the step's communication as a scheduling problem.

    where: names the plan in errors.
    links: replace the links that the plan implies; every link then carries every group.
    curve_of: prices a kind of collective over axes. If None, the (bytes, cost) pairs in the plan give the prices.

    Raises PaseError if costs are not in seconds, and Infeasible if there is nothing to schedule, if there is too much
    to list, or if the plan is of a whole step.
    """
    if plan.unit != "s":
        raise PaseError(
            f"the plan's costs are in {plan.unit}, not seconds",
            where=where,
            fix="compile it with --cost-model analytic",
        )
    if plan.whole_step:
        raise Infeasible(
            "the plan is of a whole step, which sums its own gradients; a bucket plan is made for a loss",
            where=where,
            fix="compile the loss instead",
        )
    turns = sum(n.times for n in plan.nodes)
    if turns > _MOST_RUNS:
        raise Infeasible(
            f"the layers run {turns} times in a step; a bucket plan lists each run, up to {_MOST_RUNS}",
            where=where,
        )
    nodes = {n.name: n for n in plan.nodes}
    times = {n.name: n.times for n in plan.nodes}
    parameters = {n.name for n in plan.nodes if n.op == "parameter"}
    fixed = [c for c in plan.collectives if c.source not in parameters and c.node in times]
    schedulable = list(_scheduled(plan))

    extra = {(phase, n): 0.0 for phase in ("forward", "backward") for n in times}
    for c in fixed:
        extra["forward" if c.phase == "forward" else "backward", c.node] += c.cost / times[c.node]
    updates = _updates(schedulable, nodes, parameters)
    compute = {(phase, n.name): s for n in plan.nodes for phase, s in _passes(n).items()}
    slower = _slower(plan, schedulable, compute, parameters)

    def seconds(p: _Execution, phase: str) -> float:
        update = updates.get(p.node, 0.0) if phase == "forward" else nodes[p.node].cost.update / times[p.node]
        return slower[phase] * compute[phase, p.node] / times[p.node] + extra[phase, p.node] + update

    runs = _runs(plan)
    blocks: dict[int, ComputeBlock] = {}
    for p, i in runs.forward.items():
        blocks[i] = ComputeBlock(name=_name(p, times), phase="forward", seconds=seconds(p, "forward"))
    for p, i in runs.backward.items():
        blocks[i] = ComputeBlock(name=f"{_name(p, times)}'", phase="backward", seconds=seconds(p, "backward"))
    dtypes = {path: t.dtype for path, t in plan.parameters.items()}
    tensors = _one_ahead(_tensors(schedulable, times, runs, dtypes), runs, plan.bucket_bytes)
    if not tensors:
        raise Infeasible("no collective is on a parameter, so there is nothing to schedule", where=where)
    in_order = tuple(b for _, b in sorted(blocks.items()))
    return ScheduleProblem(
        name=f"{plan.model} on {plan.devices} devices",
        blocks=in_order,
        tensors=tuple(tensors),
        links=links or _links(tensors, schedulable, curve_of),
        source=where,
        held_s=sum(b.seconds for b in in_order) - plan.compute,
    )


def transfer_origins(plan: PlanData) -> list[TransferOrigin]:
    """Return the collective of the step for each tensor of the plan's scheduling problem, in order."""
    times = {n.name: n.times for n in plan.nodes}
    return [o for _, o in _tensors(list(_scheduled(plan)), times, _runs(plan), {})]


def _scheduled(plan: PlanData) -> Iterator[Collective]:
    """Return the collectives of parameters, each at the node that uses it."""
    times = {n.name: n.times for n in plan.nodes}
    parameters = {n.name for n in plan.nodes if n.op == "parameter"}
    mine = [c for c in plan.collectives if c.source in parameters and c.node in times]
    return _gathers_with_users(mine, parameters, times, plan.accumulate)


def _passes(n: NodePlan) -> dict[str, float]:
    """Return the seconds of a node's compute in forward and backward; recomputation is part of backward."""
    if not n.work:
        return {"forward": FORWARD_SHARE * n.cost.compute, "backward": (1 - FORWARD_SHARE) * n.cost.compute}
    forward = sum((1 - w.late) * w.cost for w in n.work if w.phase == "forward")
    return {"forward": forward, "backward": n.cost.compute - forward}


def _slower(
    plan: PlanData,
    moved: Sequence[Collective],
    compute: Mapping[tuple[str, str], float],
    parameters: Collection[str],
) -> dict[str, float]:
    """Return the factor by which each pass is slower while collectives of parameters hold a part of the device."""
    hold = plan.overlap or 0.0
    times = {n.name: n.times for n in plan.nodes}
    overlapped = {"forward": 0.0, "backward": 0.0}
    for c in moved:
        recompute = 1 - times[c.node] / c.times if c.phase == "forward" and c.times > times[c.node] else 0.0
        overlapped["backward" if c.phase == "backward" else "forward"] += (1 - recompute) * c.cost
        overlapped["backward"] += recompute * c.cost
    out = {}
    for phase, sent in overlapped.items():
        alone = sum(s for (when, node), s in compute.items() if when == phase and node not in parameters)
        out[phase] = min(1 + hold * sent / alone, 1 / (1 - hold)) if alone and hold < 1 else 1.0
    return out


def _name(p: _Execution, times: dict[str, int]) -> str:
    return f"{p.node}[{p.repeat}]" if times[p.node] > 1 else p.node


def _runs(plan: PlanData) -> _Runs:
    """Return the nodes in the order in which they run, with repeated layers unrolled, one micro-batch after the other.

    A node that does not run in each micro-batch runs in the first.
    """
    nodes = [n for n in plan.nodes if n.op != "parameter"]
    forward, backward, begins = dict[_Execution, int](), dict[_Execution, int](), list[int]()
    for m in range(plan.accumulate):
        mine = []
        for times, layer in itertools.groupby(nodes, key=lambda n: n.times):
            names, each = [n.name for n in layer], runs_in_each(times, plan.accumulate)
            iterations = range(m * each, min((m + 1) * each, times))
            mine += [_Execution(node=name, repeat=r) for r in iterations for name in names]
        begins.append(len(forward) + len(backward))
        forward |= zip(mine, itertools.count(begins[-1]))
        backward |= zip(reversed(mine), itertools.count(begins[-1] + len(mine)))
    return _Runs(forward=forward, backward=backward, begins=begins)


def _gathers_with_users(
    collectives: list[Collective], parameters: set[str], times: dict[str, int], micro_batches: int
) -> Iterator[Collective]:
    """Yield the collectives, with gathers of updated parameters assigned to the first users in the first micro-batch.

    The plan lists these gathers with the parameters.
    """
    users: dict[str, Collective] = {}
    for c in collectives:
        if c.node not in parameters:
            users.setdefault(c.source, c)
    for c in collectives:
        if c.node not in parameters:
            yield c
        elif c.source in users:
            user = users[c.source]
            n = max(times[user.node] // micro_batches, 1)
            yield replace(
                c, node=user.node, tensor=user.tensor, phase="update", nbytes=c.nbytes // n, times=n
            )


def _updates(
    collectives: list[Collective], nodes: dict[str, NodePlan], parameters: set[str]
) -> dict[str, float]:
    """Return the update seconds per execution of the node that uses each parameter.

    If several nodes use a parameter, the first one counts.
    """
    user: dict[str, str] = {}
    for c in collectives:
        user.setdefault(c.source, c.node)
    out: dict[str, float] = {}
    for p in parameters:
        if p in user:
            u, cost = user[p], nodes[p].cost
            out[u] = out.get(u, 0.0) + (cost.update + cost.compute) / nodes[u].times
    return out


def _key(c: Collective) -> AxisGroup:
    """Return what determines the price of a collective: its axes and its kind."""
    return AxisGroup(c.axes, c.kind)


def _tensors(
    collectives: list[Collective],
    times: dict[str, int],
    runs: _Runs,
    dtypes: dict[str, str],
) -> list[tuple[Transfer, TransferOrigin]]:
    """Return the tensors in an order in which each depends only on earlier ones."""
    groups: dict[tuple[str, str, str], list[Collective]] = {}
    for c in collectives:
        groups.setdefault((c.node, c.source, c.tensor), []).append(c)
    out: list[tuple[Transfer, TransferOrigin]] = []
    for (node, source, tensor), members in groups.items():
        many, begins = times[node], runs.begins
        each = runs_in_each(many, len(begins))
        start = TransferOrigin(
            node=node, source=source, tensor=tensor, gradient=True, stage=0, repeat=0, times=many
        )
        for iteration in range(each):
            used = [
                _Execution(node=node, repeat=r) for r in range(iteration, many, each)
            ]  # one in each micro-batch
            names = [f"{source}[{p.repeat}]" if many > 1 else source for p in used]
            gathered = [[c for c in members if c.phase != "backward" and p.repeat < c.times] for p in used]
            last: int | None = None
            for m, (p, name) in enumerate(zip(used, names, strict=True)):
                stages = [c for c in members if c.phase == "backward" and p.repeat >= many - c.times]
                due = (None if gathered[0] else runs.forward[used[0]], 1)
                if m + 1 < len(used):  # before the next micro-batch begins
                    due = begins[m + 1], 0
                origin = replace(start, repeat=p.repeat)
                last = _sums(out, stages, name, dtypes.get(source, "float32"), runs.backward[p], due, origin)
            for m, (p, name) in enumerate(zip(used, names, strict=True)):
                after = None if m == 0 else begins[m] - 1
                at, origin = (
                    (runs.forward[p], runs.backward[p]),
                    replace(start, repeat=p.repeat, gradient=False),
                )
                follows = last if m == 0 else None
                _gathers(out, gathered[m], name, dtypes.get(source, "float32"), at, (after, follows), origin)
    return _named_apart(out)


def _one_ahead(
    tensors: list[tuple[Transfer, TransferOrigin]], runs: _Runs, bucket_bytes: float
) -> list[Transfer]:
    """Return the tensors, with what is gathered again starting when the message before it is needed.

    A device then has one message more than it uses. The first starts when forward has ended. bucket_bytes: the size of
    a message; 0 for one tensor each.
    """
    out = [t for t, _ in tensors]
    ends = (*runs.begins[1:], len(runs.forward) + len(runs.backward))
    turns = [(begin + end) // 2 for begin, end in zip(runs.begins, ends, strict=True)]
    messages: dict[
        tuple[object, ...], tuple[int, int, float]
    ] = {}  # (ready after, needed before, bytes) of the last
    again = [(t.needed_before, i) for i, (t, o) in enumerate(tensors) if o.recompute and t.needed_before]
    for needed, i in sorted(again):
        m = bisect_right(turns, needed) - 1
        key = m, out[i].axes, tensors[i][1].recompute
        ready, first, nbytes = messages.get(key, (turns[m] - 1, needed, 0.0))
        if nbytes and nbytes >= bucket_bytes:
            ready, first, nbytes = first - 1, needed, 0.0
        messages[key] = ready, first, nbytes + out[i].nbytes
        out[i] = replace(out[i], ready_after=ready)
    return out


def _named_apart(
    tensors: list[tuple[Transfer, TransferOrigin]],
) -> list[tuple[Transfer, TransferOrigin]]:
    """Return the same, with a number added to names that occur several times, because bucket plans refer to names.

    A name occurs several times if several nodes read one parameter.
    """
    used: set[str] = set()
    out = []
    for t, origin in tensors:
        free = (f"{t.name}.{k}" if k else t.name for k in itertools.count())
        name = next(n for n in free if n not in used)
        used.add(name)
        out.append((t if name == t.name else replace(t, name=name), origin))
    return out


def _sums(
    out: list[tuple[Transfer, TransferOrigin]],
    stages: list[Collective],
    name: str,
    dtype: str,
    ready: int,
    due: tuple[int | None, int],
    origin: TransferOrigin,
) -> int | None:
    """Add a gradient's sum, stage by stage, from the block that makes it to the one that needs it.

    Returns the last stage.

    due: the block that needs it, and how many iterations later.
    """
    needed, lag = due
    last: int | None = None
    for i, c in enumerate(stages):
        transfer = Transfer(
            name=f"{name}.grad.{c.kind}" + (f".{i}" if i else ""),
            nbytes=c.nbytes,
            ready_after=ready if last is None else None,
            needed_before=needed if i + 1 == len(stages) else None,
            lag=lag,
            kind=c.kind,
            axes=_key(c),
            dtype=dtype,
            follows=() if last is None else (last,),
        )
        last = len(out)
        out.append((transfer, replace(origin, stage=i)))
    return last


def _gathers(
    out: list[tuple[Transfer, TransferOrigin]],
    stages: list[Collective],
    name: str,
    dtype: str,
    at: tuple[int, int],
    after: tuple[int | None, int | None],
    origin: TransferOrigin,
) -> None:
    """Add a parameter's gather for forward, and the repeated ones for backward, each stage by stage.

    at: the blocks of forward and of backward that need it.
    after: the block after which it starts, and the previous step's sum of its gradient if the gather follows it.
    """
    ready, last = after
    lag = 0 if last is None else 1
    before: dict[int, int] = {}  # the previous stage of each repetition of the gather
    for i, c in enumerate(stages):
        stage = f"{name}.{c.kind}" + (f".{i}" if i else "")
        earlier = sum(b.phase == c.phase for b in stages[:i])
        at_stage = replace(origin, stage=earlier, updated=c.phase == "update")
        first = Transfer(
            name=stage,
            nbytes=c.nbytes,
            ready_after=ready,
            needed_before=at[0],
            lag=lag,
            kind=c.kind,
            axes=_key(c),
            dtype=dtype,
            follows=() if last is None else (last,),
        )
        last = len(out)
        out.append((first, at_stage))
        for k in range(1, round(c.times / origin.times)):
            follows = (before[k],) if k in before else ()
            before[k] = len(out)
            regather = replace(first, ready_after=at[0], needed_before=at[1], lag=0, follows=follows)
            out.append((replace(regather, name=f"{stage}.again{k}"), replace(at_stage, recompute=k)))


def _links(
    tensors: list[Transfer], collectives: list[Collective], curve_of: CurveOf | None
) -> tuple[Link, ...]:
    """Return one link for each name that the groups run on, with a curve for each group."""
    curves: dict[str, dict[AxisGroup, SendTime]] = {}
    for key in sorted({t.axes for t in tensors}, key=str):
        mine = [c for c in collectives if _key(c) == key]
        if curve_of is not None:
            name, curve = curve_of(mine[0].kind, mine[0].axes)
        else:
            run = [c for c in mine if c.times]  # the others are in a branch that is never taken, at no cost
            points = sorted({c.nbytes: c.cost / c.times for c in run}.items()) or [(mine[0].nbytes, 0.0)]
            name, curve = "network", SendTime.table([p[0] for p in points], [p[1] for p in points])
        curves.setdefault(name, {})[key] = curve
    return tuple(
        Link(name=name, curve=next(iter(by.values())), by_axes=by, axes=tuple(by))
        for name, by in curves.items()
    )


SIZES = tuple(float(2**k) for k in range(8, 35))


def curves_from_model(model: CostModel, machine: Machine, mesh: Mesh) -> CurveOf:
    """Return the cost curves of a CostModel, evaluated at powers of two.

    The link is the outermost level that the axes cross. Devices are numbered row-major, so axes extend as far as the
    widest stride times size. A level covers the product of the sizes of all levels up to it.
    """

    def curve_of(kind: CollectiveKind, axes: tuple[str, ...]) -> tuple[str, SendTime]:
        bits = sum(1 << mesh.names.index(a) for a in axes)
        seconds = model.collective(kind, mesh, np.full(len(SIZES), bits), np.asarray(SIZES))
        reach = max(mesh.strides[mesh.names.index(a)] * mesh.sizes[mesh.names.index(a)] for a in axes)
        span, name = 1, machine.levels[-1].name
        for level in machine.levels:
            span *= level.ways or 1 << 62
            if reach <= span:
                name = level.name
                break
        return name, SendTime.table(SIZES, np.ravel(seconds).tolist())

    return curve_of
