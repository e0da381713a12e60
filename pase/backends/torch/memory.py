"""Memory of a step on one rank, measured without a GPU and without data, beside the plan's account.

The rank's step (forward, backward and the optimizer's update, op by op as in eager mode) runs on fake tensors. Every
storage that an op makes counts from then until PyTorch frees it. What an op allocates only while it runs is not seen:
the workspace of a product or a convolution, and the buffers of a communication library. Nor is what the allocator
rounds up. What a collective reads lives until it is waited for, because NCCL's process group holds it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pase.backends.torch.code import groups_of_one
from pase.backends.torch.imagined import ImaginedStep, imagined_batch, imagined_step
from pase.backends.torch.program import can_record
from pase.backends.torch.spmd.record import ProgramCall, RecordedBlock
from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.files.quantities import bytes_text
from pase.memory.account import Memory
from pase.pytree import Tree

if TYPE_CHECKING:
    from rich.table import Table as RichTable
    from torch import Tensor
    from torch._ops import OpOverload
    from torch.fx import GraphModule
    from torch.optim import Optimizer
    from torch.utils._python_dispatch import TorchDispatchMode

    from pase.backends.torch.plan import TorchPlan
    from pase.frontends.torch.values import TorchOperand

__all__ = ["PeakPhase", "TorchMemory", "rank_memory"]

PeakPhase = Literal["forward", "backward", "update"]

_OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
}
"""Optimizer of a plan -> its class in ``torch.optim``, and its settings."""


@dataclass(frozen=True, kw_only=True)
class TorchMemory:
    """Bytes of one rank at the peak of a step.

    saved: what autograd keeps for backward, without parameters. buffers: the module's own, and constants of the
    program. temporaries: all else. phase: when the peak is. predicted: the plan's account; its activations are
    ``saved`` and ``inputs``, its buffers are ``temporaries``.
    """

    model: str
    rank: int
    devices: int
    phase: PeakPhase
    parameters: int
    gradients: int
    optimizer: int
    saved: int
    inputs: int
    buffers: int
    temporaries: int
    predicted: Memory | None

    @property
    def total(self) -> int:
        """The peak."""
        own = (self.parameters, self.gradients, self.optimizer, self.saved, self.inputs, self.buffers)
        return sum(own) + self.temporaries

    def to_json(self) -> JsonObject:
        """All fields, with the totals."""
        made = dataclasses.asdict(self) | {"total": self.total}
        if self.predicted is not None:
            made["predicted"] = dataclasses.asdict(self.predicted) | {"total": self.predicted.total}
        return made

    def __str__(self) -> str:
        from pase.files.terminal import text_of

        return text_of([self.table()])

    def table(self) -> RichTable:
        """The kinds as rows: predicted, tracked, and their ratio."""
        from rich.table import Table

        table = Table(title=f"{self.model}: rank {self.rank} of {self.devices}, peak in {self.phase}")
        table.add_column("", no_wrap=True)
        for name in ("predicted", "tracked", "predicted/tracked"):
            table.add_column(name, justify="right")
        p = self.predicted
        for name, predicted, tracked in (
            ("parameters", None if p is None else p.parameters, self.parameters),
            ("gradients", None if p is None else p.gradients, self.gradients),
            ("optimizer state", None if p is None else p.optimizer, self.optimizer),
            ("activations and inputs", None if p is None else p.activations, self.saved + self.inputs),
            ("the module's buffers", None, self.buffers),
            ("temporaries", None if p is None else p.buffers, self.temporaries),
            ("peak", None if p is None else p.total, self.total),
        ):
            ratio = f"{predicted / tracked:.3f}" if predicted is not None and tracked else ""
            table.add_row(
                name, "" if predicted is None else bytes_text(predicted), bytes_text(tracked), ratio
            )
        return table


@dataclass(eq=False)
class _CountedStorage:
    """A storage in the course of a step. Times count ops; ``end`` is None as long as it lives.

    by: the number of the derivative that made it; None for what is made elsewhere.
    """

    nbytes: int
    begin: int
    by: int | None
    end: int | None = None


@dataclass(frozen=True, kw_only=True)
class _LivingAt:
    """The bytes that lived when an op ended."""

    nbytes: int = 0
    at: int = 0
    phase: PeakPhase = "forward"


@dataclass(kw_only=True)
class _LiveStorages:
    """The storages of a step, and the most bytes that lived at once.

    last: when the last op ended. before: the peak without it. added: the gradient that it added another one to.
    names: address of a living storage -> it. watched: keeps the callbacks alive.
    """

    now: int = 0
    living: int = 0
    phase: PeakPhase = "forward"
    peak: _LivingAt = _LivingAt()
    before: _LivingAt = _LivingAt()
    last: _LivingAt = _LivingAt()
    added: _CountedStorage | None = None
    names: dict[int, _CountedStorage] = field(default_factory=dict)
    watched: dict[int, object] = field(default_factory=dict)
    every: list[_CountedStorage] = field(default_factory=list)

    def of(self, x: Tensor, by: int | None = None) -> _CountedStorage:
        """The storage of a tensor, which counts from now on if it is new. by: the derivative that runs."""
        storage = x.untyped_storage()
        at = storage._cdata
        if at not in self.names:
            made = self.names[at] = _CountedStorage(storage.nbytes(), self.now, by)
            self.every.append(made)
            self.watched[at] = weakref.ref(storage, lambda _: self._freed(at))
            self.living += made.nbytes
        return self.names[at]

    def _freed(self, at: int) -> None:
        gone = self.names.pop(at)
        self.watched.pop(at)
        gone.end = self.now
        self.living -= gone.nbytes
        # Nothing else held it, so autograd would have added in place, which it does not while something watches.
        if gone is self.added:
            gone.end = self.last.at
            self._ended(replace(self.last, nbytes=self.last.nbytes - gone.nbytes))

    def resized(self, x: Tensor) -> None:
        """A storage's memory was freed, or allocated again."""
        storage = x.untyped_storage()
        if (before := self.names.pop(storage._cdata, None)) is not None:
            self.watched.pop(storage._cdata)
            before.end = self.now
            self.living -= before.nbytes
        if storage.nbytes():
            self.of(x)

    def tick(self, added: _CountedStorage | None = None) -> None:
        """An op has run. added: the gradient that it added another one to."""
        self.before, self.added = self.peak, added
        self._ended(_LivingAt(nbytes=self.living, at=self.now, phase=self.phase))
        self.now += 1

    def _ended(self, last: _LivingAt) -> None:
        self.last, self.peak = last, max(self.before, last, key=lambda x: x.nbytes)

    def begin(self) -> None:
        """Forget the peak so far."""
        self.peak, self.phase = _LivingAt(), "forward"
        self.tick()

    def at_peak(self) -> Iterator[_CountedStorage]:
        """The storages that lived at the peak."""
        at = self.peak.at
        return (s for s in self.every if s.begin <= at and (s.end is None or s.end > at))


