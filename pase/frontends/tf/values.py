"""The values that flow through a TensorFlow graph while it is lowered, and a rule's view of a node (``TfCall``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pase.errors import PaseError
from pase.frontends.tf.graph import TfNode, dtype_name
from pase.ir import Place, Tensor
from pase.ops import GraphBuilder, nests

__all__ = ["MOST_KNOWN", "Absent", "Handle", "Reshaped", "StaticValue", "TensorList", "TfCall", "TfValue"]

MOST_KNOWN = 4096
"""The most elements of a value that is evaluated while lowering: shapes, axes and paddings, but not weights."""


@dataclass(frozen=True)
class StaticValue:
    """A small value that is known from the graph alone, without data."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)


@dataclass(frozen=True)
class Handle:
    """A handle of a variable. Reading it gives the tensor."""

    tensor: Tensor


@dataclass(frozen=True, kw_only=True)
class TensorList:
    """A list of tensors of one shape (TensorArray). stacked: its elements as one tensor, if they have been stacked."""

    length: int | None
    element: tuple[int, ...] | None
    dtype: str
    stacked: Tensor | None = None
    parts: tuple[tuple[int, Tensor], ...] = ()
    """(index, element) of the elements that were set one by one outside of a loop."""


@dataclass(kw_only=True)
class Reshaped:
    """A reshape that has not been made yet.

    Products read its source instead, so that dims that a framework flattens for a matrix product (batch and sequence,
    heads and features) stay separate. Any other reader makes the reshape.
    """

    source: Tensor
    shape: tuple[int, ...]
    at: Place
    made: Tensor | None = None

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def tensor(self, b: GraphBuilder) -> Tensor:
        if self.made is None:
            eqn, b.eqn = b.eqn, self.at
            self.made = nests.reshape(b, self.source, self.shape)
            b.eqn = eqn
        return self.made

    def parts(self) -> list[tuple[int, ...]] | None:
        """For each dim, the source's dims that it merges; None if the reshape does not only merge dims."""
        factors = nests.common_factors(self.source.shape, self.shape)
        if factors is None:
            return None
        _, of_source, of_shape = factors
        if any(len(f) != 1 for f in of_source):
            return None
        dim_of = {f[0]: i for i, f in enumerate(of_source)}
        return [tuple(dim_of[f] for f in fs) for fs in of_shape]


@dataclass(frozen=True)
class Absent:
    """A value that is not priced: a string, a token, an iterator. why: names it in the message if an op uses it."""

    why: str


TfValue: TypeAlias = "Tensor | StaticValue | Handle | TensorList | Reshaped | Absent"


