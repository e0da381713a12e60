"""The values of a framework's graph while it is lowered, and the operations on them that every rule uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pase.errors import PaseError
from pase.ir import Tensor
from pase.ir.functions import Function
from pase.ir.literals import Number, literal
from pase.ops import GraphBuilder, nests

if TYPE_CHECKING:
    from jax.typing import ArrayLike

__all__ = ["Site", "Value", "known"]

_MOST_ELEMENTS = 1 << 50


@dataclass(eq=False)
class Value:
    """A tensor of the graph. Its loop nest is made when something first reads its data.

    data: the contents, if they are small and known.
    foldable: whether ops on ``data`` may be evaluated now. This is false for a trainable parameter, whose contents will
        change.
    note: where the value comes from, for rules that treat two ops as one (quantize and dequantize, slices of a weight).
    items: the elements of a sequence.
    weight: whether the value is a tensor that the model stores, or a view of one. Its contents then never become part
        of an op.
    """

    shape: tuple[int, ...]
    dtype: str
    tensor: Tensor | None = None
    make: Callable[[], Tensor] | None = None
    read: Callable[[], np.ndarray | None] | None = None
    foldable: bool = False
    note: tuple[Any, ...] = ()
    items: tuple[Value, ...] | None = None
    weight: bool = False
    number: Number | None = None
    """The number that every element is, if it is known but not stored as ``data``."""
    _data: np.ndarray | None = None

    @property
    def data(self) -> np.ndarray | None:
        if self._data is None and self.read is not None:
            self._data, self.read = self.read(), None
        return self._data

    @property
    def known(self) -> np.ndarray | None:
        """The contents, if ops on them may be evaluated now."""
        return self.data if self.foldable else None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def literal(self) -> bool:
        """Whether this is one number, which becomes part of the op that reads it."""
        return self.foldable and self.elements == 1 and self.tensor is None

    @property
    def scalar(self) -> Number | None:
        """The number that every element is; None if that is not known."""
        if self.number is not None or self.data is None or self.elements != 1 or self.dtype == "string":
            return self.number
        return literal(self.data)


def known(array: ArrayLike, dtype: str | None = None) -> Value:
    """A value whose contents are known."""
    a = np.asarray(array)
    return Value(shape=tuple(map(int, a.shape)), dtype=dtype or str(a.dtype), foldable=True, _data=a)


class Site:
    """One op that is being lowered: how its rule reads values and makes new ones.

    place: the op and its model, for messages.
    """

    place: str

    @property
    def b(self) -> GraphBuilder:
        raise NotImplementedError

    def fail(self, what: str, fix: str = "") -> PaseError:
        """Returns the error to raise: what is wrong with this op, and what the user can do about it."""
        return PaseError(what, where=self.place, fix=fix)

    def tensors(self, *values: Value) -> list[Tensor]:
        return [self.tensor(v) for v in values]

    def tensor(self, v: Value) -> Tensor:
        """The tensor with the value's data, which is made now if it was not read before."""
        if v.tensor is None:
            if v.elements == 0 or v.items is not None:
                raise self.fail(f"it reads a tensor of shape {list(v.shape)}, which has no elements")
            if v.make is not None:
                v.tensor = v.make()
            else:
                v.tensor = self.b.constant(v.shape, v.dtype, contents=lambda: v.data)
        return v.tensor

    # Results.

    def nothing(self, shape: Sequence[int], dtype: str) -> Value:
        """A value of which only the shape matters (a constant mask)."""
        return Value(shape=tuple(shape), dtype=dtype)

    def missing(self, shape: Sequence[int], dtype: str, what: str) -> Value:
        """A result that the op's rule does not give. Raises the op's error if anything reads its data."""

        def make() -> Tensor:
            raise self.fail(
                f"the program reads {what}, which pase's rule of the op does not give",
                fix="compute it from the op's operands in the model",
            )

        return self.later(shape, dtype, make)

    def value(self, t: Tensor) -> Value:
        return Value(shape=tuple(t.shape), dtype=t.dtype, tensor=t)  # type: ignore[arg-type]

    def later(
        self, shape: Sequence[int], dtype: str, make: Callable[[], Tensor], note: tuple[Any, ...] = ()
    ) -> Value:
        """A value whose loop nest is made only if its data is read."""
        b, at = self.b, self.b.here()

        def made() -> Tensor:
            with b.standing(at):
                return make()

        return Value(shape=self.shape(shape), dtype=dtype, make=made, note=note)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape as a tuple. Raises the op's error if it is not a valid shape."""
        out = tuple(int(s) for s in shape)
        if any(s < 0 for s in out) or math.prod(out) > _MOST_ELEMENTS or len(out) > 64:
            raise self.fail(f"it makes a tensor of the shape {[int(s) for s in out[:8]]}, which is not valid")
        return out

    def axis(self, axis: int, rank: int) -> int:
        if not -rank <= axis < rank:
            raise self.fail(f"its axis {axis} is out of range for a tensor of {rank} dims")
        return axis % rank

    def axes(self, axes: Sequence[int], rank: int) -> list[int]:
        out = [self.axis(a, rank) for a in axes]
        if len(set(out)) != len(out):
            raise self.fail(f"its axes {list(axes)[:8]} name a dim twice")
        return out

    def broadcast(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        try:
            return tuple(map(int, np.broadcast_shapes(*map(tuple, shapes))))
        except ValueError:
            raise self.fail(
                f"shapes {', '.join(str(list(s)) for s in shapes[:6])} do not broadcast"
            ) from None

    def elementwise(
        self,
        operands: Sequence[Value | Number | None],
        function: Function,
        *,
        dtype: str | None = None,
        flops: float | None = None,
        name: str = "",
    ) -> Value:
        """A function of broadcast operands, point by point. Numbers among them become part of the op; None is an
        operand that is not known (``nests.elementwise``)."""
        values = [v for v in operands if isinstance(v, Value)]
        shape = self.shape(self.broadcast(*(v.shape for v in values)))
        dtype = "bool" if function.boolean else dtype or values[0].dtype
        if math.prod(shape) == 0:
            return Value(shape=shape, dtype=dtype)
        if all(v.literal for v in values):
            return Value(shape=shape, dtype=dtype, foldable=False)
        reads = [(v.scalar if v.literal else self.tensor(v)) if isinstance(v, Value) else v for v in operands]
        (out,) = nests.elementwise(self.b, function, reads, [dtype], name=name, flops=flops, shape=shape)
        return self.value(out)

    def reshape(self, v: Value, shape: Sequence[int]) -> Value:
        """A reshape, made when it is read. A reshape of a reshape starts from the first value. It is omitted if the
        shape does not change."""
        new = self.shape(shape)
        if math.prod(new) != v.elements:
            raise self.fail(
                f"{list(v.shape)} cannot be reshaped to {list(new)}: the number of elements differs"
            )
        base: Value = v.note[1] if v.note[:1] == ("view",) else v
        if new == v.shape or new == base.shape:
            return v if new == v.shape else base
        if v.known is not None and not v.weight:
            return known(v.known.reshape(new), v.dtype)
        if v.elements == 0 or (v.tensor is None and v.make is None):
            return Value(shape=new, dtype=v.dtype)
        out = self.later(new, v.dtype, lambda: nests.reshape(self.b, self.tensor(base), new), ("view", base))
        if v.weight:
            out.weight, out.foldable = True, v.foldable
            out._data = None if v.data is None else v.data.reshape(new)
        return out

    def unmerged(self, v: Value) -> Value:
        """The value [b s d], if v is the [(b s) d] that was made from it. A product over d may then split b and s."""
        if len(v.shape) != 2 or v.note[:1] != ("view",):
            return v
        base: Value = v.note[1]
        for i in range(2, len(base.shape)):
            if math.prod(base.shape[:i]) == v.shape[0]:
                return self.reshape(base, (*base.shape[:i], v.shape[1]))
        return v

    def transpose(self, v: Value, order: Sequence[int]) -> Value:
        if list(order) == list(range(len(v.shape))):
            return v
        return self.value(nests.transpose(self.b, self.tensor(v), order))
