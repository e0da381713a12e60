"""MG-WFBP: merges a gradient into the next one if the startup saved outweighs the wait. Shi et al., 2019."""

from __future__ import annotations

from pase.schedule.plan import BucketPlan, issue_order, whole
from pase.schedule.registry import Options, register
from pase.schedule.types import ScheduleProblem
from pase.schedule.view import can_fuse, fastest_link, ready_order, ready_s

__all__ = ["mg_wfbp"]


@register("mg_wfbp", "MG-WFBP: merge gradients where a startup saved outweighs the wait")
def mg_wfbp(problem: ScheduleProblem, options: Options) -> BucketPlan:
    """Go through the tensors in ready order and keep track of the link's time.

    The pending bucket is merged with the next tensor if that is ready before the bucket can start, or less than one
    startup later. This works with any cost curve: alpha is its value at 0 bytes.
    """
    ready = ready_s(problem)
    buckets: list[list[int]] = []
    link_free = 0.0
    members: list[int] = []
    size = 0
    for t in ready_order(problem):
        if members:
            link = fastest_link(problem, members[0])
            # start: when the pending bucket can begin. It is either merged or sent at that time.
            start = max(link_free, float(ready[members[-1]]))
            seconds = problem.message_s(link, members[0], size)
            alpha = problem.links[link].curve_for(problem.tensors[members[0]].axes).startup_s
            wait = float(ready[t]) - start
            merge = wait < seconds and wait < alpha and can_fuse(problem, members, t)
            if not merge:
                buckets.append(members)
                link_free = start + seconds
                members, size = [], 0
        members = [*members, t]
        size += problem.tensors[t].nbytes
    if members:
        buckets.append(members)
    messages = [whole(problem, b, link=fastest_link(problem, b[0])) for b in buckets]
    barrier = not any(t.follows for t in problem.tensors)
    place = [0] * len(problem.tensors)
    for i, t in enumerate(ready_order(problem)):
        place[t] = i
    return BucketPlan(policy="mg_wfbp", messages=issue_order(problem, messages, place), barrier=barrier)
