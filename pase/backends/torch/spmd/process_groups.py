"""Process groups over mesh axes, and the collectives over them, on plain local tensors.

A group spans one axis of the plan's mesh, or several axes that one collective uses together. Its ranks are in row-major
order, as in ``pase.local``. The collectives are PyTorch's functional collectives, which can be traced. Their own
derivatives are never used, because that of an all-reduce would sum the loss of all ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pase.errors import PaseError
from pase.local.arrays import ArrayBranch, Arrays, check_combine
from pase.local.types import Combine, Extents
from pase.machine import CollectiveKind, Mesh

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from pase.local.exchange import UnitExchange
    from pase.local.parts import WireView

__all__ = ["AxisGroups", "axis_groups"]

T = TypeVar("T")


@contextlib.contextmanager
def _on(stack: list[T], top: T) -> Iterator[None]:
    """A context in which a stack has one more entry."""
    stack.append(top)
    try:
        yield
    finally:
        stack.pop()


@dataclass(frozen=True, kw_only=True)
class AxisGroups(Arrays["Tensor"]):
    """The groups that this rank is in, and the operations of a local program on its tensors.

    devices: PyTorch's mesh with the plan's axes in the plan's order; in a pipeline, the mesh of this rank's stages.
    everywhere: in a pipeline, the mesh of all ranks, with the axis of the stages first.
    names: axes used together (without axes of size 1) -> the group's name.
    place: this rank's index along each axis.
    """

    mesh: Mesh
    devices: DeviceMesh
    names: dict[tuple[str, ...], str] = field(default_factory=dict)
    place: tuple[int, ...]
    everywhere: DeviceMesh | None = None
    kinds: list[CollectiveKind] = field(default_factory=list)
    """The kinds of the collectives that are being sent, in the plan's terms, if PyTorch's op does not tell them."""

    def ordered(self, order: Sequence[str]) -> DeviceMesh:
        """PyTorch's mesh with the axes in another order. Every rank must call it with the same orders."""
        from torch.distributed.device_mesh import DeviceMesh

        if tuple(order) == self.mesh.names:
            return self.devices
        whole = self.devices if self.everywhere is None else self.everywhere
        names = tuple(n for n in whole.mesh_dim_names or () if n not in order) + tuple(order)
        ranks = whole.mesh.permute([(whole.mesh_dim_names or ()).index(n) for n in names])
        made = DeviceMesh(whole.device_type, ranks, mesh_dim_names=names)
        return made if self.everywhere is None else made[tuple(order)]

    # The tensors of this rank. A view that changes nothing is not made, because each is an op.

    def shape(self, x: Tensor) -> Extents:
        return tuple(x.shape)

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x if tuple(x.shape) == tuple(shape) else x.reshape(shape)

    def transpose(self, x: Tensor, order: Sequence[int]) -> Tensor:
        return x.permute(order)

    def concat(self, xs: Sequence[Tensor], dim: int) -> Tensor:
        import torch

        return torch.cat(list(xs), dim)

    def narrow(self, x: Tensor, dim: int, start: int, count: int) -> Tensor:
        return x if count == x.shape[dim] else x.narrow(dim, start, count)

    def padded(self, x: Tensor, dim: int, before: int, behind: int) -> Tensor:
        import torch

        return torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - dim - 1), before, behind))

    def reduced(self, x: Tensor, combine: Combine) -> Tensor:
        return x.sum(0) if combine == "sum" else x.amax(0) if combine == "max" else x.amin(0)

    @property
    def library(self) -> ModuleType:
        import torch

        return torch

    def cast(self, x: Tensor, like: Tensor) -> Tensor:
        return x.to(like.dtype)

    def either(
        self, holds: Tensor | bool, one: ArrayBranch[Tensor], other: ArrayBranch[Tensor]
    ) -> Sequence[Tensor]:
        return one() if holds else other()

    def index(self, axis: str, x: Tensor | None = None) -> int:
        """This rank's index along an axis."""
        return self.place[self.mesh.names.index(axis)]

    def chosen(self, x: Tensor, dim: int, axis: str) -> Tensor:
        return x.narrow(dim, self.index(axis), 1)

    def rows(self, x: Tensor, table: np.ndarray, axes: Sequence[str]) -> Tensor:
        import torch

        # Built from a list, because a trace on fake tensors takes that as a constant.
        return x.index_select(0, torch.tensor(table[self.number(axes)].tolist(), device=x.device))

    def _group(self, axes: Sequence[str]) -> str:
        wide = self.wide(axes)
        if wide not in self.names:
            raise PaseError(
                f"there is no process group over {', '.join(wide)}",
                fix="report this as a bug in pase.backends",
            )
        return self.names[wide]

    def all_reduce(self, x: Tensor, axes: Sequence[str], combine: Combine = "sum") -> Tensor:
        """The sum (or maximum, or minimum) over these axes."""
        check_combine(combine, axes)
        if not self.wide(axes):
            return x
        return self._waited(self._ops().all_reduce(x.contiguous(), combine, self._group(axes)))

    def all_reduce_joined(self, xs: Sequence[Tensor], axes: Sequence[str]) -> list[Tensor]:
        """The sum of each tensor over these axes, all in one message."""
        if not self.wide(axes):
            return list(xs)
        made = self._ops().all_reduce_coalesced([x.contiguous() for x in xs], "sum", self._group(axes))
        return [self._waited(x) for x in made]

    # Collectives that run beside what follows, until ``received``.

    def started_all_reduce(self, x: Tensor, axes: Sequence[str], *, overwrite: bool) -> Tensor:
        """Start the sum over these axes. overwrite: whether the sum may be written into ``x``."""
        ops, group = self._ops(), self._group(axes)
        return ops.all_reduce_(x, "sum", group) if overwrite else ops.all_reduce(x.contiguous(), "sum", group)

    def started_reduce_scatter(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """Start the sum of [ways, elements] over these axes, of which each rank gets one row: [elements]."""
        n = self.ways(axes)
        return self._ops().reduce_scatter_tensor(x.reshape(-1), "sum", n, self._group(axes))

    def started_all_gather(self, x: Tensor, axes: Sequence[str], into: Tensor | None = None) -> Tensor:
        """Start a gather over these axes: [1, elements] on each rank -> [ways, elements]. into: the result, if that
        exists."""
        ops, n, group = self._ops(), self.ways(axes), self._group(axes)
        if into is None:
            return ops.all_gather_into_tensor(x, n, group)
        return ops.all_gather_into_tensor_out(x, n, group, out=into)

    def received(self, x: Tensor) -> Tensor:
        """Wait for a collective that has been started."""
        return self._waited(x)

    def all_gather(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """[...] on each rank -> [ways, ...]."""
        n = self.ways(axes)
        if n == 1:
            return x[None]
        wire = x if x.dim() else x[None]
        made = self._sent(wire, lambda w: self._ops().all_gather_into_tensor(w, n, self._group(axes)))
        return made.reshape(n, *x.shape)

    def reduce_scatter(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """[ways, ...] is summed over the ranks, and each rank gets one row -> [...]."""
        n = self.ways(axes)
        if n == 1:
            return x[0]
        made = self._ops().reduce_scatter_tensor(x.contiguous(), "sum", n, self._group(axes))
        return self._waited(made).reshape(x.shape[1:])

    def all_to_all(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """[ways, ...]: row i goes to rank i, and row i of the result comes from rank i."""
        n = self.ways(axes)
        return x if n == 1 else self._exchanged(x, [1] * n, [1] * n, axes)

    def permute(self, x: Tensor, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> Tensor:
        """Send each rank's tensor to one other rank. pairs: (from, to), as numbers in the group.

        It is sent as an all-to-all in which only one part is not empty, because NCCL and Gloo have no permutation.
        """
        n = self.ways(axes)
        if n == 1:
            return x
        mine = self.number(axes)
        to, come = [0] * n, [0] * n
        for src, dst in pairs:
            if src == mine:
                to[dst] = 1
            if dst == mine:
                come[src] = 1
        return self._exchanged(x[None], come, to, axes)[0]

    def permute_all(
        self, xs: Sequence[Tensor], axes: Sequence[str], pairs: Sequence[tuple[int, int]]
    ) -> Sequence[Tensor]:
        """One message of the bytes of all."""
        import torch

        wire = torch.cat([x.contiguous().view(torch.uint8).reshape(-1) for x in xs])
        received = self.permute(wire, axes, pairs).split([x.numel() * x.element_size() for x in xs])
        return [y.view(x.dtype).reshape(x.shape) for x, y in zip(xs, received, strict=True)]

    # If outermost digits of one dim leave or arrive, as they mostly do, that dim is cut or joined as a whole: two ops
    # at most, where digits that are put in their places one by one take four.

    def gathered(self, x: Tensor, v: WireView, axes: Sequence[str]) -> Tensor:
        """Parts of the first dim are gathered as they are: PyTorch's op appends them."""
        n = self.ways(axes)
        if n == 1:
            return super().gathered(x, v, axes)
        sent = x if v.along is None else self.reshape(x, v.before)
        wire = self._sent(sent, lambda w: self._ops().all_gather_into_tensor(w, n, self._group(axes)))
        if v.along is not None:
            return self.joined(wire, n, v.along[1])
        assert v.arriving is not None
        return self._dense(self.rearranged(wire, (*v.ways, *v.seen), v.arriving, v.shape))

    def from_front(self, x: Tensor, v: WireView) -> Tensor:
        return self._dense(super().from_front(x, v))

    @staticmethod
    def _dense(x: Tensor) -> Tensor:
        """The last dim is dense in memory: PyTorch's attention runs as two products if an operand's is not."""
        return x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()

    def scattered(self, x: Tensor, v: WireView, axes: Sequence[str], combine: Combine) -> Tensor:
        if combine == "sum" and v.along is not None and (n := self.ways(axes)) > 1:
            wire = self._cut(self.reshape(x, v.before), n, v.along[0]).contiguous()
            return self._waited(self._ops().reduce_scatter_tensor(wire, "sum", n, self._group(axes)))
        with contextlib.nullcontext() if combine == "sum" else _on(self.kinds, "reduce_scatter"):
            return super().scattered(x, v, axes, combine)

    def exchanged(self, x: Tensor, v: WireView, axes: Sequence[str]) -> Tensor:
        n = self.ways(axes)
        if n == 1 or v.along is None:
            return super().exchanged(x, v, axes)
        wire = self._cut(self.reshape(x, v.before), n, v.along[0])
        rows = [wire.shape[0] // n] * n
        return self.joined(self._exchanged(wire, rows, rows, axes), n, v.along[1])

    def sliced(self, x: Tensor, v: WireView, axes: Sequence[str]) -> Tensor:
        if v.along is None or v.along[0] is None:
            return super().sliced(x, v, axes)
        dim, rows = v.along[0], v.shape[v.along[0]]
        return self.narrow(self.reshape(x, v.before), dim, self.number(axes) * rows, rows)

    def joined(self, wire: Tensor, ways: int, dim: int | None) -> Tensor:
        """Parts of a dim that lie one after another in the first dim -> the whole."""
        import torch

        assert dim is not None
        return torch.cat(wire.chunk(ways), dim) if dim else wire

    @staticmethod
    def _cut(x: Tensor, ways: int, dim: int | None) -> Tensor:
        """The parts of a dim, one after another in the first dim."""
        import torch

        assert dim is not None
        return torch.cat(x.chunk(ways, dim)) if dim else x

    def units_sent(self, front: Tensor, how: UnitExchange, axes: Sequence[str]) -> Tensor:
        """One all-to-all of parts of different sizes."""
        import numpy as np

        n, mine = self.ways(axes), self.number(axes)
        targets = np.array([dict(r.pairs)[mine] for r in how.rounds])
        sources = np.array([{b: a for a, b in r.pairs}[mine] for r in how.rounds])
        sizes = np.array([r.units.shape[1] for r in how.rounds])
        order = targets.argsort(kind="stable")
        units = np.concatenate([how.rounds[i].units for i in order], axis=1)
        go, come = (np.bincount(to, sizes, n).astype(int).tolist() for to in (targets, sources))
        received = self._exchanged(self.rows(front, units, axes), come, go, axes)
        arrived = np.repeat(sources, sizes).argsort(kind="stable").argsort()
        return self.rows(received, np.broadcast_to(arrived, (n, len(arrived))), axes)

    def number(self, axes: Sequence[str]) -> int:
        """This rank's number in the group of these axes."""
        at = 0
        for a in axes:
            at = at * self.ways([a]) + self.index(a)
        return at

    def neighbours(
        self, x: Tensor, axes: Sequence[str], dim: int, first: int, last: int
    ) -> tuple[Tensor, Tensor]:
        """It is one message. A rank at an end also sends rows to itself, so that its message is as large as the
        others'."""
        import torch

        n, mine, rows = self.ways(axes), self.number(axes), x.shape[dim]
        parts = {mine - 1: (0, first, last), mine + 1: (rows - last, last, first)}
        parts = {r: how for r, how in parts.items() if 0 <= r < n}
        if len(parts) == 1:
            parts[mine] = (0, min(first, last), min(first, last))
        received = {}
        if len(parts) > 1:
            to = sorted(parts)
            sent = [x.narrow(dim, *parts[r][:2]).reshape(-1) for r in to]
            shapes = [(*x.shape[:dim], parts[r][2], *x.shape[dim + 1 :]) for r in to]
            go, come = [0] * n, [0] * n
            for r, part, shape in zip(to, sent, shapes, strict=True):
                go[r], come[r] = part.numel(), math.prod(shape)
            with _on(self.kinds, "permute"):
                wire = self._exchanged(torch.cat(sent), come, go, axes)
            arrived = zip(to, wire.split([come[r] for r in to]), shapes, strict=True)
            received = {r: y.reshape(shape) for r, y, shape in arrived}
        return tuple(  # type: ignore[return-value]
            received[r] if r in received else x.new_zeros((*x.shape[:dim], count, *x.shape[dim + 1 :]))
            for r, count in ((mine - 1, last), (mine + 1, first))
        )

    def _exchanged(self, x: Tensor, come: list[int], go: list[int], axes: Sequence[str]) -> Tensor:
        group = self._group(axes)
        return self._sent(x, lambda w: self._ops().all_to_all_single(w, come, go, group))

    def _sent(self, x: Tensor, send: Callable[[Tensor], Tensor]) -> Tensor:
        """Send a tensor. Not every library can send every dtype: some are sent as bytes, complex numbers as pairs."""
        import torch

        wire = x.contiguous()
        if x.dtype == torch.bool:
            return self._waited(send(wire.view(torch.uint8))).view(torch.bool)
        if x.is_complex():
            return torch.view_as_complex(self._waited(send(torch.view_as_real(wire.resolve_conj()))))
        narrow = x.dtype.is_floating_point and x.dtype.itemsize == 1
        if narrow or x.dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
            made = self._waited(send(wire[..., None].view(torch.uint8)))
            return made.view(x.dtype).squeeze(-1)
        return self._waited(send(wire))

    @staticmethod
    def _ops() -> ModuleType:
        import torch

        return torch.ops._c10d_functional

    @staticmethod
    def _waited(x: Tensor) -> Tensor:
        import torch

        return torch.ops._c10d_functional.wait_tensor(x)


STAGE = "stage"
"""The name of the axis of a pipeline's stages, which is the outermost axis."""


def axis_groups(mesh: Mesh, needed: Iterable[tuple[str, ...]], device: str, stages: int = 1) -> AxisGroups:
    """The groups over these sets of axes, for all ranks of ``torch.distributed``. Every rank must call it with the same
    sets.

    stages: how many meshes of this shape there are, one after another.

    Raises PaseError if the number of ranks is not the plan's number of devices.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if not dist.is_initialized():
        raise PaseError(
            "there is no process group",
            where="torch.distributed",
            fix="start the program with torchrun, and call torch.distributed.init_process_group() first",
        )
    devices_in_all = stages * mesh.devices
    if dist.get_world_size() != devices_in_all:
        raise PaseError(
            f"the plan is for {devices_in_all} devices, but there are {dist.get_world_size()} ranks",
            where="torch.distributed",
            fix=f"start {devices_in_all} ranks (torchrun --nproc-per-node), or compile for "
            f"devices={dist.get_world_size()}",
        )
    if stages == 1:
        everywhere = None
        devices = DeviceMesh(
            device, torch.arange(mesh.devices).reshape(mesh.sizes), mesh_dim_names=mesh.names
        )
    else:
        ranks = torch.arange(stages * mesh.devices).reshape(stages, *mesh.sizes)
        everywhere = DeviceMesh(device, ranks, mesh_dim_names=(STAGE, *mesh.names))
        devices = everywhere[mesh.names]
    place = tuple(int(i) for i in devices.get_coordinate() or ())
    groups = AxisGroups(mesh=mesh, devices=devices, place=place, everywhere=everywhere)
    for axes in sorted({groups.wide(a) for a in needed} - {()}):
        part = devices if axes == mesh.names else devices[axes]
        whole = part if len(axes) == 1 else part._flatten("_".join(("pase", *axes)))
        groups.names[axes] = whole.get_group().group_name
    return groups
