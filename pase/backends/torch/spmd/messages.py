"""The gradients of parameters, sent in messages while backward goes on.

An edge of a parameter hands its gradient over as soon as backward has made it (``GradientSending.give``), and autograd
goes on without it. A message whose gradients are all there is joined and sent, and is waited for when backward has
ended. One that is scattered is waited for when the next is to be scattered over the same axes: until then, NCCL's
process group holds what it reads, which is as large as the whole gradients. Messages are those of the program's bucket
plan. All other gradients travel in buckets, in the order in which backward should make them. What a message carries
follows from the program alone, so it is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.errors import PaseError
from pase.local.messages import columns_of_chunk
from pase.local.parts import view
from pase.local.reshard import resharded
from pase.local.types import Extents, LocalMessage, LocalProgram, LocalReshardStep, MessageChunk
from pase.machine import FIRST_BUCKET_BYTES

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import GradientEdge

__all__ = ["GradientSending", "SendStage", "gradient_messages", "joined_chunks"]

SendStage: TypeAlias = "tuple[int, int]"
"""The number of a transfer, and which of its gradient's reshard steps that send anything, counted from 0."""

_JOINED = ("all_reduce", "reduce_scatter")


def gradient_messages(
    program: LocalProgram, bucket_bytes: float, among: Collection[int] | None = None
) -> tuple[LocalMessage, ...]:
    """The messages of a program that carry gradients of parameters, and buckets of about ``bucket_bytes`` for the
    gradients that no message carries. Gradients that are summed equally often are in one bucket.

    among: the transfers whose gradients are joined; None for all.

    A gradient whose reshard step is neither an all-reduce nor a reduce-scatter is sent by itself.
    """
    joinable = {s: step for s, step in _stages(program).items() if among is None or s[0] in among}
    back = [m for m in program.messages if m.way == "back"]
    sent = Counter[SendStage]()
    for c in (c for m in back for c in m.chunks):
        sent[c.transfer, c.stage] += c.nbytes
    carried = {s for s, step in joinable.items() if sent[s] == step.nbytes}
    planned = []
    for m in back:
        chunks = tuple(c for c in m.chunks if (c.transfer, c.stage) in carried)
        if chunks:
            planned.append(replace(m, chunks=chunks))
    begins = {id(op): i for i, op in enumerate(program.ops)}
    first = {n: min(begins[id(op)] for op in program.users(n)) for n, _ in joinable}
    open_: dict[object, list[MessageChunk]] = {}
    buckets: list[LocalMessage] = []

    def closed(key: object) -> None:
        buckets.append(LocalMessage(way="back", link="", chunks=tuple(open_.pop(key))))

    # Backward has made a parameter's gradient when it has passed the parameter's first reader.
    for number, stage in sorted(joinable.keys() - carried, key=lambda s: (s[1], -first[s[0]], s[0])):
        step = joinable[number, stage]
        reader = next(iter(program.users(number)))
        key: object = (stage, _alike(program, number, step), program.runs(number, "back"), reader.op.loops)
        chunk = MessageChunk(transfer=number, stage=stage, begin=0, nbytes=step.nbytes)
        open_.setdefault(key, []).append(chunk)
        full = bucket_bytes if buckets else min(FIRST_BUCKET_BYTES, bucket_bytes)
        if sum(c.nbytes for c in open_[key]) >= full:
            closed(key)
    for last in list(open_):
        closed(last)
    return (*planned, *buckets)


def _stages(program: LocalProgram) -> dict[SendStage, LocalReshardStep]:
    """The reshard steps of parameters' gradients that can be joined with others."""
    return {
        (number, stage): step
        for number, t in enumerate(program.transfers)
        if t.src in program.parameters and t.runs[1] and any(True for _ in program.users(number))
        for stage, step in enumerate(program.stages(number, "back"))
        if step.kind in _JOINED
    }


def _alike(program: LocalProgram, number: int, step: LocalReshardStep) -> tuple[object, ...]:
    """What the gradients of one collective have in common: its kind, axes, and the bytes of an element."""
    shape = program.whole_shape(number)
    return (
        step.kind,
        step.axes,
        step.nbytes // max(1, math.prod(step.before.local_shape(shape, program.mesh))),
    )


