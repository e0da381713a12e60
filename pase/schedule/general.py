"""The policy ours on problems that are not plain: gathers before use, pulls after pushes, or dataflow compute.

Such problems have no heads and tails, so the evaluator judges each candidate. Candidates take the tensors in order of
need or of readiness, and fuse or cut them to a size. Then the sizes of each kind are tuned one at a time.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from pase.schedule.bound import lower_bound_s
from pase.schedule.plan import BucketPlan, Message, Piece, whole
from pase.schedule.registry import MIB
from pase.schedule.simulate import evaluate
from pase.schedule.types import ScheduleProblem, TransferGroup
from pase.schedule.view import can_fuse, fastest_link, need_order, ready_order

__all__ = ["fused_plan", "general_plan"]

CAPS = (32 * MIB, 256 * MIB, 4 * MIB, 0)
EVALUATED_TENSORS = 12_000
"""Number of tensors that all evaluations visit together, which takes about half a second."""
ENOUGH = 2.5e-4
"""The search stops at this relative gap to the bound, and smaller gains do not count."""


def fused_plan(
    problem: ScheduleProblem, caps: dict[str, int], cuts: dict[str, int], *, by_need: bool
) -> BucketPlan:
    """A plan that fuses neighbours up to caps[kind] bytes and cuts tensors above cuts[kind] bytes into equal pieces.

    by_need: whether the order is that in which compute needs the tensors, instead of that in which they become ready.
    """
    order = need_order(problem) if by_need else ready_order(problem)
    messages: list[Message] = []
    members: dict[TransferGroup, list[int]] = {}
    sizes: dict[TransferGroup, int] = {}

    def flush(group: TransferGroup) -> None:
        if ts := members.pop(group, None):
            messages.append(whole(problem, ts, link=fastest_link(problem, ts[0])))
            sizes.pop(group)

    for t in order:
        tensor = problem.tensors[t]
        group = tensor.group
        cap, cut = caps.get(tensor.kind, 0), cuts.get(tensor.kind, 0)
        if group in members and (
            sizes[group] + tensor.nbytes > cap or not can_fuse(problem, members[group], t)
        ):
            flush(group)
        if cut and tensor.nbytes > cut:
            flush(group)
            parts = -(-tensor.nbytes // cut)
            edges = [tensor.nbytes * i // parts for i in range(parts + 1)]
            messages += [
                Message(pieces=(Piece(tensor=t, offset=a, nbytes=b - a),), link=fastest_link(problem, t))
                for a, b in itertools.pairwise(edges)
            ]
            continue
        members.setdefault(group, []).append(t)
        sizes[group] = sizes.get(group, 0) + tensor.nbytes
    for group in list(members):
        flush(group)
    place = {t: i for i, t in enumerate(order)}
    messages.sort(key=lambda m: (min if by_need else max)(place[p.tensor] for p in m.pieces))
    return BucketPlan(
        policy="ours", messages=tuple(messages), dispatch="priority", detail={"caps": caps, "cuts": cuts}
    )


def general_plan(
    problem: ScheduleProblem, *, warm_starts: tuple[BucketPlan, ...] = ()
) -> tuple[BucketPlan, float, float]:
    """Returns (plan, iteration seconds, lower bound). The plan is no worse than any warm start."""
    kinds = sorted({t.kind for t in problem.tensors})
    budget = max(5, EVALUATED_TENSORS // max(1, len(problem.tensors)))
    cache: dict[tuple[object, ...], tuple[float, BucketPlan]] = {}

    def trial(caps: dict[str, int], cuts: dict[str, int], by_need: bool) -> float:
        key = (*sorted(caps.items()), *sorted(cuts.items()), by_need)
        if key not in cache and len(cache) < budget:
            plan = fused_plan(problem, caps, cuts, by_need=by_need)
            cache[key] = (evaluate(problem, plan, timeline=False, check=False).iteration_s, plan)
        return cache[key][0] if key in cache else float("inf")

    best: tuple[float, dict[str, int], dict[str, int], bool] | None = None
    bound = lower_bound_s(problem)
    enough = bound * (1 + ENOUGH)
    for by_need in (True, False):
        for cap in CAPS:
            if best is not None and best[0] <= enough:
                break
            caps, cuts = dict.fromkeys(kinds, cap), dict.fromkeys(kinds, 0)
            if best is None or (c := trial(caps, cuts, by_need)) < best[0] * (1 - ENOUGH):
                best = (trial(caps, cuts, by_need), caps, cuts, by_need)
    assert best is not None
    improved = best[0] > enough
    while improved and len(cache) < budget:
        improved = False
        for kind in kinds:
            for what in (1, 2):
                for size in (0, 1 * MIB, 8 * MIB, 16 * MIB, 64 * MIB, 128 * MIB, 512 * MIB):
                    settings = [dict(best[1]), dict(best[2])]
                    settings[what - 1][kind] = size
                    c = trial(settings[0], settings[1], best[3])
                    if c < best[0] * (1 - ENOUGH):
                        best = (c, settings[0], settings[1], best[3])
                        improved = True
    near = [x for x in cache.values() if x[0] <= best[0]]  # if several are equal, take the fewest messages
    cost, plan = min(near, key=lambda x: (len(x[1].messages), x[0]))
    for start in warm_starts:
        if start.staleness == 0 and start.period == 1:
            c = evaluate(problem, start, timeline=False).iteration_s
            if c < cost or (c <= cost and len(start.messages) < len(plan.messages)):
                cost, plan = c, start
    return replace(plan, policy="ours"), cost, bound
