"""Turns a module's tensors into DTensors, in the layout in which the plan keeps gradients and optimizer state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.local.reshard import part
from pase.local.types import LocalOp
from pase.tables.axis_layout import AxisLayout, Digit

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.nn import Module, Parameter

    from pase.backends.torch.parallel import ParallelModule
    from pase.frontends.torch.export.module import TorchProgram

__all__ = ["Storage", "lifted_of", "shared_out"]


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Turns a module's tensors into DTensors.

    meshes: device meshes whose axes have another order than the plan's.
    """

    parallel: ParallelModule
    meshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict)

    def distributed(self, x: Tensor, tensor: str | None, *, gradient: bool) -> DTensor:
        """A DTensor from values that every rank has. A tensor that the step does not read is replicated."""
        import torch
        from torch.distributed.tensor import DTensor, Replicate, Shard

        groups, mesh = self.parallel.walk.groups, self.parallel.plan.mesh
        layout = AxisLayout.whole(mesh)
        if tensor is not None:
            r = self.parallel.plan.program.result(tensor)
            layout = r.gradient if gradient else r.layout
        # A copy, because a part may be a view, which would keep the whole tensor in memory.
        local = part(x, tuple(x.shape), layout, groups).clone(memory_format=torch.contiguous_format)
        states = dict(zip(mesh.names, layout, strict=True))
        order = self._common or self._order([layout])
        assert order is not None  # a single layout always has a valid order
        placements = [Shard(s.dim) if isinstance(s := states[a], Digit) else Replicate() for a in order]
        return DTensor.from_local(
            local,
            self._devices(order),
            placements,
            run_check=False,
            shape=x.shape,
            stride=x.contiguous().stride(),
        )

    @property
    def orders(self) -> set[tuple[str, ...]]:
        """The orders of the mesh's axes for which a device mesh is needed."""
        if self._common is not None:
            return {self._common}
        every = {self._order([r.gradient]) for op in self._kept for r in op.results}
        return {self.parallel.plan.mesh.names, *(o for o in every if o is not None)}

    @cached_property
    def _common(self) -> tuple[str, ...] | None:
        """An order of axes in which every stored dim is split major to minor, as DTensor requires; None if no order
        suits all tensors.
        """
        stored = (r for op in self._kept for r in op.results)
        return self._order([r.gradient for r in stored])

    @property
    def _kept(self) -> list[LocalOp]:
        """The ops of parameters, and of buffers that the step writes."""
        program = self.parallel.plan.program
        return [
            op
            for op in program.ops
            if op.op.kind == "parameter" or (op.op.kind == "input" and program.takers.get(op.op.eqn))
        ]

    def _order(self, layouts: Sequence[AxisLayout]) -> tuple[str, ...] | None:
        mesh = self.parallel.plan.mesh
        sorter: TopologicalSorter[str] = TopologicalSorter({a: () for a in mesh.names})
        for layout in layouts:
            rank = 1 + max((digit.dim for _, digit in layout.digits), default=-1)
            for axes in layout.placement(rank, mesh) or ():
                for major, minor in itertools.pairwise(axes):
                    sorter.add(minor, major)
        try:
            return _stable(sorter, mesh.names)
        except CycleError:
            return None

    def _devices(self, order: tuple[str, ...]) -> DeviceMesh:
        """PyTorch's mesh with its axes in this order."""
        if order not in self.meshes:
            self.meshes[order] = self.parallel.walk.groups.ordered(order)
        return self.meshes[order]


def shared_out(first: Storage, holder: Callable[[str | None], Storage | None]) -> frozenset[str]:
    """Replace a module's tensors by DTensors with rank 0's values, and add parameters to ``stored``. Returns the
    tensors that are trained.

    first: the storage of the module, or of its first stage.
    holder: tensor (None if the step does not read it) -> the storage that stores it. If that is None, another rank
        stores the tensor, and it becomes None here.
    """
    from torch import nn

    p = first.parallel
    program, leaves, module = p.plan.traced.program, p.plan.leaves, p.module
    tensor = {path: leaves[n] for n, path in program.parameters.items() if n in leaves}
    state = _written_parameters(first)
    made: dict[int, Parameter | None] = {}
    trained, seen = set(), set()
    old: Tensor
    for path, old in list(module.named_parameters(remove_duplicate=False)):
        if id(old) in state:
            continue
        if id(old) not in made:
            t = tensor.get(path)
            _check(first, path, old, t)
            x, storage = _of_first_rank(old, p.device), holder(t)
            made[id(old)] = None
            if storage is not None:
                new = nn.Parameter(storage.distributed(x, t, gradient=True), requires_grad=old.requires_grad)
                made[id(old)] = new
                if t is not None:
                    storage.parallel.stored[t] = new
            if t is not None:
                seen.add(t)
                trained |= {t} if old.requires_grad else set()
        _owner(module, path)._parameters[path.rpartition(".")[2]] = made[id(old)]
    if missing := sorted(set(tensor.values()) - seen):
        path = next(k for k, v in tensor.items() if v == missing[0])
        raise PaseError(
            f"the module has no parameter '{path}', so it is not the plan's model",
            where="module",
            fix="pass the model that the plan was compiled from",
        )
    _share_buffers(first)
    return frozenset(trained)


