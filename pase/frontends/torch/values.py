"""How a rule looks at one call of an ATen op: operands by the names of the op's own schema. What a list of nodes was
lowered to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from pase.errors import PaseError
from pase.frontends.common.values import Site, Value
from pase.frontends.torch.types import FxNode
from pase.ir import Tensor
from pase.ir.functions import Function
from pase.ops import GraphBuilder, nests
from pase.pytree import Tree

if TYPE_CHECKING:
    import torch
    from torch._ops import OpOverload
    from torch.fx import GraphModule

    from pase.frontends.torch.lower import TorchLowering

__all__ = ["TorchCall", "TorchOperand", "TorchScope", "TorchSpec", "arguments", "dtype_of", "specs_of"]

TorchSpec = tuple[tuple[int, ...], str]
"""Shape and dtype."""
TorchOperand: TypeAlias = Any
"""What a call gives to an argument of its op: a value or a tensor, a number, a word, None, or a list of them."""


def dtype_of(dtype: torch.dtype | str) -> str:
    """``torch.float32`` -> float32."""
    return str(dtype).removeprefix("torch.")


def specs_of(val: Tree, place: str) -> list[TorchSpec | None]:
    """What a node makes, from its fake tensors. PaseError if a size depends on the data."""
    import torch

    out: list[TorchSpec | None] = []
    for t in val if isinstance(val, (tuple, list)) else (val,):
        if not isinstance(t, torch.Tensor):
            out.append(None)
            continue
        if not all(isinstance(s, int) for s in t.shape):
            raise PaseError(
                f"{place}: it makes a tensor of shape {[str(s) for s in t.shape]}, whose size depends on the data: "
                f"give it a fixed capacity, or keep all elements and let a mask weigh them (torch.where)"
            )
        out.append((tuple(t.shape), dtype_of(t.dtype)))
    return out


def arguments(
    target: OpOverload, args: Sequence[TorchOperand], kwargs: Mapping[str, TorchOperand]
) -> dict[str, TorchOperand]:
    """What a call gives to each argument of the op's schema, defaults included."""
    out: dict[str, TorchOperand] = {}
    for i, a in enumerate(target._schema.arguments):
        if not a.kwarg_only and i < len(args):
            out[a.name] = args[i]
        elif a.name in kwargs:
            out[a.name] = kwargs[a.name]
        else:
            out[a.name] = a.default_value
    return out


@dataclass
class TorchCall(Site):
    """One call of an op. given: operands (values, numbers, lists of them) by the names of its schema."""

    low: TorchLowering
    op: str
    given: dict[str, TorchOperand]
    outs: list[TorchSpec | None]
    place: str = field(default="")

    @property
    def b(self) -> GraphBuilder:
        return self.low.b

    # TorchOperands.

    def x(self, name: str = "self") -> Value:
        """An operand that is a tensor, and must be there."""
        v = self.given.get(name)
        if not isinstance(v, Value):
            raise self.fail(f"its operand '{name}' is {v!r}, but must be a tensor")
        return v

    def opt(self, name: str) -> Value | None:
        v = self.given.get(name)
        return v if isinstance(v, Value) else None

    def arg(self, name: str, default: Any = None) -> Any:
        """An operand that is no tensor; the default where it is not given."""
        v = self.given.get(name)
        return default if v is None else v

    @property
    def values(self) -> list[Value]:
        """All operands that are tensors, those in lists too, in the op's order."""
        out: list[Value] = []
        for v in self.given.values():
            out += [x for x in (v if isinstance(v, (list, tuple)) else (v,)) if isinstance(x, Value)]
        return out

    def ints(self, name: str, n: int, default: Sequence[int] = ()) -> list[int]:
        """A list of n integers; a single one applies to all n."""
        v = self.arg(name)
        found = [v] if isinstance(v, int) else list(v or default)
        return found * n if len(found) == 1 else found

    def dims(self, name: str, rank: int) -> list[int]:
        """Dims of a tensor of so many; all of them where none are given."""
        v = self.arg(name)
        found = [v] if isinstance(v, int) else list(v or ())
        return self.axes(found, rank) if found and rank else list(range(rank))

    # Results.

    def out(self, i: int = 0) -> TorchSpec:
        spec = self.outs[i]
        if spec is None:
            raise self.fail(f"its result {i} is not a tensor")
        return spec

    @property
    def shape_out(self) -> tuple[int, ...]:
        return self.out()[0]

    def filled(self, shape: Sequence[int], dtype: str) -> Value:
        """One number at every place: part of the op that reads it."""
        return Value(shape=tuple(shape), dtype=dtype, foldable=True, note=("filled",))

    def transpose(self, v: Value, order: Sequence[int]) -> Value:
        """Dims in another order: strides in PyTorch, made only where something reads it so; of two, their product."""
        base, whole = v, list(order)
        if v.note[:1] == ("transposed",):
            _, base, before = v.note
            whole = [before[i] for i in order]
        if whole == list(range(len(whole))):
            return base
        shape = [base.shape[i] for i in whole]
        make = partial(self._transposed, base, whole)
        return self.later(shape, base.dtype, make, ("transposed", base, whole))

    def _transposed(self, base: Value, order: Sequence[int]) -> Tensor:
        return nests.transpose(self.b, self.tensor(base), order)

    def pointwise(
        self, function: Function, values: Sequence[Value] | None = None, *, flops: float | None = None
    ) -> Value:
        """The op's result, as a function of its operands point by point; numbers are part of the op."""
        shape, dtype = self.out()
        values = self.values if values is None else values
        reads = [v for v in values if v.note != ("filled",)]
        if not reads or math.prod(shape) == 0:
            return self.filled(shape, dtype)
        made = nests.elementwise(self.b, function, self.tensors(*reads), [dtype], flops=flops, shape=shape)
        return self.value(made[0])


@dataclass(frozen=True, kw_only=True)
class TorchScope:
    """A lowered list of nodes: those of the exported graph, of a decomposed op, or of the body of a loop or a branch.

    nodes: a node's place is the place of what is around them, if any, then its index here. values: node -> what it was
    lowered to. leaves: for a decomposed op or a branch, placeholder -> the outer node that it represents. inner: place
    of an op -> its decomposition, or its body; for branches, the place of the op and the branch's number. module: holds
    the constants. names: of a body, its placeholders. results: what a body or a decomposition returns.
    """

    nodes: Sequence[FxNode]
    values: dict[FxNode, Value | list[Value | None]]
    leaves: dict[FxNode, FxNode] = field(default_factory=dict)
    inner: dict[str, TorchScope] = field(default_factory=dict)
    module: GraphModule | None = None
    names: Sequence[FxNode] = ()
    results: Sequence[FxNode] = ()

    def every(self, prefix: str = "") -> Iterator[tuple[FxNode, str]]:
        """All nodes, those of decompositions and of bodies too, each with its place."""
        for i, n in enumerate(self.nodes):
            yield n, f"{prefix}{i}"
        for path, inner in self.inner.items():
            yield from inner.every(f"{path}.")

    def scopes(self) -> Iterator[TorchScope]:
        """This one, and all inside of it."""
        yield self
        yield from (inner for _, inner in self.placed())

    def placed(self) -> Iterator[tuple[str, TorchScope]]:
        """All inside of it, each with the place of its op."""
        for path, inner in self.inner.items():
            yield path, inner
            yield from inner.placed()