@cache
def _zeros() -> Collection[OpOverload]:
    """The ops that make zeros."""
    from torch import ops

    return ops.aten.new_zeros.default, ops.aten.zeros.default, ops.aten.zeros_like.default


@cache
def _written_over_zeros() -> Mapping[OpOverload, OpOverload]:
    """PyTorch's derivatives of look-ups write into the zeros that they made, but not while something watches their
    ops: op -> what it is then."""
    from torch import ops

    return {
        ops.aten.index_put.default: ops.aten.index_put_.default,
        ops.aten.index_add.default: ops.aten.index_add_.default,
        ops.aten.scatter_add.default: ops.aten.scatter_add_.default,
        ops.aten.scatter.src: ops.aten.scatter_.src,
        ops.aten.scatter.value: ops.aten.scatter_.value,
    }


@cache
def _mode() -> type[TorchDispatchMode]:
    """The class of the tracker. It is created on first use, because it needs PyTorch."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    sent, over_zeros = torch.ops._c10d_functional, _written_over_zeros()
    wait, into = sent.wait_tensor.default, sent.all_gather_into_tensor_out.default
    # The other collectives sum a copy of what they are given.
    held_until_wait = (
        sent.all_gather_into_tensor.default,
        into,
        sent.all_to_all_single.default,
        sent.reduce_scatter_tensor.default,
    )

    class Tracker(TorchDispatchMode):
        def __init__(self, storages: _LiveStorages) -> None:
            super().__init__()
            self.storages = storages
            self.fresh: object = None  # the zeros that the last op made
            self.under_way: dict[int, object] = {}  # address of a collective's result -> what it reads

        def __torch_dispatch__(
            self,
            func: OpOverload,
            types: object,
            args: tuple[TorchOperand, ...] = (),
            kwargs: dict[str, TorchOperand] | None = None,
        ) -> Tree:
            self.storages.added = None  # what is freed from now on was held until here
            if func is wait:  # the result is the tensor itself, but a fake one would be another
                (result,) = args
                assert isinstance(result, torch.Tensor)
                self.under_way.pop(result.untyped_storage()._cdata, None)
                return result
            in_backward = torch._C._current_graph_task_id() != -1
            derivative = torch._C._current_autograd_node() if in_backward else None
            by = None if derivative is None else derivative._sequence_nr()
            added = None
            if func is torch.ops.aten.add.Tensor and by is not None and isinstance(args[0], torch.Tensor):
                sum_of = self.storages.of(args[0])
                added = sum_of if sum_of.by not in (None, by) else None  # not part of the derivative itself
            over = in_backward and func in over_zeros and args[0] is self.fresh
            kwargs = kwargs or {}
            made = (over_zeros[func] if over else func)(*args, **kwargs)
            if func is into:  # a fake result is another tensor, with memory of its own
                made = kwargs["out"]
            self.fresh = made if func in _zeros() else None
            if func in held_until_wait and isinstance(made, torch.Tensor):
                self.under_way[made.untyped_storage()._cdata] = args[0]
            if in_backward:
                self.storages.phase = "backward"
            for x in tree_leaves(made):
                if isinstance(x, torch.Tensor):
                    self.storages.of(x, by)
            self.storages.tick(added)
            return made

    return Tracker


def rank_memory(
    plan: TorchPlan, rank: int, optimizer: Callable[[Iterable[Tensor]], Optimizer] | None
) -> TorchMemory:
    """See ``TorchPlan.memory``."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    make = optimizer or _optimizer_of(plan)
    groups, storages = groups_of_one(plan, rank), _LiveStorages()
    if not can_record(plan.walk(groups)):
        raise PaseError(
            "the model has branches that depend on data, so nobody knows beforehand what its step keeps",
            where=f"model '{plan.program.name}'",
        )
    saved: set[_CountedStorage] = set()

    def pack(x: Tensor) -> Tensor:
        saved.add(storages.of(x))
        return x

    with FakeTensorMode(allow_non_fake_inputs=True), _mode()(storages):
        step, batch = imagined_step(plan, groups), imagined_batch(plan)
        step.walk.gathered_again.resized = storages.resized
        trained = [p for p in step.stored.values() if p.requires_grad]
        update = make(trained)

        step.backward(*batch)  # records the program
        update.step()  # makes the optimizer's state
        update.zero_grad()
        kinds = dict(_known(step, update, batch, storages))
        storages.begin()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            step.backward(*batch)
        storages.phase = "update"
        update.step()
        for p in trained:
            if p.grad is not None:
                kinds.setdefault(storages.of(p.grad), "gradients")
        found: dict[str, int] = dict.fromkeys((*_KINDS, "gradients", "saved", "temporaries"), 0)
        for s in storages.at_peak():
            found[kinds.get(s, "saved" if s in saved else "temporaries")] += s.nbytes
    return TorchMemory(
        model=plan.program.name,
        rank=rank,
        devices=plan.mesh.devices,
        phase=storages.peak.phase,
        predicted=plan.account,
        **found,
    )