def _written_parameters(storage: Storage) -> set[int]:
    """The ids of the parameters that are not trained but written by the step."""
    program = storage.parallel.plan.traced.program
    written = {*program.mutated.values(), *program.counters.values()}
    every = storage.parallel.module.named_parameters(remove_duplicate=False)
    return {id(x) for path, x in every if path in written}


def _share_buffers(storage: Storage) -> None:
    """Turn the buffers that the step writes into DTensors, and give all others rank 0's values. Tied buffers stay
    tied."""
    from torch import nn

    p = storage.parallel
    program, leaves = p.plan.traced.program, p.plan.leaves
    written = set(program.mutated.values())
    tensor = {path: leaves[n] for n, path in program.buffers.items() if path in written}
    state = _written_parameters(storage)
    parameters = [x for x in p.module.named_parameters(remove_duplicate=False) if id(x[1]) in state]
    every = [*p.module.named_buffers(remove_duplicate=False), *parameters]
    first: dict[int, str] = {}
    for path, old in every:
        first.setdefault(id(old), path)
    made: dict[int, Tensor] = {}
    for path, old in every:
        if old.is_meta and p.device.type != "meta" and first[id(old)] not in written:
            raise PaseError(
                "the buffer is on the meta device, so it has no values",
                where=f"module.{path}",
                fix="give it values first",
            )
        if id(old) not in made:
            x, t = _of_first_rank(old, p.device), tensor.get(first[id(old)])
            x = x if t is None else storage.distributed(x, t, gradient=False)
            made[id(old)] = nn.Parameter(x, requires_grad=False) if id(old) in state else x
        owner, name = _owner(p.module, path), path.rpartition(".")[2]
        (owner._parameters if id(old) in state else owner._buffers)[name] = made[id(old)]  # type: ignore[assignment]


def lifted_of(program: TorchProgram, device: torch.device) -> dict[str, Tensor]:
    """The tensors that a model holds outside of its parameters and buffers, with rank 0's values."""
    from torch._subclasses.fake_tensor import FakeTensor

    if device.type != "meta":
        for path, x in program.constants.items():
            if isinstance(x, FakeTensor):
                raise PaseError(
                    "the step reads this tensor, which the model's forward computed in a way that PyTorch's export "
                    "does not follow",
                    where=f"tensor '{path}'",
                    fix="compute it from tensors with ops alone, or register it as a buffer",
                )
    return {path: _of_first_rank(x, device) for path, x in program.constants.items()}


def _owner(module: Module, path: str) -> Module:
    return module.get_submodule(path.rpartition(".")[0])


def _check(storage: Storage, path: str, old: Tensor, tensor: str | None) -> None:
    if old._backward_hooks or getattr(old, "_post_accumulate_grad_hooks", None):
        raise PaseError(
            "the parameter has a hook on its gradient, which its sharded parameter would not have",
            where=f"module.{path}",
            fix="register the hook after parallelize, on the parameter that the module has then",
        )
    if tensor is None:
        return
    shape = storage.parallel.plan.program.result(tensor).shape
    if tuple(old.shape) != shape:
        raise PaseError(
            f"its shape is {list(old.shape)}, but the plan was compiled for {list(shape)}",
            where=f"module.{path}",
            fix="pass the model that the plan was compiled from",
        )


def _of_first_rank(old: Tensor, device: torch.device) -> Tensor:
    """Rank 0's values, on every rank. For a tensor on the meta device, an empty tensor that a checkpoint can fill."""
    import torch
    import torch.distributed as dist

    if old.is_meta and device.type != "meta":
        return torch.empty_like(old, device=device)
    x = old.detach().to(device).contiguous()
    if x.device.type != "meta" and x.numel():
        dist.broadcast(torch.view_as_real(x) if x.is_complex() else x, 0)
    return x


def _stable(sorter: TopologicalSorter[str], names: Sequence[str]) -> tuple[str, ...]:
    """A topological order of the axes; the mesh's own order if it is valid."""
    sorter.prepare()
    out: list[str] = []
    ready: set[str] = set()
    while sorter.is_active():
        ready |= set(sorter.get_ready())
        first = min(ready, key=names.index)
        ready.remove(first)
        sorter.done(first)
        out.append(first)
    return tuple(out)
