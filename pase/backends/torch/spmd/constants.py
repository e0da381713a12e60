"""Constants on one rank: values that do not depend on data, such as masks, positions and buffers that are only read.

Each rank computes the whole constant, and each reader takes its part of it. What only repeats along a dim, such as a
mask that is the same for every example or a tensor of zeros, is made once along it and expanded: a part of a tensor
keeps all of its memory alive, and autograd would keep the mask of the whole batch on every rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.record import outside_blocks
from pase.backends.torch.spmd.rules import seeded
from pase.backends.torch.spmd.values import NotOnParts, steps_from
from pase.frontends.common.values import Value
from pase.frontends.torch.constants import applied
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import TorchScope, reads_contents

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.fx import Graph as FxGraph
    from torch.fx import GraphModule

__all__ = ["Constants", "NodeIndex"]


@dataclass(frozen=True, kw_only=True)
class NodeIndex:
    """All nodes of an exported graph, including the nodes that ops were decomposed into.

    data: the tensors that depend on data.
    """

    scope: TorchScope
    data: frozenset[str]

    @cached_property
    def paths(self) -> dict[FxNode, str]:
        """Node -> its path."""
        return dict(self.scope.every())

    @cached_property
    def values(self) -> dict[FxNode, Value | list[Value | None]]:
        """Node -> the value that it was lowered to."""
        return {n: v for scope in self.scope.scopes() for n, v in scope.values.items()}

    @cached_property
    def outer(self) -> dict[FxNode, FxNode]:
        """Placeholder of a decomposed op's graph -> the node outside that it stands for."""
        return {k: v for scope in self.scope.scopes() for k, v in scope.leaves.items()}

    @cached_property
    def inside(self) -> dict[FxNode, TorchScope]:
        """Node -> the nodes that it was decomposed into."""
        at = {place: n for n, place in self.paths.items()}
        return {at[place]: scope for place, scope in self.scope.placed() if scope.leaves and place in at}

    @cached_property
    def modules(self) -> dict[FxGraph, GraphModule]:
        """Graph -> its module, which holds its constants."""
        scopes = (s for s in self.scope.scopes() if s.module is not None)
        return {n.graph: s.module for s in scopes for n in s.nodes[:1] if s.module is not None}

    def decided(self, n: FxNode) -> bool:
        """Whether the node depends on data."""
        found = self.values.get(n)
        every = found if isinstance(found, list) else [found]
        return any(tensor in self.data for v in every for tensor, _ in steps_from(v))


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Constants, computed when something reads them.

    buffers: placeholder -> tensor.
    seed_at: path of a node -> seed.
    given: in an iteration of a loop, placeholder of the loop's body -> its value in this iteration.
    """

    index: NodeIndex
    buffers: Mapping[str, Tensor]
    device: torch.device
    seed_at: Callable[[str], int]
    made: dict[FxNode, Tensor] = field(default_factory=dict)
    given: Mapping[FxNode, Callable[[], Tensor]] = field(default_factory=dict)

    def of(self, n: FxNode) -> Tensor:
        """The whole value of a node."""
        if n not in self.made:
            with outside_blocks():
                self.made[n] = self._worked_out(n)
        return self.made[n]

    def _worked_out(self, n: FxNode) -> Tensor:
        import torch

        if n.op == "placeholder":
            if n in self.given:
                return self.given[n]()
            if n in self.index.outer:
                return self.of(self.index.outer[n])
            if n.name not in self.buffers:
                raise NotOnParts(
                    f"its operand '{n.name}' is not an operand of the plan's op, so the plan has no layout for it"
                )
            return self.buffers[n.name]
        if n.op == "get_attr":
            return getattr(self.index.modules[n.graph], n.target).to(self.device)
        if n.target is operator.getitem:
            source, which = n.args
            inner = self.index.inside.get(source)  # the node's other results may depend on data
            return self.of(source)[which] if inner is None else self.of(inner.results[which])
        made = self.index.values.get(n)
        if isinstance(made, Value) and made.number is not None:
            like = n.meta["val"]
            return torch.full((), made.number, dtype=like.dtype, device=self.device).expand(like.shape)
        args, kwargs = torch.fx.map_arg((n.args, n.kwargs), lambda m: self._operand(m, n))
        with torch.no_grad():
            if torch.Tag.nondeterministic_seeded not in getattr(n.target, "tags", ()):
                return applied(n, args, kwargs, self.device)
            with seeded(self.seed_at(self.index.paths.get(n, n.name)), self.device):
                return applied(n, args, kwargs, self.device)

    def _operand(self, m: FxNode, reader: FxNode) -> Tensor:
        """An operand. Of data, the reader may use only the shape and dtype, as zeros_like and type_as do."""
        import torch

        if not self.index.decided(m):
            return self.of(m)
        value = self.index.values.get(reader)
        filled = isinstance(value, Value) and value.note == ("filled",)
        if not filled and reads_contents(reader, m):
            raise NotOnParts(f"{reader.target} is a constant in the plan, but it reads data")
        like = m.meta["val"]
        return torch.zeros((), dtype=like.dtype, device=self.device).expand(like.shape)
