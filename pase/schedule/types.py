"""The scheduling problem: blocks of compute, tensors to communicate, and the links that carry them.

This module holds everything that a policy may read. What a policy decides is a `plan.BucketPlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from pase.errors import PaseError

__all__ = [
    "AxisGroup",
    "BlockPhase",
    "ComputeBlock",
    "Link",
    "ScheduleProblem",
    "SendTime",
    "Transfer",
    "TransferGroup",
    "problem_from_times",
]

BlockPhase = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class SendTime:
    """Seconds to send one message as a function of its size. The curve is piecewise linear and never falls.

    bytes_, seconds: the corners of the curve, at least one, with ascending bytes. The curve is flat before the first
        corner.
    tail_s_per_byte: the slope after the last corner.

    The alpha-beta model (a startup and an inverse bandwidth) is a curve with one corner at 0 bytes. A single
    alpha-beta fit is 31-50% wrong on measured NCCL tables up to 32 MB, which is why tables are supported.

    >>> c = SendTime.alpha_beta(alpha_s=1.0, beta_s_per_byte=0.5)
    >>> c.seconds_for(4)
    3.0
    >>> SendTime.table([1, 3], [2.0, 6.0]).seconds_for(5)
    10.0
    """

    bytes_: tuple[float, ...]
    seconds: tuple[float, ...]
    tail_s_per_byte: float

    def __post_init__(self) -> None:
        if len(self.bytes_) != len(self.seconds) or not self.bytes_:
            raise PaseError(
                f"the curve has {len(self.bytes_)} bytes and {len(self.seconds)} seconds",
                where="cost curve",
                fix="give as many seconds as bytes, at least one of each",
            )
        xs, ys = np.asarray(self.bytes_, float), np.asarray(self.seconds, float)
        if not (np.isfinite(xs).all() and np.isfinite(ys).all() and np.isfinite(self.tail_s_per_byte)):
            raise PaseError("a number is not finite", where="cost curve", fix="give finite numbers")
        if (np.diff(xs) <= 0).any() or xs[0] < 0:
            raise PaseError(
                f"the bytes are {self.bytes_}", where="cost curve", fix="give bytes that rise, from 0 or more"
            )
        if (np.diff(ys) < 0).any() or ys[0] < 0 or self.tail_s_per_byte < 0:
            raise PaseError(
                f"the seconds fall: {self.seconds}, then {self.tail_s_per_byte} s/byte",
                where="cost curve",
                fix="give seconds that do not fall; SendTime.table() smooths a measured table",
            )

    @staticmethod
    def alpha_beta(*, alpha_s: float, beta_s_per_byte: float) -> SendTime:
        """The curve alpha + beta * bytes."""
        return SendTime(bytes_=(0.0,), seconds=(float(alpha_s),), tail_s_per_byte=float(beta_s_per_byte))

    @staticmethod
    def table(nbytes: Sequence[float], seconds: Sequence[float]) -> SendTime:
        """The curve through measured points.

        If noise makes the time fall with the size, the running maximum is used. A relative rise below one millionth
        counts as flat, because rounding would destroy its inverse.
        """
        order = np.argsort(np.asarray(nbytes, float), kind="stable")
        xs = np.asarray(nbytes, float)[order]
        ys = np.maximum.accumulate(np.asarray(seconds, float)[order])
        for i in range(1, len(ys)):
            if ys[i] < ys[i - 1] * (1 + 1e-6):
                ys[i] = ys[i - 1]
        if (np.diff(xs) <= 0).any():
            raise PaseError(
                f"two points have the same size: the bytes are {xs.tolist()}",
                where="cost curve",
                fix="give each size once",
            )
        if xs.size > 1:
            tail = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
            tail = tail if tail > 0 else ys[-1] / xs[-1]
        else:
            tail = ys[-1] / xs[-1] if xs.size and xs[-1] > 0 else 0.0
        return SendTime(bytes_=tuple(xs.tolist()), seconds=tuple(ys.tolist()), tail_s_per_byte=float(tail))

    def seconds_for(self, nbytes: float) -> float:
        """Seconds for one message of this many bytes; 0 for an empty message."""
        return float(self.seconds_of(np.asarray([nbytes], float))[0])

    def seconds_of(self, nbytes: np.ndarray) -> np.ndarray:
        """Seconds of each message. nbytes: float64 array of any shape."""
        n = np.asarray(nbytes, float)
        s = np.interp(n, self.bytes_, self.seconds)
        s = s + np.maximum(n - self.bytes_[-1], 0.0) * self.tail_s_per_byte
        return np.where(n > 0, s, 0.0)

    def bytes_within(self, seconds: np.ndarray) -> np.ndarray:
        """Bytes of the largest message that takes at most this long; 0 if even the smallest takes longer."""
        s = np.asarray(seconds, float)
        xs, ys = np.asarray(self.bytes_), np.asarray(self.seconds)
        i = np.clip(np.searchsorted(ys, s, side="right") - 1, 0, len(ys) - 1)
        j = np.minimum(i + 1, len(ys) - 1)
        rise = ys[j] - ys[i]
        inside = xs[i] + (xs[j] - xs[i]) * (s - ys[i]) / np.where(rise > 0, rise, 1.0)
        tail = self.tail_s_per_byte
        with np.errstate(invalid="ignore"):
            beyond = xs[-1] + (s - ys[-1]) / tail if tail > 0 else np.full(s.shape, np.inf)
        return np.where(s < ys[0], 0.0, np.where(i == len(ys) - 1, beyond, inside))

    def best_rates(self, most_bytes: np.ndarray) -> np.ndarray:
        """`best_s_per_byte` of each element; inf for an element of 0 bytes."""
        n = np.asarray(most_bytes, float)
        with np.errstate(divide="ignore", invalid="ignore"):
            out = np.where(n > 0, self.seconds_of(n) / n, np.inf)
            if np.isinf(n).any():
                out = np.where(np.isinf(n), self.tail_s_per_byte, out)
        for x, y in zip(self.bytes_, self.seconds, strict=True):
            if x > 0:
                out = np.where(n >= x, np.minimum(out, y / x), out)
        return out

    @property
    def startup_s(self) -> float:
        """Seconds of the smallest message."""
        return self.seconds[0]

    def best_s_per_byte(self, most_bytes: float) -> float:
        """The lowest seconds per byte of any message of at most this many bytes."""
        xs = [x for x in self.bytes_ if 0 < x < most_bytes] + [most_bytes]
        return min(self.seconds_for(x) / x for x in xs) if most_bytes > 0 else 0.0


@dataclass(frozen=True)
class AxisGroup:
    """The mesh axes over which a tensor is synchronised. An empty tuple stands for all devices.

    collective: the kind of collective if the price depends on it, otherwise "".

    In files, a group is written as text: AXIS,AXIS/COLLECTIVE.

    >>> str(AxisGroup.parse("data,model/all_reduce"))
    'data,model/all_reduce'
    """

    names: tuple[str, ...] = ()
    collective: str = ""

    @classmethod
    def parse(cls, text: str) -> AxisGroup:
        axes, _, collective = text.partition("/")
        return cls(tuple(axes.split(",")) if axes else (), collective)

    def __str__(self) -> str:
        return ",".join(self.names) + (f"/{self.collective}" if self.collective else "")


ALL_DEVICES = AxisGroup()
TransferGroup: TypeAlias = tuple[str, AxisGroup, str]
"""(kind, axes, dtype): tensors for which all three are equal may share a message."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link carries one message at a time: an NCCL stream, a gloo NIC, or a level of the network.

    curve: seconds per message.
    by_axes: replaces the curve for tensors that are synchronised over these axis groups.
    axes: the axis groups that the link can carry; None for all of them.
    """

    name: str
    curve: SendTime
    by_axes: dict[AxisGroup, SendTime] = field(default_factory=dict)
    axes: tuple[AxisGroup, ...] | None = None

    def carries(self, group: AxisGroup) -> bool:
        """Whether tensors of this axis group may use the link."""
        return self.axes is None or group in self.axes

    def curve_for(self, group: AxisGroup) -> SendTime:
        return self.by_axes.get(group, self.curve)


@dataclass(frozen=True, kw_only=True)
class ComputeBlock:
    """A block of compute on the single compute stream. Blocks are listed in execution order.

    after: indices of the blocks that it waits for; None for the block before it. Used only if the problem is
        ``dataflow``.
    """

    name: str
    phase: BlockPhase
    seconds: float
    after: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A tensor that is communicated once per iteration.

    ready_after: the block whose end makes the tensor ready. None: ready when the iteration starts, or when the tensors
        that it follows have arrived.
    needed_before: the block that waits for the tensor, ``lag`` iterations later. None: the end of that iteration.
    lag: 1 for a gradient, which is made in backward and needed by the next forward; 0 for a parameter that is gathered
        before use.
    axes: the mesh axes over which it is synchronised.
    follows: indices of tensors of the same iteration that must arrive first: the reduce-scatter before its all-gather,
        or the push before its pull.

    Only tensors with equal (kind, axes, dtype) may be fused.
    """

    name: str
    nbytes: int
    ready_after: int | None
    needed_before: int | None
    lag: int = 1
    axes: AxisGroup = ALL_DEVICES
    kind: str = "all_reduce"
    dtype: str = "float32"
    follows: tuple[int, ...] = ()

    @property
    def group(self) -> TransferGroup:
        """The group: tensors of the same group may share a message."""
        return (self.kind, self.axes, self.dtype)


