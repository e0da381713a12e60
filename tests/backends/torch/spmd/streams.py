"""A model of a GPU's streams: what a rank enqueues where, and what may race. No test on a CPU can see either.

PyTorch enqueues a rank's ops on one stream. A functional collective is enqueued on the stream of its process group,
behind all that the rank has enqueued before. ``wait_tensor`` lets the rank's stream, not its program, wait for the
end of the collective. So the order in which a rank issues ops, collectives and waits is what the streams of a GPU get.

A process group of NCCL holds the tensors of a collective until it is waited for (``TensorShelf`` in PyTorch's
ProcessGroupNCCL.hpp): memory that the program has let go is not reused before. But memory that ``resize_`` frees is,
and nothing keeps an op from reading or writing what a collective under way still writes or reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
CLONES = ("all_reduce", "all_reduce_coalesced")
"""These copy what they are given on the rank's own stream, and sum the copies in place."""
HEAVY = ("mm", "addmm", "bmm", "baddbmm", "convolution", "attention")


@dataclass(eq=False, kw_only=True)
class Enqueued:
    """A collective on the stream of its group.

    issued, waited: how many ops of the rank's own stream are before it, and before what waits for it.
    reads, writes: addresses of storages. holds: the tensors that the process group holds until it is waited for.
    """

    kind: str
    group: str
    issued: int
    reads: set[int]
    writes: set[int]
    holds: list[Any]
    nbytes: int
    waited: int | None = None

    @property
    def beside(self) -> bool:
        """Whether the rank's own stream runs anything while it is under way."""
        return self.waited != self.issued


@dataclass(kw_only=True)
class Streams:
    """What a rank has enqueued. own: the ops of its own stream. most: for each kind, the most bytes that collectives
    under way read. races: what may go wrong, in words."""

    own: list[str] = field(default_factory=list)
    sent: list[Enqueued] = field(default_factory=list)
    under_way: list[Enqueued] = field(default_factory=list)
    most: dict[str, int] = field(default_factory=dict)
    races: list[str] = field(default_factory=list)

    def op(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run an op, and note what it enqueues."""
        space, name = func.name().split(".")[0].split("::")
        if space == "_c10d_functional":
            if name == "wait_tensor":
                self._waited(args[0])
                return run()
            return self._issued(name, args, kwargs, run)
        assert "c10d" not in space, f"{name} is enqueued in a way that this does not know"
        made = run()
        given = tensors((args, kwargs))
        written = tensors(
            [
                (args[i] if i < len(args) else kwargs.get(a.name))
                for i, a in enumerate(func._schema.arguments)
                if a.alias_info is not None and a.alias_info.is_write
            ]
        )
        if not written and storages(tensors(made)) & storages(given):
            return made  # a view
        self._touched(name, reads=storages(given), writes=storages(written))
        self.own.append(name)
        return made

    def _issued(self, name: str, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        kind, given = KINDS[name], tensors(args[0])
        if name in CLONES:
            self._touched(name, reads=storages(given), writes=set())
            self.own.append("clone")
        made = tensors(run())
        group = next(x for x in reversed(args) if isinstance(x, str))
        reads = made if name in CLONES else given
        message = Enqueued(
            kind=kind,
            group=group,
            issued=len(self.own),
            reads=storages(reads),
            writes=storages(made),
            holds=[reads, made],
            nbytes=sum(x.nbytes for x in reads),
        )
        for m in self.under_way:
            if m.group != group and (m.writes & (message.reads | message.writes) or m.reads & message.writes):
                self.races.append(f"{kind} on {group} beside {m.kind} on {m.group}")
        self.sent.append(message)
        self.under_way.append(message)
        now = sum(m.nbytes for m in self.under_way if m.kind == kind)
        self.most[kind] = max(now, self.most.get(kind, 0))
        return made if name == "all_reduce_coalesced" else made[0]

    def _waited(self, x: Any) -> None:
        at = storages([x])
        for m in self.under_way:
            if m.writes & at:
                m.waited, m.holds = len(self.own), []
        self.under_way = [m for m in self.under_way if m.waited is None]

    def _touched(self, name: str, *, reads: set[int], writes: set[int]) -> None:
        for m in self.under_way:
            if m.writes & (reads | writes) or m.reads & writes:
                self.races.append(f"{name} beside {m.kind} {m.nbytes} on {m.group}")

    def resized(self, x: Any) -> None:
        """The memory of a storage was freed, or allocated."""
        for m in self.under_way:
            if (m.reads | m.writes) & storages([x]):
                self.races.append(f"memory that {m.kind} {m.nbytes} on {m.group} needs is another's")

    def heavy(self, m: Enqueued) -> int:
        """How many products the rank's own stream computes while a message is under way."""
        return sum(is_heavy(name) for name in self.own[m.issued : m.waited])


def is_heavy(name: str) -> bool:
    return name in HEAVY or any(word in name for word in HEAVY if len(word) > 6)


def tensors(x: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [y for y in tree_leaves(x) if isinstance(y, torch.Tensor)]


def storages(some: list[Any]) -> set[int]:
    return {x.untyped_storage()._cdata for x in some}


@contextlib.contextmanager
def watched(step: Any = None) -> Iterator[Streams]:
    """What a rank enqueues in this context. step: a ``ParallelModule`` whose memory is watched, too."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from pase.backends.torch.spmd.gathered_again import GatheredTaker

    streams = Streams()
    taker = GatheredTaker() if step is None else step.walk.gathered_again

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            return streams.op(func, args, kwargs, lambda: func(*args, **kwargs))

    before, taker.resized = taker.resized, streams.resized
    try:
        with Watch():
            yield streams
    finally:
        taker.resized = before
