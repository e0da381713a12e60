"""What a policy decides: messages, their links and order, and when updates are applied."""

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
"""Tensors of a message that are listed."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Bytes [offset, offset + nbytes) of one tensor."""

    tensor: int
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Message:
    """One collective: pieces fused into one buffer, on one link.

    update: the update (index into the plan's) whose gradients it carries.
    hold_s: it is issued that long after its last piece is ready (Horovod's cycle).
    iteration, phase: not before that phase of that many iterations after the update's last gradient was made;
    None = as soon as it is ready.
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
    """The mean gradient of iterations first..last (of a period) is applied after iteration ``at``.

    The plain update is (0, 0, 0). at > last is a delayed update; last > first merges batches.
    """

    first: int = 0
    last: int = 0
    at: int = 0

    @property
    def batches(self) -> int:
        return self.last - self.first + 1

    @property
    def staleness(self) -> int:
        """Age in iterations of the oldest gradient when it is applied; 0 = the plain update."""
        return self.at - self.first


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Messages in the one order in which every rank issues them.

    dispatch: "sequence": each link sends its messages strictly in this order (what runs on devices);
    "priority": each link sends the first ready one, so that position is priority.
    credit_bytes: bytes a link may have accepted at once under "priority" (ByteScheduler); 1 = one message.
    barrier: the next forward starts only when every message of the update has arrived (optimizer.step()).
    period: iterations after which the plan repeats; updates tile it.
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
        """Bytes of gradients that wait between two iterations, at most, once the run is steady. An update's gradients
        have ``added`` bytes while those of further iterations are added to them, and ``whole`` bytes after that."""
        p = self.period

        def after(n: int, u: Update) -> int:
            merging, all_open = (((n - u.first) // p - (n - end) // p) for end in (u.last, u.at))
            return merging * added + (all_open - merging) * whole

        return max(sum(after(n, u) for u in self.updates) for n in range(p))

    def _repr_html_(self) -> str:
        """For notebooks: its messages in order; what they hold is numbered as the problem's tensors are."""
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
    """One message of whole tensors, on the link given or the first that may carry them."""
    ts = tuple(tensors)
    return Message(
        pieces=tuple(Piece(tensor=t, offset=0, nbytes=problem.tensors[t].nbytes) for t in ts),
        link=problem.links_for(ts[0])[0] if link is None else link,
        hold_s=hold_s,
    )


def issue_order(
    problem: ScheduleProblem, messages: Sequence[Message], place: Sequence[int]
) -> tuple[Message, ...]:
    """Messages by the latest place of their tensors, but none before one that holds what its tensors follow: a
    link that sends strictly in order would wait for ever.
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
    """Raise unless every byte of every tensor is sent exactly once per update, on a link that may carry it,
    fused only within its group, and updates cover every iteration once, in order.
    """
    check_updates(plan.updates, plan.period, f"plan '{plan.policy}'")
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i, m in enumerate(plan.messages):
        where = f"plan '{plan.policy}', messages[{i}]"
        if not m.pieces:
            raise PaseError(f"{where} is empty")
        if not 0 <= m.link < len(problem.links):
            raise PaseError(f"{where} is on link {m.link}; there are {len(problem.links)}")
        if not 0 <= m.update < len(plan.updates):
            raise PaseError(f"{where} feeds update {m.update}; there are {len(plan.updates)}")
        for p in m.pieces:
            if not 0 <= p.tensor < len(problem.tensors):
                raise PaseError(f"{where} names tensor {p.tensor}; there are {len(problem.tensors)}")
            spans.setdefault((m.update, p.tensor), []).append((p.offset, p.nbytes))
        groups = {problem.tensors[p.tensor].group for p in m.pieces}
        if len(groups) > 1:
            raise PaseError(f"{where} fuses tensors that cannot share a collective: {sorted(groups)}")
        if not problem.links[m.link].carries(problem.tensors[m.pieces[0].tensor].axes):
            raise PaseError(f"{where}: link '{problem.links[m.link].name}' does not carry these axes")
    for u in range(len(plan.updates)):
        for t, tensor in enumerate(problem.tensors):
            _check_cover(plan.policy, tensor.name, tensor.nbytes, u, sorted(spans.get((u, t), [])))


def _check_cover(policy: str, name: str, nbytes: int, u: int, spans: Sequence[tuple[int, int]]) -> None:
    at = 0
    for offset, size in spans:
        if offset != at or size <= 0:
            raise PaseError(
                f"plan '{policy}', update {u}: tensor '{name}' is covered up to byte {at}, then comes a piece at "
                f"{offset} of {size} bytes; every byte must be sent exactly once"
            )
        at += size
    if at != nbytes:
        raise PaseError(
            f"plan '{policy}', update {u}: {at} of the {nbytes} bytes of tensor '{name}' are sent"
        )


def check_updates(updates: Sequence[Update], period: int, where: str) -> None:
    """Raise unless the updates take every iteration of a period that repeats once, in order, and each is applied after
    its gradients are made and after the update before it. where: names them in errors.
    """
    if period < 1 or not updates:
        raise PaseError(f"{where} needs a period of at least 1 and at least one update")
    expect = updates[0].first
    for i, u in enumerate(updates):
        if u.first != expect or u.last < u.first or u.at < u.last:
            raise PaseError(
                f"{where}, updates[{i}]: iterations {u.first}..{u.last} applied after {u.at}; updates "
                f"must take every iteration once, in order (expected {expect}), and never before it is made"
            )
        if i and u.at <= updates[i - 1].at:
            raise PaseError(f"{where}, updates[{i}] is applied no later than the one before it")
        expect = u.last + 1
    if expect - updates[0].first != period:
        raise PaseError(
            f"{where}: its updates take {expect - updates[0].first} iterations, its period is {period}"
        )
    if updates[0].at + period <= updates[-1].at:
        raise PaseError(f"{where}: the period's last update falls behind the next period's first")