@dataclass(frozen=True, kw_only=True)
class ScheduleProblem:
    """One training iteration that repeats: blocks in execution order, tensors and links.

    dataflow: if True, the compute stream may run any block whose inputs are available, as TensorFlow's executor does.
        Otherwise blocks run in the given order, as in PyTorch and JAX.
    held_s: the part of the blocks' seconds that is not compute but communication under any schedule: between one op and
        the next, and what collectives slow compute by.
    """

    name: str
    blocks: tuple[ComputeBlock, ...]
    tensors: tuple[Transfer, ...]
    links: tuple[Link, ...]
    dataflow: bool = False
    source: str = ""
    held_s: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def compute_s(self) -> float:
        return sum(b.seconds for b in self.blocks)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def is_plain(self) -> bool:
        """Whether the problem is plain gradient synchronisation: compute in order, lag 1, no tensor follows another,
        and every tensor is needed before the first one becomes ready.

        The iteration can then be cut between the last need and the first release, and nothing crosses the cut. The
        steady iteration is a makespan with heads (release times) and tails (compute still to come).
        """
        ts = self.tensors
        return (
            not self.dataflow
            and all(
                t.lag == 1 and not t.follows and t.ready_after is not None and t.needed_before is not None
                for t in ts
            )
            and max((t.needed_before or 0 for t in ts), default=0)
            <= min((t.ready_after or 0 for t in ts), default=0)
        )

    def links_for(self, tensor: int) -> list[int]:
        """Indices of the links that may carry this tensor."""
        axes = self.tensors[tensor].axes
        return [i for i, link in enumerate(self.links) if link.carries(axes)]

    def message_s(self, link: int, tensor: int, nbytes: float) -> float:
        """Seconds for one message of this many bytes, of this tensor's group, on this link."""
        return self.links[link].curve_for(self.tensors[tensor].axes).seconds_for(nbytes)


