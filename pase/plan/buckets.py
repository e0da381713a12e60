"""A plan's communication as a scheduling problem, its bucket plan, and the step that they predict.

The ``bucket_plan`` in layout.json includes the links that it was made for, so that it reads back unchanged even if the
machine file has changed. Without a stored bucket plan, the links are the machine's levels, priced by the plan's cost
model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pase.errors import Infeasible, PaseError
from pase.files.json_values import Json
from pase.ir.types import is_floating, itemsize

if TYPE_CHECKING:
    from pase.machine import CostModel
    from pase.plan.communication import CurveOf
    from pase.plan.types import PlanData
    from pase.replay.types import Timeline
    from pase.schedule.plan import BucketPlan
    from pase.schedule.registry import Options
    from pase.schedule.types import Link, ScheduleProblem

P = TypeVar("P", bound="PlanData")

__all__ = [
    "curves_of",
    "holding",
    "model_of",
    "problem_of",
    "read_buckets",
    "schedule_of",
    "scheduled",
    "timeline_of",
    "with_buckets",
]


def model_of(plan: PlanData) -> CostModel | None:
    """Return the cost model of a plan, on its machine.

    None if the machine is not the one that the plan was made for (the file has changed since, or is not available
    here), or if costs are not in seconds.
    """
    from pase import costmodels
    from pase.machine import load

    if plan.unit != "s":
        return None
    try:
        machine = load(plan.machine)
    except PaseError:
        return None
    return costmodels.get(plan.cost_model, machine) if machine.digest == plan.machine_digest else None


def curves_of(plan: PlanData) -> CurveOf | None:
    """Return a link and a cost curve for each kind of collective over mesh axes; None if ``model_of`` is None."""
    from pase.plan.communication import curves_from_model

    model = model_of(plan)
    return None if model is None else curves_from_model(model, model.machine, plan.mesh)


def problem_of(plan: PlanData, *, links: tuple[Link, ...] = ()) -> ScheduleProblem:
    """Return the plan's communication as a scheduling problem. links: replace those of the machine.

    Raises Infeasible if no collective is on a parameter, so that there is nothing to schedule.
    """
    from pase.plan.communication import communication_problem

    plan.check_emitted()
    where = f"the plan for '{plan.model}'"
    return communication_problem(plan, where=where, links=links, curve_of=None if links else curves_of(plan))


def scheduled(
    plan: PlanData, *, policy: str = "ours", options: Options | None = None
) -> tuple[ScheduleProblem, BucketPlan] | None:
    """Return (problem, bucket plan in one fixed order), or None if there is nothing to schedule."""
    from pase.schedule.registry import Options, get_policy
    from pase.schedule.simulate import as_sequence

    try:
        problem = problem_of(plan)
    except Infeasible:
        return None
    return problem, as_sequence(problem, get_policy(policy).make(problem, options or Options()))


def holding(plan: P, problem: ScheduleProblem, buckets: BucketPlan) -> P:
    """Return the plan with a bucket plan in it, as layout.json has it. problem: the plan's communication."""
    from pase.schedule.io import plan_to_json
    from pase.schedule.simulate import evaluate

    e = evaluate(problem, buckets)
    figures = {
        "iteration_s": e.iteration_s,
        "compute_s": e.compute_s,
        "exposed_s": e.exposed_s,
        "staleness": e.staleness,
        "updates_per_iteration": e.updates_per_iteration,
        "waiting_bytes": _waiting_bytes(plan, problem, buckets),
    }
    return replace(plan, buckets=plan_to_json(problem, buckets, evaluation=figures, link_costs=True))


def read_buckets(plan: PlanData, data: Json, where: str) -> tuple[ScheduleProblem, BucketPlan]:
    """Read what ``holding`` wrote, for this plan. Raises PaseError if it does not match the plan."""
    from pase.plan.communication import communication_problem
    from pase.schedule.io import links_from_json, plan_from_json

    links = links_from_json(data, where=where)
    try:
        problem = communication_problem(plan, where=where, links=links)
    except Infeasible as e:
        raise PaseError(
            "there is a bucket plan, but the layout has no collective on a parameter",
            where=where,
            fix="remove bucket_plan from the layout",
        ) from e
    return problem, plan_from_json(data, problem, where=where)


