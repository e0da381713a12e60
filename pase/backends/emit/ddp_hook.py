"""Runs a bucket plan in PyTorch: a communication hook for DistributedDataParallel, or DDP's own bucket sizes.

DDP passes on gradients as soon as they are computed. The hook splits and joins them into the plan's messages. It issues
the messages strictly in the plan's order, each as soon as its gradients are ready. The order is the same on every rank,
so there is no deadlock. As without a hook, DDP waits for the messages that contain a bucket's gradients.

    runner = ddp_hook.attach(ddp, problem, plan)
    loss.backward(); runner.step(optimizer)

Delayed and merged updates: gradients are summed locally, sent when their messages are due, and applied once, divided by
the number of batches times the number of ranks. Between updates ``step`` does not call the optimizer, so momentum and
weight decay do not change the weights.

Only plans whose gradients are all-reduced can be run. PyTorch itself handles parameters that are stored sharded (FSDP);
for JAX, see `backends.jax.bucket_runner`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.schedule.plan import BucketPlan, Piece, check_plan
from pase.schedule.types import Link, ScheduleProblem

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import GradBucket, ProcessGroup
    from torch.futures import Future
    from torch.nn import Module
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer

__all__ = ["BucketHook", "attach", "ddp_options", "gradient_problem"]

MIB = 2**20


def gradient_problem(
    module: Module, links: Sequence[Link], *, forward_s: float, backward_s: float, name: str = "model"
) -> ScheduleProblem:
    """A simple scheduling problem for a torch module.

    It assumes that gradients are computed in reverse order of registration, in time proportional to their bytes.
    """
    from pase.schedule.pipedream import Layer, problem_from_layers

    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    total = sum(p.numel() for _, p in named)
    layers = [
        Layer(
            name=n,
            forward_s=forward_s * p.numel() / total,
            backward_s=backward_s * p.numel() / total,
            parameters=((n, p.numel() * p.element_size()),),
        )
        for n, p in named
    ]
    return problem_from_layers(layers, tuple(links), name=name)


def ddp_options(problem: ScheduleProblem, plan: BucketPlan) -> dict[str, object]:
    """The arguments for DistributedDataParallel that come closest to the plan without a hook.

    If this PyTorch version accepts a list, it contains a cap for each bucket, in the order of sending. DDP follows that
    order after it has rebuilt its buckets, from the second iteration on. Otherwise there is only the largest cap.
    """
    import inspect

    from torch.nn.parallel import DistributedDataParallel

    from pase.schedule.emit import ddp_caps_mb

    caps = ddp_caps_mb(problem, plan)
    if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:
        return {"bucket_cap_mb_list": caps}
    return {"bucket_cap_mb": max(caps)}


def attach(
    ddp: DistributedDataParallel,
    problem: ScheduleProblem,
    plan: BucketPlan,
    *,
    groups: Mapping[str, ProcessGroup] | None = None,
) -> BucketHook:
    """Register the plan's hook on a DistributedDataParallel module.

    ddp: a module created with a small ``bucket_cap_mb`` (such as 0.001), so that DDP passes on each gradient as soon as
        it is computed. With larger buckets the results are the same, but messages start later.
    groups: a process group for each link of the problem, by name, each over the same ranks. None uses the module's own
        group for all links.

    Raises PaseError if the plan is not for this module's parameters, or contains gradients that are not all-reduced.
    """
    from pase.schedule.simulate import as_sequence

    plan = as_sequence(problem, plan)
    hook = BucketHook(
        module=ddp.module, problem=problem, plan=plan, group=ddp.process_group, groups=dict(groups or {})
    )
    # A lambda, because DDP rejects functions with annotations that it cannot read.
    ddp.register_comm_hook(state=hook, hook=lambda state, bucket: state.on_bucket(bucket))
    return hook


@dataclass(kw_only=True)
class BucketHook:
    """The state of a running plan on one rank. Call ``step`` instead of ``optimizer.step`` and ``zero_grad``."""

    module: Module
    problem: ScheduleProblem
    plan: BucketPlan
    group: ProcessGroup
    groups: Mapping[str, ProcessGroup]
    iteration: int = 0
    log: list[tuple[int, int]] = field(default_factory=list)
    """(iteration, message) in the order of issue."""

    def __post_init__(self) -> None:
        check_plan(self.problem, self.plan)
        if self.plan.updates[0].first:
            raise PaseError(
                "its first update does not start at iteration 0",
                where=f"plan '{self.plan.policy}'",
                fix="count iterations from 0, the first batch of its first update",
            )
        named = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        for t in self.problem.tensors:
            if t.kind != "all_reduce" or t.lag != 1 or t.follows:
                raise PaseError(
                    f"tensor '{t.name}' is a {t.kind}, but DDP only all-reduces gradients of whole parameters",
                    where=f"problem '{self.problem.name}'",
                    fix="run a plan that scatters and gathers in JAX (pase.backends.jax.bucket_runner)",
                )
            if t.name.removesuffix(".grad.all_reduce") not in named:
                raise PaseError(
                    f"tensor '{t.name}' is not a parameter of the module, which has {', '.join(named)}",
                    where=f"problem '{self.problem.name}'",
                    fix="make the problem from this module",
                )
        self._parameters = [named[t.name.removesuffix(".grad.all_reduce")] for t in self.problem.tensors]
        lost = sorted(set(named) - {t.name.removesuffix(".grad.all_reduce") for t in self.problem.tensors})
        if lost:
            raise PaseError(
                f"it leaves out the parameters {', '.join(lost)}",
                where=f"problem '{self.problem.name}'",
                fix="make the problem from this module",
            )
        for link, group in self.groups.items():
            if link not in {x.name for x in self.problem.links}:
                raise PaseError(
                    f"problem '{self.problem.name}' has no link '{link}'",
                    where="groups",
                    fix=f"use its links: {', '.join(x.name for x in self.problem.links)}",
                )
            if group.size() != self.group.size():
                raise PaseError(
                    f"the group of link '{link}' has {group.size()} ranks, but the module's has {self.group.size()}",
                    where="groups",
                    fix="pass groups over the module's ranks",
                )
        self._index = {id(p): i for i, p in enumerate(self._parameters)}
        self._ready: set[int] = set()
        self._open: dict[int, _SumsOfUpdate] = {}
        self._queue: list[tuple[int, int]] = []
        self._views: dict[int, Tensor] = {}
        self._buckets: list[_Bucket] = []
        self._lock = threading.Lock()
        self._covers: dict[int, set[int]] = {}
        for i, m in enumerate(self.plan.messages):
            for p in m.pieces:
                self._covers.setdefault(p.tensor, set()).add(i)

    @property
    def delays(self) -> bool:
        """Whether updates are merged or delayed. If not, the usual ``optimizer.step`` also works."""
        return self.plan.period > 1 or self.plan.staleness > 0

    # --- during backward -----------------------------------------------------------------------------------

    def on_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        """Send what can be sent. DDP calls this with a bucket of gradients that are ready.

        DDP waits for the returned future. It holds the bucket's means or, if updates are delayed, the unchanged bucket.
        """
        import torch

        if not self._ready:
            self._begin()
        made = self._generation(self._current())
        tensors = [self._index[id(p)] for p in bucket.parameters()]
        future: Future[Tensor] = torch.futures.Future()
        for t, grad in zip(tensors, bucket.gradients(), strict=True):
            flat = grad.reshape(-1)
            if t not in made.sums:
                made.sums[t] = flat.clone()
            else:
                made.sums[t] += flat
            self._ready.add(t)
            self._views[t] = flat
        if self.delays:
            future.set_result(bucket.buffer())
        else:
            wanted = {i for t in tensors for i in self._covers[t]}
            with self._lock:  # a message that arrives at the same time replaces the list
                self._buckets.append(_Bucket(future=future, buffer=bucket.buffer(), waiting=wanted))
        self._issue()
        if bucket.is_last() and not self.delays:
            self._open.clear()
            self._ready.clear()
            self.iteration += 1
        return future

    def _arrived(self, message: int, buffer: Tensor) -> None:
        """Store the means of a message that has arrived where DDP expects them. Used if updates are not delayed."""
        with self._lock:
            for p, part in self._parts(message, buffer):
                a, b = self._range(p)
                self._views[p.tensor][a:b] = part
            for bucket in self._buckets:
                bucket.waiting.discard(message)
            done = [b for b in self._buckets if not b.waiting]
            self._buckets = [b for b in self._buckets if b.waiting]
        for bucket in done:
            bucket.future.set_result(bucket.buffer)

    def _parts(self, message: int, buffer: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        at = 0
        for p in self.plan.messages[message].pieces:
            a, b = self._range(p)
            yield p, buffer[at : at + b - a]
            at += b - a

    def _current(self) -> int:
        """The generation to which this iteration's gradients belong."""
        period, at = divmod(self.iteration, self.plan.period)
        u = next(i for i, u in enumerate(self.plan.updates) if u.first <= at <= u.last)
        return period * len(self.plan.updates) + u

    def _times(self, generation: int) -> tuple[int, int, int, int]:
        """(update, first, last, at) of a generation, counted from the start of the run."""
        period, u = divmod(generation, len(self.plan.updates))
        x, o = self.plan.updates[u], period * self.plan.period
        return u, x.first + o, x.last + o, x.at + o

    def _generation(self, g: int) -> _SumsOfUpdate:
        return self._open.setdefault(g, _SumsOfUpdate())

    def _begin(self) -> None:
        """Queue the messages of this iteration: those that are due, in plan order, for each open generation."""
        self._generation(self._current())
        for g in sorted(self._open):
            u, _, last, _ = self._times(g)
            self._queue += [
                (g, i)
                for i, m in enumerate(self.plan.messages)
                if m.update == u and last + m.iteration == self.iteration
            ]
        self._issue()

    def _issue(self) -> None:
        """Start messages from the head of the queue while their gradients are ready."""
        import torch
        import torch.distributed as dist

        while self._queue:
            g, i = self._queue[0]
            message, made = self.plan.messages[i], self._open[g]
            if self._times(g)[2] == self.iteration and not {p.tensor for p in message.pieces} <= self._ready:
                return
            self._queue.pop(0)
            parts = [made.sums[p.tensor][slice(*self._range(p))] for p in message.pieces]
            buffer = torch.cat(parts) / self._divisor(g)
            name = self.problem.links[message.link].name
            work = dist.all_reduce(buffer, group=self.groups.get(name, self.group), async_op=True)
            self.log.append((self.iteration, i))
            if self.delays:
                made.sent.append((i, buffer, work))
            else:
                work.get_future().then(lambda _, i=i, buffer=buffer: self._arrived(i, buffer))

    def _divisor(self, g: int) -> int:
        _, first, last, _ = self._times(g)
        return int((last - first + 1) * self.group.size())

    def _range(self, piece: Piece) -> tuple[int, int]:
        """The elements [from, to) of a parameter that a piece covers."""
        n, nbytes = self._parameters[piece.tensor].numel(), self.problem.tensors[piece.tensor].nbytes
        return round(piece.offset * n / nbytes), round((piece.offset + piece.nbytes) * n / nbytes)

    # --- after backward ------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer) -> bool:
        """Apply the updates of this iteration, and clear gradients. Returns whether the optimizer was called."""
        if not self.delays:
            optimizer.step()
            optimizer.zero_grad()
            return True
        if len(self._ready) < len(self._parameters):
            lost = [t.name for i, t in enumerate(self.problem.tensors) if i not in self._ready]
            raise PaseError(
                f"there is no gradient of {', '.join(lost)}",
                where="step(optimizer)",
                fix="call backward first",
            )
        done = [g for g in sorted(self._open) if self._times(g)[3] == self.iteration]
        for g in done:
            self._apply(self._open.pop(g), self._times(g)[0])
            optimizer.step()
        optimizer.zero_grad()
        self._ready.clear()
        self.iteration += 1
        return bool(done)

    def _apply(self, made: _SumsOfUpdate, update: int) -> None:
        """Store the generation's mean gradients where the optimizer expects them."""
        import torch

        owed = {i for i, m in enumerate(self.plan.messages) if m.update == update} - {
            i for i, _, _ in made.sent
        }
        if owed:
            raise PaseError(
                f"it applies an update before its messages {sorted(owed)} are sent",
                where=f"plan '{self.plan.policy}'",
            )
        means = {t: torch.empty_like(x) for t, x in made.sums.items()}
        for i, buffer, work in made.sent:
            work.wait()
            for p, part in self._parts(i, buffer):
                a, b = self._range(p)
                means[p.tensor][a:b] = part
        for t, mean in means.items():
            parameter = self._parameters[t]
            parameter.grad = mean.view_as(parameter)


@dataclass(kw_only=True)
class _Bucket:
    """A bucket that DDP waits for, and the messages that must still arrive."""

    future: Future[Tensor]
    buffer: Tensor
    waiting: set[int]


@dataclass(kw_only=True)
class _SumsOfUpdate:
    """An update in progress: local sums by tensor, and (message, buffer, work) of each message that was sent."""

    sums: dict[int, Tensor] = field(default_factory=dict)
    sent: list[tuple[int, Tensor, Future[Tensor]]] = field(default_factory=list)