def _check(p: ScheduleProblem) -> None:
    """Raise PaseError if the problem cannot be scheduled. The error names the block, tensor or link."""
    where = f"problem '{p.name}'"
    if not p.blocks:
        raise PaseError(
            "there are no compute blocks",
            where=where,
            fix="give at least one forward and one backward block",
        )
    if not p.links:
        raise PaseError("there are no links", where=where, fix="give at least one link with its cost curve")
    names = [link.name for link in p.links]
    if len(set(names)) < len(names):
        raise PaseError(
            f"two links have the same name ({', '.join(names)})", where=where, fix="give each its own name"
        )
    for i, b in enumerate(p.blocks):
        if not (np.isfinite(b.seconds) and b.seconds >= 0):
            raise PaseError(
                f"seconds is {b.seconds}", where=f"{where}, blocks[{i}] '{b.name}'", fix="give 0 or more"
            )
        for j in b.after or ():
            if not 0 <= j < i:
                raise PaseError(
                    f"it waits for block {j}, which is not listed before it",
                    where=f"{where}, blocks[{i}] '{b.name}'",
                    fix="list the blocks in an order in which they can run",
                )
    n = len(p.blocks)
    for i, t in enumerate(p.tensors):
        here = f"{where}, tensors[{i}] '{t.name}'"
        if t.nbytes <= 0:
            raise PaseError(
                f"nbytes is {t.nbytes}", where=here, fix="leave out tensors that need no communication"
            )
        for key, block in (("ready_after", t.ready_after), ("needed_before", t.needed_before)):
            if block is not None and not 0 <= block < n:
                raise PaseError(
                    f"{key} is {block}, but there are {n} blocks", where=here, fix=f"give 0 to {n - 1}"
                )
        if t.lag not in (0, 1):
            raise PaseError(
                f"lag is {t.lag}",
                where=here,
                fix="give 1 (needed in the next iteration) or 0 (needed in the same iteration)",
            )
        if t.lag == 0 and t.needed_before is not None and (t.ready_after or -1) >= t.needed_before:
            raise PaseError(
                f"it is ready after block {t.ready_after} but needed before block {t.needed_before} of the same "
                "iteration, which would never start",
                where=here,
                fix="give a gradient lag 1",
            )
        for f in t.follows:
            if not 0 <= f < i:
                raise PaseError(
                    f"it follows tensor {f}, which is not listed before it",
                    where=here,
                    fix="list a tensor after those that it follows",
                )
        if not p.links_for(i):
            raise PaseError(
                f"it is synchronised over axes '{t.axes}', which no link carries "
                f"(links: {', '.join(link.name for link in p.links)})",
                where=here,
                fix="add these axes to a link",
            )
    _check_lag0_chains(p)