def joined_chunks(program: LocalProgram, message: LocalMessage) -> Iterator[list[MessageChunk]]:
    """The chunks of each collective of a message."""
    found: dict[object, list[MessageChunk]] = {}
    for c in message.chunks:
        step = program.stages(c.transfer, "back")[c.stage]
        found.setdefault(_alike(program, c.transfer, step), []).append(c)
    yield from found.values()


def _scatters(step: LocalReshardStep) -> tuple[str, ...]:
    """The axes over which a reshard step scatters; none if it does not."""
    return step.axes if step.kind == "reduce_scatter" else ()


@dataclass(eq=False)
class _Gradient:
    """A gradient on its way. root: the tensor, or the edge of autograd, that gets it. done: how many of its reshard
    steps have run. array: None while all of it is under way. begun: how many bytes of the present step are under way or
    have arrived. pieces: the parts of the present step that have arrived, by their first byte."""

    number: int
    root: object
    array: Tensor | None
    shape: Extents = ()
    done: int = 0
    begun: int = 0
    pieces: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _SentWire:
    """A collective that is under way. spans: chunks with their gradients and numbers of elements. views: parts of the
    wire in the shapes of these gradients, if all are whole. step: what it does."""

    wire: Tensor
    spans: Sequence[tuple[MessageChunk, _Gradient, int]]
    step: LocalReshardStep
    views: Sequence[Tensor] = ()


@dataclass(frozen=True, eq=False)
class _LeafHook:
    """A hook on the gradient of a leaf. end: where autograd's graph ends at it; without it, the hook would be gone."""

    leaf: Tensor
    end: GradientEdge

    @classmethod
    def of(cls, leaf: Tensor, taken: Callable[[tuple[Tensor | None, ...]], tuple[None] | None]) -> _LeafHook:
        """taken: gets the gradient, and returns what autograd adds to the leaf's; None for no change."""
        from torch.autograd.graph import get_gradient_edge
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():  # it makes a view, which a recomputed block would not make again
            end = get_gradient_edge(leaf)
        end.node.register_prehook(taken)
        return cls(leaf, end)