def schedule_of(plan: PlanData) -> tuple[ScheduleProblem, BucketPlan] | None:
    """Return the bucket plan that the plan holds, or else ours. None if there is nothing to schedule."""
    if plan.buckets is not None:
        return read_buckets(plan, plan.buckets, f"the plan for '{plan.model}', at bucket_plan")
    return scheduled(plan)


def _waiting_bytes(plan: PlanData, problem: ScheduleProblem, buckets: BucketPlan) -> int:
    """Return the bytes of gradients that a device holds between steps because the bucket plan applies them later.

    A gradient to which others are added has the dtype in which its parameter is stored. Other gradients have the dtype
    in which they are sent. So do all gradients if the plan was loaded without its model, because only the model says
    what is cast. Gradients that no message carries are stored in the layout of their parameters' states.
    """
    from pase.plan.communication import transfer_origins

    tensors = {} if plan.traced is None else plan.graph.tensors
    left = {name: p for name, p in plan.parameters.items() if is_floating(p.dtype)}
    added = whole = 0
    for t, origin in zip(problem.tensors, transfer_origins(plan), strict=True):
        if not origin.gradient:
            continue
        left.pop(origin.source, None)
        if not t.follows:
            ratio = itemsize(t.dtype) / tensors[origin.tensor].itemsize if origin.tensor in tensors else 1
            added, whole = added + round(t.nbytes * ratio), whole + t.nbytes
    own = sum(p.local_bytes(plan.mesh, p.state) for p in left.values())
    return buckets.waiting(added + own, whole + own)


def with_buckets(plan: P, *, policy: str = "ours", options: Options | None = None) -> P:
    """Return the plan with a bucket plan in it, which ``save`` writes. Unchanged if there is nothing to schedule."""
    made = scheduled(plan, policy=policy, options=options)
    return plan if made is None else holding(plan, *made)


def timeline_of(problem: ScheduleProblem, buckets: BucketPlan) -> Timeline:
    """Return the steady-state step as `pase replay` reads it: compute on one lane, and each link on its own lane.

    A step ends when its last block ends. Whatever a link is still sending then is also shown at the beginning, as the
    rest of the previous step. A block has the correlation of the last message that arrived of those that it needed.
    """
    from pase.replay.types import OPERATIONS, Event, Group, Mark, from_events
    from pase.schedule.simulate import evaluate

    e = evaluate(problem, buckets)
    end_ns = max(round(e.iteration_s * buckets.period * 1e9), 1)
    events, groups = [], dict[str, Group]()
    blocks = {b.name: k for k, b in enumerate(problem.blocks)}
    arrived: dict[int, list[tuple[int, int]]] = {}
    for i in sorted(e.timeline, key=lambda i: i.message is None):  # messages first: blocks refer to them
        start, stop = max(round(i.start_s * 1e9), 0), min(round(i.end_s * 1e9), end_ns)
        if stop <= start:
            continue
        if i.message is None:
            gathered = [x for x in arrived.get(blocks[i.name], ()) if x[0] <= start + 1]
            events.append(
                Event(
                    rank=0,
                    lane="compute",
                    device=True,
                    kind="kernel",
                    name=i.name,
                    start_ns=start,
                    duration_ns=stop - start,
                    correlation=max(gathered, default=(0, -1))[1],
                    iteration=0,
                )
            )
            continue
        m = buckets.messages[i.message]
        t = problem.tensors[m.pieces[0].tensor]
        for block in {problem.tensors[piece.tensor].needed_before for piece in m.pieces} - {None}:
            assert block is not None
            arrived.setdefault(block, []).append((stop, len(events)))
        over = ",".join(t.axes.names)
        if over:
            groups.setdefault(over, Group(name=over))
        events.append(
            Event(
                rank=0,
                lane=i.resource,
                device=True,
                kind="collective",
                name=f"{t.kind}: {i.name}",
                start_ns=start,
                duration_ns=stop - start,
                correlation=len(events),
                nbytes=m.nbytes,
                operation=t.kind if t.kind in OPERATIONS else "",
                group=over,
                iteration=0,
            )
        )
    return from_events(
        events,
        groups=tuple(groups.values()),
        marks=(Mark(rank=0, iteration=0, start_ns=0, end_ns=end_ns),),
    )
