"""The bucket plan that a policy returns: messages, their links and order, and when updates are applied."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.schedule.types import ScheduleProblem

__all__ = ["BucketPlan", "Message", "Piece", "Update", "check_plan", "check_updates", "issue_order", "whole"]


_SHOWN = 8
"""Number of tensors that a notebook lists per message."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Bytes [offset, offset + nbytes) of one tensor."""

    tensor: int
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Message:
    """One collective: pieces that are fused into one buffer and sent on one link.

    update: index of the plan's update whose gradients the message carries.
    hold_s: the message is issued this many seconds after its last piece is ready (Horovod's cycle).
    iteration, phase: the message is not issued before this phase of the iteration that comes this many iterations after
        the update's last gradient was made. phase None: as soon as it is ready.
    """

    pieces: tuple[Piece, ...]
    link: int = 0
    update: int = 0
    hold_s: float = 0.0
    iteration: int = 0
    phase: Literal["forward", "backward"] | None = None

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.pieces)


@dataclass(frozen=True, kw_only=True)
class Update:
    """Applies the mean gradient of iterations first..last of a period after iteration ``at``.

    The plain update is (0, 0, 0). If at > last, the update is delayed. If last > first, batches are merged.
    """

    first: int = 0
    last: int = 0
    at: int = 0

    @property
    def batches(self) -> int:
        return self.last - self.first + 1

    @property
    def staleness(self) -> int:
        """Age in iterations of the oldest gradient when it is applied; 0 for the plain update."""
        return self.at - self.first


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Messages in the order in which every rank issues them.

    dispatch: "sequence": each link sends its messages strictly in this order, as on devices. "priority": each link
        sends the first message that is ready, so a message's position is its priority.
    credit_bytes: bytes that a link may have accepted at once under "priority" (ByteScheduler); 1 for one message.
    barrier: if True, the next forward starts only when every message of the update has arrived (optimizer.step()).
    period: number of iterations after which the plan repeats. The updates cover it without gaps or overlaps.
    """

    policy: str
    messages: tuple[Message, ...]
    dispatch: Literal["sequence", "priority"] = "sequence"
    credit_bytes: int = 1
    barrier: bool = False
    period: int = 1
    updates: tuple[Update, ...] = (Update(),)
    detail: JsonObject = field(default_factory=dict)

    @property
    def staleness(self) -> int:
        return max(u.staleness for u in self.updates)

    @property
    def updates_per_iteration(self) -> float:
        return len(self.updates) / self.period

    def waiting(self, added: int, whole: int) -> int:
        """The largest number of bytes of gradients that wait between two iterations of a steady run.

        added: bytes of an update's gradients while further iterations are added to them. whole: their bytes after that.
        """
        p = self.period

        def after(n: int, u: Update) -> int:
            merging, all_open = (((n - u.first) // p - (n - end) // p) for end in (u.last, u.at))
            return merging * added + (all_open - merging) * whole

        return max(sum(after(n, u) for u in self.updates) for n in range(p))

    def _repr_html_(self) -> str:
        """For notebooks: the messages in order. Tensors are shown by their index in the problem."""
        from pase.pages.parts import in_notebook

        rows = (
            (
                str(k),
                str(m.link),
                f"{m.nbytes:,}",
                ", ".join(str(p.tensor) for p in m.pieces[:_SHOWN])
                + (f" and {len(m.pieces) - _SHOWN} more" if len(m.pieces) > _SHOWN else ""),
            )
            for k, m in enumerate(self.messages)
        )
        line = f"Bucket plan '{self.policy}': {len(self.messages)} messages, {self.dispatch}"
        return in_notebook(line, ["message>", "link>", "bytes>", "tensors"], rows)


def whole(
    problem: ScheduleProblem, tensors: Iterable[int], *, link: int | None = None, hold_s: float = 0.0
) -> Message:
    """One message of whole tensors, on the given link or on the first link that may carry them."""
    ts = tuple(tensors)
    return Message(
        pieces=tuple(Piece(tensor=t, offset=0, nbytes=problem.tensors[t].nbytes) for t in ts),
        link=problem.links_for(ts[0])[0] if link is None else link,
        hold_s=hold_s,
    )


def issue_order(
    problem: ScheduleProblem, messages: Sequence[Message], place: Sequence[int]
) -> tuple[Message, ...]:
    """The messages sorted by the last position of their tensors, but after every message that they follow.

    Otherwise a link that sends strictly in order would deadlock. place: the position of each tensor.
    """
    holder: dict[int, list[int]] = {}
    for i, m in enumerate(messages):
        for p in m.pieces:
            holder.setdefault(p.tensor, []).append(i)
    after: list[set[int]] = [
        {h for p in m.pieces for f in problem.tensors[p.tensor].follows for h in holder.get(f, ())} - {i}
        for i, m in enumerate(messages)
    ]
    before: list[list[int]] = [[] for _ in messages]
    for i, hs in enumerate(after):
        for h in hs:
            before[h].append(i)
    waits = [len(hs) for hs in after]
    key = [max(place[p.tensor] for p in m.pieces) for m in messages]
    heap = [(key[i], i) for i in range(len(messages)) if not waits[i]]
    heapq.heapify(heap)
    out: list[Message] = []
    while heap:
        _, i = heapq.heappop(heap)
        out.append(messages[i])
        for j in before[i]:
            waits[j] -= 1
            if not waits[j]:
                heapq.heappush(heap, (key[j], j))
    return tuple(out)


def check_plan(problem: ScheduleProblem, plan: BucketPlan) -> None:
    """Raise PaseError unless the plan is valid for the problem.

    Every byte of every tensor must be sent exactly once per update, on a link that may carry it, and fused only within
    its group. The updates must cover every iteration once, in order.
    """
    check_updates(plan.updates, plan.period, f"plan '{plan.policy}'")
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i, m in enumerate(plan.messages):
        where = f"plan '{plan.policy}', messages[{i}]"
        if not m.pieces:
            raise PaseError("the message has no pieces", where=where, fix="leave it out")
        if not 0 <= m.link < len(problem.links):
            raise PaseError(
                f"it is on link {m.link}, but the problem has {len(problem.links)} links",
                where=where,
                fix=f"give 0 to {len(problem.links) - 1}",
            )
        if not 0 <= m.update < len(plan.updates):
            raise PaseError(
                f"it belongs to update {m.update}, but the plan has {len(plan.updates)} updates",
                where=where,
                fix=f"give 0 to {len(plan.updates) - 1}",
            )
        for p in m.pieces:
            if not 0 <= p.tensor < len(problem.tensors):
                raise PaseError(
                    f"it has tensor {p.tensor}, but the problem has {len(problem.tensors)} tensors",
                    where=where,
                    fix=f"give 0 to {len(problem.tensors) - 1}",
                )
            spans.setdefault((m.update, p.tensor), []).append((p.offset, p.nbytes))
        groups = {problem.tensors[p.tensor].group for p in m.pieces}
        if len(groups) > 1:
            raise PaseError(
                f"it fuses tensors that cannot share a collective: {sorted(groups)}",
                where=where,
                fix="fuse only tensors with the same kind, axes and dtype",
            )
        if not problem.links[m.link].carries(problem.tensors[m.pieces[0].tensor].axes):
            raise PaseError(
                f"link '{problem.links[m.link].name}' does not carry the axes of its tensors",
                where=where,
                fix="send it on another link",
            )
    for u in range(len(plan.updates)):
        for t, tensor in enumerate(problem.tensors):
            _check_cover(plan.policy, tensor.name, tensor.nbytes, u, sorted(spans.get((u, t), [])))


def _check_cover(policy: str, name: str, nbytes: int, u: int, spans: Sequence[tuple[int, int]]) -> None:
    at = 0
    for offset, size in spans:
        if offset != at or size <= 0:
            raise PaseError(
                f"bytes 0 to {at} of tensor '{name}' are sent, and the next piece is {size} bytes at {offset}",
                where=f"plan '{policy}', update {u}",
                fix="send every byte exactly once",
            )
        at += size
    if at != nbytes:
        raise PaseError(
            f"{at} of the {nbytes} bytes of tensor '{name}' are sent",
            where=f"plan '{policy}', update {u}",
            fix="send every byte exactly once",
        )


def check_updates(updates: Sequence[Update], period: int, where: str) -> None:
    """Raise PaseError unless the updates take every iteration of the period exactly once and in order.

    Each update must be applied after its gradients are made and after the update before it. where: names the plan in
    errors.
    """
    if period < 1 or not updates:
        raise PaseError(
            f"the period is {period} and there are {len(updates)} updates",
            where=where,
            fix="give a period of at least 1 and at least one update",
        )
    expect = updates[0].first
    for i, u in enumerate(updates):
        if u.first != expect or u.last < u.first or u.at < u.last:
            raise PaseError(
                f"iterations {u.first}..{u.last} are applied after iteration {u.at}",
                where=f"{where}, updates[{i}]",
                fix=f"take every iteration once and in order (next is {expect}), and apply it after it has run",
            )
        if i and u.at <= updates[i - 1].at:
            raise PaseError(
                "it is applied no later than the update before it",
                where=f"{where}, updates[{i}]",
                fix="apply updates in order",
            )
        expect = u.last + 1
    if expect - updates[0].first != period:
        raise PaseError(
            f"the updates take {expect - updates[0].first} iterations, but the period is {period}",
            where=where,
            fix="cover the period exactly",
        )
    if updates[0].at + period <= updates[-1].at:
        raise PaseError(
            "the period's last update is applied after the first update of the next period",
            where=where,
            fix="apply updates in order",
        )