_KINDS = ("parameters", "optimizer", "inputs", "buffers")


def _known(
    step: ImaginedStep, update: Optimizer, batch: Iterable[Tensor | None], storages: _LiveStorages
) -> Iterator[tuple[_CountedStorage, str]]:
    """The kinds of the storages that live from step to step."""
    import torch
    from torch.utils._pytree import tree_leaves

    state = tree_leaves([dict(s) for s in update.state.values()])
    programs = [p.module for p in step.programs.made.values()]
    held = [x for m in programs for x in _constants(m)]
    every: Mapping[str, Iterable[Any]] = {
        "buffers": [*step.held.values(), *held],
        "inputs": batch,
        "optimizer": state,
        "parameters": step.stored.values(),
    }
    for kind, tensors in every.items():
        for x in tensors:
            if isinstance(x, torch.Tensor):
                yield storages.of(x), kind


def _constants(module: GraphModule) -> Iterator[Tensor]:
    """The tensors that are part of a recorded program."""
    yield from module.buffers()
    for n in module.graph.nodes:
        if isinstance(n.target, ProgramCall) and isinstance(n.target.run, RecordedBlock):
            yield from _constants(n.target.run.module)


def _optimizer_of(plan: TorchPlan) -> Callable[[Iterable[Tensor]], Optimizer]:
    """The plan's optimizer. Raises PaseError if PyTorch has none of that name."""
    import torch

    if plan.optimizer not in _OPTIMIZERS:
        raise PaseError(
            f"torch.optim has no optimizer '{plan.optimizer}'",
            where="plan.torch.memory",
            fix="pass one: plan.torch.memory(optimizer=lambda parameters: MyOptimizer(parameters))",
        )
    name, settings = _OPTIMIZERS[plan.optimizer]
    return lambda parameters: getattr(torch.optim, name)(list(parameters), **settings)
