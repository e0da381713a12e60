"""Views of a problem for policies: when each tensor is ready, and how much compute waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pase.errors import PaseError
from pase.once import once
from pase.schedule.types import ScheduleProblem

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = [
    "PlainView",
    "can_fuse",
    "fastest_link",
    "need_order",
    "plain_view",
    "positions",
    "ready_order",
    "ready_s",
]


@dataclass(frozen=True, kw_only=True)
class PlainView:
    """A plain problem as heads and tails, in seconds.

    Time 0 is the start of the first block that makes a gradient, and iterations are cut there.

    ready: float64 [T], when each tensor is ready.
    tail: float64 [T], compute from the block that needs the tensor to the end of the iteration.
    compute: compute of the iteration.
    nbytes: float64 [T].

    An iteration takes max(compute, max over messages of end + tail).
    """

    ready: np.ndarray
    tail: np.ndarray
    compute: float
    nbytes: np.ndarray


def plain_view(problem: ScheduleProblem) -> PlainView:
    """The heads and tails of a plain problem. Raises PaseError for any other problem."""
    if not problem.is_plain:
        raise PaseError(
            "the problem is not plain gradient synchronisation, so it has no heads and tails",
            where=f"problem '{problem.name}'",
            fix="use a policy for gathers, pulls or dataflow",
        )
    seconds = np.asarray([b.seconds for b in problem.blocks])
    after = np.asarray([t.ready_after for t in problem.tensors], int)
    before = np.asarray([t.needed_before for t in problem.tensors], int)
    cut = int(after.min()) if after.size else 0
    upto = np.concatenate(([0.0], np.cumsum(seconds)))
    return PlainView(
        ready=upto[after + 1] - upto[cut],
        tail=upto[cut] - upto[before],
        compute=float(seconds.sum()),
        nbytes=np.asarray([t.nbytes for t in problem.tensors], float),
    )


def ready_s(problem: ScheduleProblem) -> np.ndarray:
    """The earliest time at which each tensor can be ready if compute never waits, from the iteration's start."""
    upto = np.cumsum([b.seconds for b in problem.blocks])
    out = np.zeros(len(problem.tensors))
    for i, t in enumerate(problem.tensors):
        out[i] = max(
            [
                0.0 if t.ready_after is None else float(upto[t.ready_after]),
                *(float(out[f]) for f in t.follows),
            ]
        )
    return out


@once
def positions(problem: ScheduleProblem) -> tuple[list[int], list[int]]:
    """For each tensor, the block that it is ready after (-1 for the start) and the block that it is needed before.

    The latter counts on into the next iteration: block b of the next iteration is b + number of blocks.
    """
    n = len(problem.blocks)
    ready: list[int] = []
    for t in problem.tensors:
        ready.append(max([-1 if t.ready_after is None else t.ready_after, *(ready[f] for f in t.follows)]))
    need = [t.lag * n + (n if t.needed_before is None else t.needed_before) for t in problem.tensors]
    for i in reversed(range(len(need))):
        for f in problem.tensors[i].follows:
            need[f] = min(need[f], need[i])
    return ready, need


def ready_order(problem: ScheduleProblem) -> list[int]:
    """The tensors in the order in which they become ready, but none before a tensor that it follows.

    Among equals, the later one in the list comes first, because autograd visits parameters in reverse.
    """
    ready, need = positions(problem)
    depth: list[int] = []
    for t in problem.tensors:
        depth.append(max((depth[f] + 1 for f in t.follows), default=0))
    return sorted(range(len(ready)), key=lambda i: (ready[i], depth[i], -need[i], -i))


def need_order(problem: ScheduleProblem) -> list[int]:
    """The tensors in the order in which compute waits for them, but none before a tensor that it follows.

    Equal ones keep the order of the list.
    """
    _, need = positions(problem)
    depth: list[int] = []
    for t in problem.tensors:
        depth.append(max((depth[f] + 1 for f in t.follows), default=0))
    return sorted(range(len(need)), key=lambda i: (need[i], depth[i], i))


@once
def stages(problem: ScheduleProblem) -> list[int]:
    """For each tensor, the length of the chain of tensors that it follows if its group is in a cycle; otherwise 0.

    A group is in a cycle if it follows itself, directly or through other groups. Messages of one group and one stage
    can be fused freely: messages can only form a cycle if groups do.
    """
    if not any(t.follows for t in problem.tensors):
        return [0] * len(problem.tensors)
    import networkx as nx

    graph: nx.DiGraph[Hashable] = nx.DiGraph()
    depth: list[int] = []
    for t in problem.tensors:
        depth.append(max((depth[f] + 1 for f in t.follows), default=0))
        graph.add_node(t.group)
        graph.add_edges_from((problem.tensors[f].group, t.group) for f in t.follows)
    circles = [c for c in nx.strongly_connected_components(graph) if len(c) > 1]
    circular = {g for c in circles for g in c} | {g for g in graph if graph.has_edge(g, g)}
    return [d if t.group in circular else 0 for t, d in zip(problem.tensors, depth, strict=True)]


def can_fuse(problem: ScheduleProblem, tensors: list[int], more: int) -> bool:
    """Whether tensor `more` may be fused with these tensors.

    All must be of one group, none may be needed before another is ready in the same iteration, and messages must not
    be able to wait for each other in a cycle.
    """
    if problem.tensors[tensors[0]].group != problem.tensors[more].group:
        return False
    stage = stages(problem)
    if any(stage[t] != stage[more] for t in tensors):
        return False
    if problem.tensors[more].lag == 1 and all(problem.tensors[t].lag == 1 for t in tensors):
        return True
    ready, need = positions(problem)
    members = [*tensors, more]
    if len({problem.tensors[t].lag for t in members}) > 1:
        return False
    return max(ready[t] for t in members) < min(need[t] for t in members)


def fastest_link(problem: ScheduleProblem, tensor: int) -> int:
    """The link on which the whole tensor takes the least time."""
    return min(
        problem.links_for(tensor), key=lambda k: problem.message_s(k, tensor, problem.tensors[tensor].nbytes)
    )
