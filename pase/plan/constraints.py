"""Turns a strategy into layouts of named tensors: where a tensor is constrained, and to which layout.

This module does not depend on a framework. A placement lists, for each tensor dim, the mesh axes that split it, major
to minor (as in JAX's PartitionSpec). There are four kinds of constraints:

- storage: how a parameter is kept, or how a batch input arrives;
- state: how a parameter's gradient and optimizer state are kept, if they are split further than the parameter;
- define: the layout of a tensor where it is made, or where a copy that several readers share is made;
- read: the layout in which one op needs a tensor, if it differs from the one in which the tensor was made or copied. A
  read without a layout only records who reads the copy.

On a torus, a wide gather goes one link dim at a time (``stages``). XLA for TPU v5e turns a gather over more than 32
devices at once, below about 20 MB, into an all-reduce of zero-padded buffers, which sends twice the bytes and does not
overlap with anything.

A tensor that is still partial when it is made is constrained as if it were summed there. Its gradient arrives in that
layout, and a sum followed by a slice for its reader becomes a reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from pase.ir import Access, Graph, Node, Op, Tensor
from pase.machine import Machine, Mesh, axis_levels
from pase.plan.accesses import NodeLayouts, Reading
from pase.tables.axis_layout import AccessLayout, AxisLayout, Placement
from pase.tables.layouts import within_groups
from pase.tables.reshard_path import path

__all__ = ["Constraints", "Route", "constraints", "stages"]


@dataclass(frozen=True)
class Route:
    """The layouts that a tensor passes through in order, and how its gradient returns.

    layouts: the last one is the target. The others are intermediate layouts, because a partitioner that is asked for
        several reshard steps at once falls back to gathering everything.
    gradient: for a read, or for a tensor that a parameter's node makes, the layout to which its gradient is resharded
        in one step. None means that it returns the same way.
    """

    layouts: tuple[Placement, ...] = ()
    gradient: Placement | None = None

    def mapped(self, change: Callable[[Placement], Placement]) -> Route:
        """Return the same route with each layout changed."""
        return Route(
            tuple(map(change, self.layouts)), None if self.gradient is None else change(self.gradient)
        )


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """All constraints of a strategy; see the module's docstring. copies: copy -> the tensor that it copies."""

    storage: Mapping[str, Placement] = field(default_factory=dict)
    state: Mapping[str, Placement] = field(default_factory=dict)
    define: Mapping[str, Route] = field(default_factory=dict)
    read: Mapping[Reading, Route] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)


WIDEST_GATHER = 32
"""The most devices that one gather on a torus may join, for XLA for TPU v5e, libtpu 0.0.51 (docs/evidence/tpu.md)."""


def stages(mesh: Mesh, machine: Machine) -> tuple[int, ...]:
    """Return, for each mesh axis, the stage in which a wide gather crosses it.

    Axes of one stage are gathered together, and low stages come first. An axis's stage is the outermost torus dim that
    it crosses. On other links, all axes have one stage.

    >>> from pase.machine import load, mesh_from
    >>> stages(mesh_from("2x4x8", 64), load("tpu_v5e")), stages(mesh_from("2x4x8", 64), load("h100x8"))
    ((1, 1, 0), (0, 0, 0))
    """
    out = []
    for ways in axis_levels(mesh, machine):
        crossed = [level for level, w in enumerate(ways) if w > 1]
        torus = all(machine.levels[level].topology == "torus" for level in crossed)
        out.append(max(crossed, default=0) if torus else 0)
    return tuple(out)


def constraints(
    graph: Graph, mesh: Mesh, layouts: Mapping[str, NodeLayouts], when: tuple[int, ...] | None = None
) -> Constraints:
    """Return all constraints of a strategy.

    layouts: the strategy's ``access_layouts``.
    when: the axes' ``stages``, if they matter.
    """
    found = _Collected(graph=graph, mesh=mesh, when=when or (0,) * len(mesh.sizes))
    for n in graph.nodes:
        of_node = layouts[n.name]
        for op, reads, writes in zip(n.ops, of_node.reads, of_node.writes, strict=True):
            for a, read in zip(op.reads, reads, strict=True):
                inside = a.tensor in n.internal and not graph.tensors[a.tensor].copy_of
                if a.tensor in found.current and not inside and read is not None:
                    found.add_read(n, op, a, read)
            for a, written in zip(op.writes, writes, strict=True):
                found.add_write(n, op, a, written)
    copies = {t: graph.tensors[t].copy_of for t in found.define if graph.tensors[t].copy_of}
    return Constraints(
        storage=found.storage, state=found.state, define=found.define, read=found.read, copies=copies
    )