@dataclass(frozen=True, kw_only=True)
class TfCall:
    """A node with the values of its operands, as its rule sees it."""

    b: GraphBuilder
    node: TfNode
    ins: Sequence[TfValue]

    @property
    def where(self) -> str:
        return f"TensorFlow op '{self.node.op}' at {self.b.eqn or self.node.name}"

    def fail(self, what: str, fix: str = "") -> PaseError:
        """The error to raise: what is wrong with this node, and what the user can do about it."""
        return PaseError(what, where=self.where, fix=fix)

    # -- operands --

    def value(self, i: int) -> TfValue:
        try:
            return self.ins[i]
        except IndexError:
            raise self.fail(f"it has {len(self.ins)} operands, but needs operand {i}") from None

    def x(self, i: int = 0) -> Tensor:
        """Operand i as a tensor. A known value becomes a constant."""
        v = self.value(i)
        if isinstance(v, Handle):
            return v.tensor
        if isinstance(v, StaticValue):
            return self.b.constant(v.shape, v.dtype, contents=v.array)
        if isinstance(v, Reshaped):
            return v.tensor(self.b)
        if not isinstance(v, Tensor):
            raise self.fail(f"operand {i} ({self._input(i)}) is {_kind(v)}, not a tensor")
        return v

    def shape(self, i: int = 0) -> tuple[int, ...]:
        v = self.value(i)
        if isinstance(v, Handle):
            v = v.tensor
        if not isinstance(v, (Tensor, StaticValue, Reshaped)):
            raise self.fail(f"operand {i} ({self._input(i)}) is {_kind(v)}, not a tensor")
        return v.shape  # type: ignore[return-value]

    def dtype(self, i: int = 0) -> str:
        v = self.value(i)
        return v.tensor.dtype if isinstance(v, Handle) else v.dtype if not isinstance(v, Absent) else "string"

    def known(self, i: int) -> np.ndarray | None:
        """The value of operand i if it is known without data, else None."""
        v = self.value(i)
        return v.array if isinstance(v, StaticValue) else None

    def numbers(self, i: int, what: str) -> list[int]:
        """Operand i as integers. PaseError if they are computed from data. what: names the operand in the message."""
        a = self.known(i)
        if a is None:
            raise self.fail(
                f"operand {i} ({self._input(i)}), which gives the {what}, is computed from data at run time",
                fix="make it a constant or a function of shapes",
            )
        if a.dtype.kind not in "iub":
            raise self.fail(
                f"operand {i} ({self._input(i)}), which gives the {what}, has dtype {a.dtype}, but must be integers"
            )
        return [int(n) for n in a.reshape(-1)]

    def number(self, i: int, what: str) -> int:
        n = self.numbers(i, what)
        if len(n) != 1:
            raise self.fail(
                f"operand {i} ({self._input(i)}), which gives the {what}, has {len(n)} numbers, but must be one"
            )
        return n[0]

    def axis(self, i: int, rank: int, what: str = "axis") -> int:
        return self.in_range(self.number(i, what), rank, what)

    def axes(self, i: int, rank: int) -> list[int]:
        return [self.in_range(n, rank, "axes") for n in self.numbers(i, "axes")]

    def in_range(self, axis: int, rank: int, what: str = "axis") -> int:
        if not -rank <= axis < rank:
            raise self.fail(f"{what} {axis} is out of range for a tensor of {rank} dims")
        return axis % rank

    def rank(self, i: int, *allowed: int) -> tuple[int, ...]:
        """The shape of operand i, which must have one of these ranks."""
        shape = self.shape(i)
        if len(shape) not in allowed:
            raise self.fail(
                f"operand {i} ({self._input(i)}) has shape {shape}, but must have "
                f"{' or '.join(map(str, allowed))} dims"
            )
        return shape

    def _input(self, i: int) -> str:
        return self.node.inputs[i] if i < len(self.node.inputs) else f"input {i}"

    # -- attributes --

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.node.attr[key].b) if key in self.node.attr else default

    def whole(self, key: str, default: int | None = None) -> int:
        if key in self.node.attr:
            return int(self.node.attr[key].i)
        if default is None:
            raise self.fail(f"attribute '{key}' is missing")
        return default

    def real(self, key: str, default: float) -> float:
        return float(self.node.attr[key].f) if key in self.node.attr else default

    def wholes(self, key: str) -> list[int]:
        return [int(i) for i in self.node.attr[key].list.i] if key in self.node.attr else []

    def text(self, key: str, default: str = "") -> str:
        return self.node.attr[key].s.decode("ascii", "replace") if key in self.node.attr else default

    def type(self, *keys: str) -> str:
        """The dtype in the first of these attributes that the node has; the dtype of operand 0 if it has none."""
        for key in keys:
            if key in self.node.attr:
                return dtype_name(self.node.attr[key].type)
        return self.dtype(0)

    # -- checks --

    def make(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a result. PaseError if a dim has no elements, because it could not be parallelized."""
        out = tuple(int(s) for s in shape)
        if any(s < 1 for s in out):
            raise self.fail(f"its result has shape {out}, but a dim without elements cannot be parallelized")
        return out

    def hinted(self, k: int = 0) -> tuple[int, ...]:
        """The shape that TensorFlow recorded for result k. PaseError if it recorded none, or only a part of one."""
        shape = self.node.hint(k)
        if shape is None or any(s is None for s in shape):
            raise self.fail(
                f"the shape of result {k} depends on data ({'unknown' if shape is None else shape})",
                fix="give it a static shape",
            )
        return self.make([s for s in shape if s is not None])


def _kind(v: TfValue) -> str:
    match v:
        case TensorList():
            return "a list of tensors"
        case Handle():
            return "a handle of a variable"
        case Absent(why):
            return why
    return "a value"


def elements(shape: Iterable[int]) -> int:
    """The number of elements of a tensor of this shape."""
    return math.prod(shape)