def _check_lag0_chains(p: ScheduleProblem) -> None:
    """Raise PaseError if a tensor of lag 0 follows a tensor that becomes ready too late for it."""
    latest: list[int] = []
    for i, t in enumerate(p.tensors):
        ready = max([-1 if t.ready_after is None else t.ready_after, *(latest[f] for f in t.follows)])
        latest.append(ready)
        if t.lag == 0 and t.needed_before is not None and ready >= t.needed_before:
            raise PaseError(
                f"it follows a tensor that is ready only after block {ready}, but it is needed before block "
                f"{t.needed_before} of the same iteration",
                where=f"problem '{p.name}', tensors[{i}] '{t.name}'",
                fix="give it lag 1, or have the other tensor ready earlier",
            )


def problem_from_times(
    *,
    name: str,
    forward_s: float,
    backward_s: float,
    tensors: Sequence[tuple[str, int, float, float]],
    links: Sequence[Link],
    axes: AxisGroup = ALL_DEVICES,
    source: str = "",
) -> ScheduleProblem:
    """Make a problem from absolute times.

    tensors: (name, bytes, ready_s, next_use_s) of each tensor. Both times count from the start of an iteration.
        next_use_s is the time in the next iteration's forward at which the tensor is needed.
    forward_s, backward_s: seconds of forward and of backward, which follows immediately.

    >>> p = problem_from_times(name="toy", forward_s=2.0, backward_s=4.0,
    ...     tensors=[("a", 8, 6.0, 0.0), ("b", 8, 4.0, 1.0)],
    ...     links=[Link(name="net", curve=SendTime.alpha_beta(alpha_s=0.0, beta_s_per_byte=1.0))])
    >>> [(b.phase, b.seconds) for b in p.blocks]
    [('forward', 1.0), ('forward', 1.0), ('backward', 2.0), ('backward', 2.0)]
    """
    total = forward_s + backward_s
    for tname, _, ready_s, next_use_s in tensors:
        if not forward_s - 1e-12 <= ready_s <= total + 1e-12:
            raise PaseError(
                f"ready_s is {ready_s}, which is outside backward ({forward_s} to {total})",
                where=f"problem '{name}', tensor '{tname}'",
                fix="give a time within backward",
            )
        if not -1e-12 <= next_use_s <= forward_s + 1e-12:
            raise PaseError(
                f"next_use_s is {next_use_s}, which is outside forward (0 to {forward_s})",
                where=f"problem '{name}', tensor '{tname}'",
                fix="give a time within forward",
            )
    starts = sorted({0.0, *(min(max(t[3], 0.0), forward_s) for t in tensors)} - {forward_s})
    ends = sorted({total, *(min(max(t[2], forward_s), total) for t in tensors)} - {forward_s})
    blocks = [
        ComputeBlock(name=f"forward {i}", phase="forward", seconds=b - a)
        for i, (a, b) in enumerate(zip(starts, [*starts[1:], forward_s], strict=True))
    ]
    forward_blocks = len(blocks)
    blocks += [
        ComputeBlock(name=f"backward {i}", phase="backward", seconds=b - a)
        for i, (a, b) in enumerate(zip([forward_s, *ends[:-1]], ends, strict=True))
    ]
    made = []
    for tname, nbytes, ready_s, next_use_s in tensors:
        ready_s, next_use_s = min(max(ready_s, forward_s), total), min(max(next_use_s, 0.0), forward_s)
        after = forward_blocks - 1 if ready_s == forward_s else forward_blocks + ends.index(ready_s)
        before = forward_blocks if next_use_s == forward_s else starts.index(next_use_s)
        made.append(Transfer(name=tname, nbytes=nbytes, ready_after=after, needed_before=before, axes=axes))
    return ScheduleProblem(
        name=name, blocks=tuple(blocks), tensors=tuple(made), links=tuple(links), source=source
    )