@dataclass(kw_only=True)
class _Collected:
    """Collects constraints node by node.

    current: tensor -> the layout in which other nodes find it.
    summed: the layouts of the gradients of parameters whose state is split further.
    """

    graph: Graph
    mesh: Mesh
    when: tuple[int, ...]
    storage: dict[str, Placement] = field(default_factory=dict)
    state: dict[str, Placement] = field(default_factory=dict)
    define: dict[str, Route] = field(default_factory=dict)
    read: dict[Reading, Route] = field(default_factory=dict)
    current: dict[str, AxisLayout] = field(default_factory=dict)
    summed: dict[str, AxisLayout] = field(default_factory=dict)

    def add_read(self, n: Node, op: Op, a: Access, read: AccessLayout) -> None:
        """Add the constraint of an op that reads what another node made."""
        tensor, current = self.graph.tensors[a.tensor], self.current[a.tensor]
        maker = self.graph.producer[a.tensor].kind
        rows = self._between(current, read.layout, tensor)
        if rows and maker == "copy":  # gradients are summed in the copy's layout
            rows = (*self._alone(current, tensor), *rows)
        # Without a constraint, the layout of the gradient's scatter would be arbitrary.
        if not rows and op.kind == "gather" and a.sparse:
            rows = self._alone(read.layout, tensor)
        key = Reading(op.eqn, tensor.original)
        if tensor.copy_of and a.tensor in self.define:
            self.read[Reading(op.eqn, a.tensor)] = Route(rows)
        elif rows:
            straight = self.read[key].gradient if key in self.read else None
            if maker == "parameter" and tensor.needs_grad:
                straight = self._straight(self.summed.get(a.tensor, current), read, tensor) or straight
            self.read[key] = Route(rows, straight)
        if op.kind == "conv" and tensor.needs_grad and within_groups(n):
            # XLA must not propagate the layout of a filter's gradient, split within groups, into the convolution.
            here = self._placement(read.layout, tensor)
            if here is not None:
                self.read[key] = Route(self.read.get(key, Route((here,))).layouts, here)

    def add_write(self, n: Node, op: Op, a: Access, written: AccessLayout) -> None:
        """Add the constraint of an op that makes a tensor."""
        tensor, layout, straight = self.graph.tensors[a.tensor], written.layout, None
        outside = self.graph.read_outside(n, a.tensor)
        if len(list(written.gradient.digits)) > len(list(layout.digits)):
            self.summed[a.tensor] = written.gradient
            where = self._placement(written.gradient, tensor)
            if op is n.ops[0]:
                assert where is not None  # the config was chosen so that its blocks are contiguous
                self.state[a.tensor] = where
            # In a view that merges dims of the parameter, blocks may not be contiguous. No constraint can express that.
            straight = where if outside else None
        if n.kind in ("parameter", "input") and op is n.ops[0]:
            where = self._placement(layout, tensor)
            assert where is not None  # a stored tensor is walked dim by dim, so its blocks are contiguous
            self.storage[a.tensor] = where
        if not tensor.shape or not outside:
            return
        self.current[a.tensor] = layout
        made: tuple[Placement, ...] = ()
        if op.kind == "copy":
            made = self._between(self.current[op.reads[0].tensor], layout, tensor)
        elif n.kind != "input":
            made = self._alone(layout, tensor)
        if made or straight is not None:
            self.define[a.tensor] = Route(made, straight)

    def _placement(self, layout: AxisLayout, tensor: Tensor) -> Placement | None:
        """Return the axes per tensor dim, as if partial sums were summed. None if a dim's blocks are not contiguous."""
        return layout.summed.placement(len(tensor.shape), self.mesh)

    def _alone(self, layout: AxisLayout, tensor: Tensor) -> tuple[Placement, ...]:
        """Return only this layout, or nothing if it cannot be written as a placement."""
        where = self._placement(layout, tensor)
        return () if where is None else (where,)

    def _straight(self, stored: AxisLayout, read: AccessLayout, tensor: Tensor) -> Placement | None:
        """Return the storage layout if a parameter is gathered over an axis over which its gradient is not summed.

        The gradient is then sliced before the sum, which sends less. (The reverse of the gather would sum all of it
        first.)
        """
        summed = read.gradient.partial
        gathered = {axis for axis, _ in stored.digits} - {axis for axis, _ in read.layout.digits}
        return self._placement(stored, tensor) if summed and gathered - {*summed} else None

    def _between(self, have: AxisLayout, want: AxisLayout, tensor: Tensor) -> tuple[Placement, ...]:
        """Return the layouts to pass through, the target last. Empty if the tensor already has the target layout.

        The result is also empty if the blocks of the target are not contiguous in this tensor. The reader's own operand
        then decides.
        """
        if have == want or self._placement(want, tensor) is None:
            return ()
        out: list[Placement] = []
        for layout in _staged(path(have, want, self.mesh), self.mesh, self.when):
            where = layout.placement(len(tensor.shape), self.mesh)
            if where is not None and (not out or out[-1] != where):
                out.append(where)
        return tuple(out)


def _staged(layouts: list[AxisLayout], mesh: Mesh, when: tuple[int, ...]) -> Iterator[AxisLayout]:
    """Yield the layouts after the first, with intermediate ones if a wide gather goes in stages."""
    for now, then in pairwise(layouts):
        gathered = [axis for axis, _ in now.digits if then[axis] is None]
        alone = all(s == t for a, (s, t) in enumerate(zip(now, then, strict=True)) if a not in gathered)
        left = list(now)
        if alone and math.prod(mesh.sizes[a] for a in gathered) > WIDEST_GATHER:
            for stage in sorted({when[a] for a in gathered})[:-1]:
                for a in gathered:
                    left[a] = None if when[a] == stage else left[a]
                yield AxisLayout(left)
        yield then
