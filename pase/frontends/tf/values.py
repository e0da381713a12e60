"""The values that flow through a TensorFlow graph while it is lowered, and a rule's view of a node (``TfCall``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, overload

import numpy as np

from pase.frontends.common.values import Site, Value
from pase.frontends.tf.graph import TfNode, dtype_name
from pase.ir import Tensor
from pase.ops import GraphBuilder

__all__ = [
    "Absent",
    "Handle",
    "TensorList",
    "TfCall",
    "TfResult",
    "TfValue",
    "elements",
    "tensor_of",
    "value_of",
    "whole",
]


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


@dataclass(frozen=True)
class Absent:
    """A value that is not priced: a string, a token, an iterator. why: names it in the message if an op uses it."""

    why: str


TfValue: TypeAlias = "Value | Handle | TensorList | Absent"
TfResult: TypeAlias = "TfValue | Tensor"
"""What a rule returns for a result: a value, or the tensor that has it."""


@dataclass(kw_only=True)
class TfCall(Site):
    """A node with the values of its operands, as its rule sees it."""

    builder: GraphBuilder
    node: TfNode
    ins: Sequence[TfValue]

    @property
    def b(self) -> GraphBuilder:
        return self.builder

    @property
    def place(self) -> str:  # type: ignore[override]
        return f"TensorFlow op '{self.node.op}' at {self.b.eqn or self.node.name}"

    # -- operands --

    def operand(self, i: int) -> TfValue:
        try:
            return self.ins[i]
        except IndexError:
            raise self.fail(f"it has {len(self.ins)} operands, but needs operand {i}") from None

    def v(self, i: int = 0) -> Value:
        """Operand i, which must be a tensor. A reshape of it may not have been made yet."""
        v = self.operand(i)
        if isinstance(v, Handle):
            return value_of(v.tensor)
        if not isinstance(v, Value):
            raise self.fail(f"operand {i} ({self._input(i)}) is {_kind(v)}, not a tensor")
        return v

    def x(self, i: int = 0) -> Tensor:
        """Operand i as a tensor."""
        return self.tensor(self.v(i))

    def tensor(self, v: Value) -> Tensor:
        """The value's tensor. A known value is a constant of its own for each op that reads it."""
        return super().tensor(v) if v.known is None else self.b.constant(v.shape, v.dtype, contents=v.known)

    def shape_of(self, i: int = 0) -> tuple[int, ...]:
        return self.v(i).shape

    def dtype(self, i: int = 0) -> str:
        v = self.operand(i)
        return v.tensor.dtype if isinstance(v, Handle) else v.dtype if not isinstance(v, Absent) else "string"

    def known(self, i: int) -> np.ndarray | None:
        """The value of operand i if it is known without data, else None."""
        v = self.operand(i)
        return v.known if isinstance(v, Value) else None

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

    def axis_at(self, i: int, rank: int) -> int:
        """Operand i as a dim of a tensor of this rank."""
        return self.axis(self.number(i, "axis"), rank)

    def axes_at(self, i: int, rank: int) -> list[int]:
        return [self.axis(n, rank) for n in self.numbers(i, "axes")]

    def rank(self, i: int, *allowed: int) -> tuple[int, ...]:
        """The shape of operand i, which must have one of these ranks."""
        shape = self.shape_of(i)
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

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
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
        return self.shape([s for s in shape if s is not None])


@overload
def whole(v: Value) -> Value: ...


@overload
def whole(v: TfValue) -> TfValue: ...


def whole(v: TfValue) -> TfValue:
    """The value itself. A reshape is made, and readers no longer see what it was made from."""
    if not isinstance(v, Value) or v.make is None:
        return v
    v.tensor = v.make() if v.tensor is None else v.tensor
    return value_of(v.tensor)


def value_of(t: Tensor) -> Value:
    return Value(shape=tuple(t.shape), dtype=t.dtype, tensor=t)  # type: ignore[arg-type]


def tensor_of(v: TfValue) -> Tensor | None:
    """The tensor that has the value's data; None if there is none, or none yet."""
    match v:
        case Value() | Handle():
            return v.tensor
        case TensorList():
            return v.stacked
    return None


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