@dataclass(kw_only=True)
class GradientSending:
    """The messages of a rank's gradients, for one backward at a time.

    is_open: whether edges hand their gradients over.
    among: the transfers whose gradients are handed over; None for all.
    overwrites: whether a joined message may be summed in place; a program that is traced has no such ops.
    expected: the transfers whose gradients forward's edges announced.
    here: message -> its stages whose gradients are there.
    sent: message -> how often it has been sent in this backward.
    wanted: message -> how many stages of gradients it waits for.
    arrived: the gradients that are done. given: how many were given.
    hooks: transfer -> what takes its gradient from a parameter. They are kept from step to step.
    """

    program: LocalProgram
    groups: AxisGroups
    bucket_bytes: float
    among: frozenset[int] | None = None
    is_open: bool = False
    overwrites: bool = True
    expected: set[int] = field(default_factory=set)
    here: dict[int, dict[SendStage, _Gradient]] = field(default_factory=dict)
    sent: Counter[int] = field(default_factory=Counter)
    wanted: dict[int, int] = field(default_factory=dict)
    under_way: list[_SentWire] = field(default_factory=list)
    arrived: list[_Gradient] = field(default_factory=list)
    given: int = 0
    hooks: dict[int, _LeafHook] = field(default_factory=dict)

    @cached_property
    def messages(self) -> tuple[LocalMessage, ...]:
        """See ``gradient_messages``. Warns about messages of the bucket plan that carry anything else."""
        found = gradient_messages(self.program, self.bucket_bytes, self.among)
        every = self.program.messages
        others = sum(len(m.chunks) for m in every) - sum(len(m.chunks) for m in found if m.link)
        if others:
            warnings.warn(
                f"{others} chunks of the {len(every)} messages of the bucket plan of '{self.program.name}' are not "
                f"gradients to be summed: PyTorch gathers parameters in buckets, and sends other transfers one by one",
                stacklevel=2,
            )
        return found

    @cached_property
    def _carriers(self) -> Mapping[SendStage, Sequence[int]]:
        """The messages that carry a stage of a gradient."""
        found: dict[SendStage, list[int]] = {}
        for i, m in enumerate(self.messages):
            for s in dict.fromkeys((c.transfer, c.stage) for c in m.chunks):
                found.setdefault(s, []).append(i)
        return found

    @cached_property
    def _scattered_over(self) -> Sequence[Collection[tuple[str, ...]]]:
        """Message -> the axes over which its collectives scatter."""
        stages = self.program.stages
        steps = ((stages(c.transfer, "back")[c.stage] for c in m.chunks) for m in self.messages)
        return [{axes for step in some if (axes := _scatters(step))} for some in steps]

    @contextlib.contextmanager
    def opened(self, *, overwrites: bool = True) -> Iterator[None]:
        """Gradients are handed over in this context. ``finish`` must follow each backward."""
        self.is_open, self.overwrites = True, overwrites
        try:
            yield
        finally:
            self.is_open = False
            self._begin()
            if not overwrites:  # the leaves of a trace
                self.hooks.clear()

    def _begin(self) -> None:
        """Forget all of the previous backward."""
        self.expected, self.here, self.sent, self.wanted = set(), {}, Counter(), {}
        self.under_way, self.arrived, self.given = [], [], 0

    @contextlib.contextmanager
    def announcing(self) -> Iterator[None]:
        """Edges that are made in this context hand their gradients over, whenever that is. ``finish`` must follow."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def announce(self, number: int) -> None:
        """The gradient of a transfer is to come."""
        if self.is_open:
            self.expected.add(number)

    def give(self, number: int, root: object, gradient: Tensor) -> None:
        """Take the gradient of a transfer's result, which ``root`` shall get after its reshard steps."""
        self.given += 1
        self._go_on(_Gradient(number, root, gradient))

    def take_from(self, number: int, leaf: Tensor) -> None:
        """Announce the gradient of a transfer, and take it when backward has made all of it."""
        self.announce(number)
        if number in self.hooks and self.hooks[number].leaf is leaf:
            return
        held, own = weakref.ref(self), weakref.ref(leaf)  # or a step would keep itself alive

        def taken(gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
            sending, root, (gradient,) = held(), own(), gradients
            if sending is None or number not in sending.expected or gradient is None:
                return None
            sending.give(number, root, gradient)
            return (None,)  # nothing is left to add to the leaf's

        self.hooks[number] = _LeafHook.of(leaf, taken)

    def finish(self) -> None:
        """Send what has not been sent, wait for all, and hand the gradients to their roots."""
        import torch

        while self.here or self.under_way:
            while self.here:
                self._send(min(self.here))
            self._receive(list(self.under_way))
        arrived, given, self.arrived = self.arrived, self.given, []
        if len(arrived) != given:
            raise PaseError(
                f"of {given} gradients that were sent, {len(arrived)} have arrived",
                where=f"a step of '{self.program.name}'",
                fix="report this as a bug in pase.backends.torch",
            )
        self._begin()
        inner: list[_Gradient] = []
        more: list[tuple[Tensor, Tensor]] = []
        for g in arrived:
            assert g.array is not None
            if not isinstance(g.root, torch.Tensor):
                inner.append(g)
                continue
            array = self.groups.reshape(g.array, tuple(g.root.shape))  # it may be that of a view
            if g.root.grad is None:
                g.root.grad = array
            else:
                more.append((g.root.grad, array))
        if more:
            with torch.no_grad():
                torch._foreach_add_([had for had, _ in more], [new for _, new in more])
        if inner:
            torch.autograd.backward([g.root for g in inner], [g.array for g in inner])

    def _go_on(self, g: _Gradient) -> None:
        """Run the reshard steps of a gradient up to one that travels in a message, or to the end."""
        steps = self.program.reshard_steps(g.number, "back")
        shape = self.program.whole_shape(g.number)
        assert g.array is not None
        while g.done < len(steps):
            stage = sum(1 for s in steps[: g.done] if s.nbytes and not s.free)
            carriers = self._carriers.get((g.number, stage), ())
            step = steps[g.done]
            if carriers and step.nbytes and not step.free:
                self._wait_in(carriers, (g.number, stage), g)
                return
            g.array = resharded(g.array, [step], shape, "sum", self.groups)
            g.done += 1
        self.arrived.append(g)

    def _wait_in(self, carriers: Sequence[int], stage: SendStage, g: _Gradient) -> None:
        """Put a gradient into the messages that carry it, and send the messages that can be sent."""
        for i in carriers:
            if stage in self.here.get(i, ()):  # of the previous iteration of a loop
                self._send(i)
            self.here.setdefault(i, {})[stage] = g
        ready = [i for i in carriers if self._is_ready(i)]
        while ready:
            self._send(ready[0])
            ready = [i for i in sorted(self.here) if self._is_ready(i)]

    def _is_ready(self, i: int) -> bool:
        """Whether all of a message is there, and the messages before it on its link have been sent."""
        if len(self.here.get(i, ())) < self._wanted(i):
            return False
        link = self.messages[i].link
        before = (j for j in range(i) if link and self.messages[j].link == link and self._wanted(j))
        return all(self.sent[j] > self.sent[i] for j in before)

    def _wanted(self, i: int) -> int:
        if i not in self.wanted:
            stages = {(c.transfer, c.stage) for c in self.messages[i].chunks}
            self.wanted[i] = sum(n in self.expected for n, _ in stages)
        return self.wanted[i]

    def _send(self, i: int) -> None:
        """Send a message with what of it is there, or has been under way in another."""
        over = self._scattered_over[i]
        self._receive(
            [w for w in self.under_way if _scatters(w.step) in over or any(map(self._sends_more, w.spans))]
        )
        here = self.here.pop(i, None)
        if here is None:  # what arrived was the rest of it
            return
        self.sent[i] += 1
        alike: dict[object, list[tuple[MessageChunk, _Gradient]]] = {}
        for c in self.messages[i].chunks:
            if (g := here.get((c.transfer, c.stage))) is not None and g.array is not None:
                step = self._step(g)
                alike.setdefault((step.kind, step.axes, g.array.dtype), []).append((c, g))
        for chunks in alike.values():
            self._start(chunks)

    def _sends_more(self, span: tuple[MessageChunk, _Gradient, int]) -> bool:
        """Whether a gradient travels again after this chunk."""
        chunk, _, _ = span
        return chunk.stage + 1 < len(self.program.stages(chunk.transfer, "back"))

    def _start(self, chunks: Sequence[tuple[MessageChunk, _Gradient]]) -> None:
        """Start one collective."""
        import torch

        if self._are_whole(chunks):
            self._start_whole(chunks)
            return
        pieces, spans = [], []
        for c, g in chunks:
            assert g.array is not None
            step = self._step(g)
            shape = self.program.whole_shape(g.number)
            pieces.append(columns_of_chunk(g.array, c, step, shape, self.groups))
            spans.append((c, g, pieces[-1].shape[1]))
            g.begun += c.nbytes
            if g.begun >= step.nbytes:  # otherwise, it would stay in memory until it arrives
                g.shape, g.array = tuple(g.array.shape), None
        alone = len(pieces) == 1
        wire = pieces[0] if alone else torch.cat(pieces, 1)
        if step.kind == "all_reduce":
            wire = self.groups.reshape(wire, (wire.numel(),))
            wire = self.groups.started_all_reduce(wire, step.axes, overwrite=self.overwrites and not alone)
        else:
            wire = self.groups.started_reduce_scatter(wire, step.axes)
        self.under_way.append(_SentWire(wire, spans, step))

    def _are_whole(self, chunks: Sequence[tuple[MessageChunk, _Gradient]]) -> bool:
        """Whether these are several gradients, all of each, that can be joined by one op."""
        steps = [(c, self._step(g)) for c, g in chunks]
        whole = all(c.nbytes == s.nbytes for c, s in steps)
        return whole and len(chunks) > 1 and (self.overwrites or steps[0][1].kind == "reduce_scatter")

    def _start_whole(self, chunks: Sequence[tuple[MessageChunk, _Gradient]]) -> None:
        """Start one collective of several gradients. Gradients to be summed are copied into one tensor, of which they
        become views. Those of one shape lie one after another, because one view then cuts them."""
        import torch

        whole = [(c, g, g.array) for c, g in chunks if g.array is not None]
        whole.sort(key=lambda some: tuple(some[2].shape))
        step, arrays, ways = self._step(chunks[0][1]), [x for *_, x in whole], 1
        views: list[Tensor] = []
        if step.kind == "all_reduce":
            wire = arrays[0].new_empty(sum(x.numel() for x in arrays))
            views = self._cut(wire, [tuple(x.shape) for x in arrays])
            torch._foreach_copy_(views, arrays)
            wire = self.groups.started_all_reduce(wire, step.axes, overwrite=True)
        else:
            ways = self.groups.ways(step.axes)
            fronts = [self._front(g, x) for _, g, x in whole]
            wire = self.groups.started_reduce_scatter(torch._chunk_cat(fronts, 0, ways), step.axes)
        spans = [(c, g, x.numel() // ways) for c, g, x in whole]
        for _, g, _ in whole:
            g.array = None  # it would stay in memory until the message arrives
        self.under_way.append(_SentWire(wire, spans, step, views))

    def _cut(self, wire: Tensor, shapes: Sequence[Extents]) -> list[Tensor]:
        """The arrays of these shapes that lie one after another in a wire."""
        runs: list[tuple[Extents, int]] = []
        for shape, same in itertools.groupby(shapes):
            count = len(list(same))
            runs += [(shape, count)] if len(shape) > 1 and count > 2 else [(shape, 1)] * count
        sizes = [math.prod(shape) * count for shape, count in runs]
        parts = wire.split(sizes) if len(sizes) > 1 else (wire,)
        made: list[Tensor] = []
        for (shape, count), part in zip(runs, parts, strict=True):
            several = count > 1
            x = self.groups.reshape(part, (count, *shape) if several else shape)
            made += x.unbind() if several else [x]
        return made

    def _step(self, g: _Gradient) -> LocalReshardStep:
        return self.program.reshard_steps(g.number, "back")[g.done]

    def _front(self, g: _Gradient, x: Tensor) -> Tensor:
        """A gradient to be scattered, of which each rank gets an equal part of the first dim."""
        shape = self.program.whole_shape(g.number)
        v = view(self._step(g), shape, self.program.mesh)
        return x if v.along == (0, None) else self.groups.to_front(x, v)

    def _receive(self, wires: Sequence[_SentWire]) -> None:
        """Wait for these collectives, and go on with the gradients of which all has arrived."""
        import torch

        self.under_way = [w for w in self.under_way if w not in wires]
        for w in wires:
            wire = self.groups.received(w.wire)
            if w.views:
                for (_, g, _), array in zip(w.spans, w.views, strict=True):
                    g.array, g.done = array, g.done + 1
                    self._go_on(g)
                continue
            shapes = [self._shape_after(g) for _, g, _ in w.spans]
            pieces = [
                shape if n == math.prod(shape) else (n,)
                for shape, (*_, n) in zip(shapes, w.spans, strict=True)
            ]
            for (c, g, n), shape, part in zip(w.spans, shapes, self._cut(wire, pieces), strict=True):
                array = part
                if n < math.prod(shape):
                    g.pieces[c.begin] = part
                    if sum(p.numel() for p in g.pieces.values()) < math.prod(shape):
                        continue
                    array = torch.cat([g.pieces[b] for b in sorted(g.pieces)]).reshape(shape)
                g.array, g.pieces, g.done, g.begun = array, {}, g.done + 1, 0
                self._go_on(g)

    def _shape_after(self, g: _Gradient) -> Extents:
        """The shape of a gradient after the step that is under way."""
        import torch

        steps, step = self.program.reshard_steps(g.number, "back"), self._step(g)
        if isinstance(g.root, torch.Tensor) and all(s.kind == "all_reduce" for s in steps[g.done + 1 :]):
            return tuple(g.root.shape)  # of the parameter, if the gradient is that of a view
        if step.kind == "all_reduce":
            return g.shape if g.array is None else tuple(g.array.shape)
        whole = self.program.whole_shape(g.number)
        return step.after.local_shape(whole, self.program.mesh)
