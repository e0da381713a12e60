"""What flows through an ONNX graph while it is lowered, and how a rule looks at its node."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from pase.errors import PaseError
from pase.frontends.onnx_model import dtype_name
from pase.ir import Tensor
from pase.ir.functions import Function
from pase.ops import GraphBuilder, nests

if TYPE_CHECKING:
    from pase.frontends.from_onnx import Lowering

__all__ = ["MOST_KNOWN", "Call", "Value", "known"]


@cache
def _schema(
    op: str, version: int, domain: str
) -> tuple[int, int, int, dict[str, int], tuple[str, ...]] | None:
    """(fewest inputs, most inputs, most outputs, types of the attributes, required attributes); None: not known."""
    from onnx import defs

    try:
        s = defs.get_schema(op, max_inclusive_version=version, domain=domain)
    except (defs.SchemaError, TypeError, OverflowError):
        return None
    types = {k: int(a.type.value) for k, a in s.attributes.items()}  # type: ignore[attr-defined]
    required = tuple(k for k, a in s.attributes.items() if a.required)
    return s.min_input, s.max_input, s.max_output, types, required


MOST_KNOWN = 4096
"""Elements of the largest value that is worked out while lowering: shapes, axes, paddings, not weights."""

_MOST_ELEMENTS = 1 << 50


@dataclass(eq=False)
class Value:
    """A tensor of the graph. Its loop nest is made when something first reads its data.

    data: its contents, where they are small and the model alone determines them.
    settled: may ops on ``data`` be worked out now? (Not for a trainable parameter, whose contents will change.)
    note: where it comes from, for rules that see two ops as one (quantize and dequantize, slices of a weight).
    items: of a sequence.
    """

    shape: tuple[int, ...]
    dtype: str
    tensor: Tensor | None = None
    make: Callable[[], Tensor] | None = None
    read: Callable[[], np.ndarray | None] | None = None
    settled: bool = False
    note: tuple[Any, ...] = ()
    items: tuple[Value, ...] | None = None
    _data: np.ndarray | None = None

    @property
    def data(self) -> np.ndarray | None:
        if self._data is None and self.read is not None:
            self._data, self.read = self.read(), None
        return self._data

    @property
    def known(self) -> np.ndarray | None:
        """The contents, where ops on them may be worked out now."""
        return self.data if self.settled else None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def literal(self) -> bool:
        """One number that is part of the op that reads it."""
        return self.settled and self.elements == 1 and self.tensor is None


def known(array: Any, dtype: str | None = None) -> Value:
    """A value that has been worked out."""
    a = np.asarray(array)
    return Value(shape=tuple(map(int, a.shape)), dtype=dtype or str(a.dtype), settled=True, _data=a)


@dataclass
class Call:
    """One node, as its rule sees it."""

    low: Lowering
    node: Any
    op: str
    version: int
    ins: list[Value | None]
    place: str
    """Which node of which model, for messages."""
    _attributes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._attributes = {a.name: a for a in self.node.attribute}

    def resolve(self, given: Mapping[str, Any]) -> None:
        """Inside of a function: put what its call gave in the place of references to it."""
        for name, a in list(self._attributes.items()):
            if a.ref_attr_name:
                if a.ref_attr_name in given:
                    self._attributes[name] = given[a.ref_attr_name]
                else:
                    del self._attributes[name]

    def check(self) -> None:
        """PaseError unless inputs, outputs and attributes are such as ONNX's own schema of the op has them."""
        schema = _schema(self.op, self.version, "" if self.node.domain == "ai.onnx" else self.node.domain)
        if schema is None:
            return
        fewest, most, outs, types, required = schema
        given = [x for x in self.node.input if x]
        if (
            not fewest <= len(self.node.input) <= most
            or len(given) < min(fewest, 1)
            or len(self.node.output) > outs
        ):
            raise self.fail(
                f"{len(self.node.input)} inputs and {len(self.node.output)} outputs; opset {self.version} wants "
                f"{fewest} to {most} inputs, at most {outs} outputs"
            )
        for name, a in self._attributes.items():
            if name in types and a.type not in (types[name], 0):
                raise self.fail(f"attribute '{name}' is of the wrong type")
        if lacking := [r for r in required if r not in self._attributes]:
            raise self.fail(f"attribute '{lacking[0]}' is missing")

    @property
    def b(self) -> GraphBuilder:
        return self.low.b

    def fail(self, what: str) -> PaseError:
        return PaseError(f"{self.place}: {what}")

    # Inputs.

    def x(self, i: int = 0) -> Value:
        """Input i, which must be there."""
        v = self.opt(i)
        if v is None:
            raise self.fail(f"input {i} is missing")
        if v.items is not None:
            raise self.fail(f"input {i} is a sequence of tensors, where a tensor is needed")
        return v

    def opt(self, i: int) -> Value | None:
        return self.ins[i] if i < len(self.ins) else None

    def tensors(self, *values: Value) -> list[Tensor]:
        return [self.tensor(v) for v in values]

    def tensor(self, v: Value) -> Tensor:
        """The tensor with the value's data, made now if it has not been read before."""
        if v.tensor is None:
            if v.elements == 0 or v.items is not None:
                raise self.fail(f"it reads a tensor of shape {list(v.shape)}: nothing to compute on")
            v.tensor = v.make() if v.make is not None else self.b.constant(v.shape, v.dtype)
        return v.tensor

    def buffer(self, v: Value) -> Tensor:
        """The tensor of what is not trained whatever it is (running statistics, scales): constant if stored."""
        if v.note[:1] == ("initializer",):
            return self.b.constant(v.shape, v.dtype)
        return self.tensor(v)

    def ints_of(self, i: int, what: str) -> list[int]:
        """Input i as integers that the model alone determines."""
        v = self.x(i)
        data = v.data
        if data is None:
            raise self.fail(
                f"its {what} is computed from the model's data, or too large to read: pase needs it as numbers; "
                f"bind the model's symbolic sizes, or fold constants (onnxsim, onnxruntime) before"
            )
        if data.dtype.kind not in "iub":
            raise self.fail(f"its {what} is {data.dtype}, where integers are needed")
        return [int(n) for n in data.reshape(-1)]

    def number_of(self, i: int, default: float) -> float:
        """Input i as one number that the model determines, where it is there and does so."""
        v = self.opt(i)
        data = None if v is None else v.data
        return (
            default
            if data is None or data.size != 1 or data.dtype.kind not in "iufb"
            else float(data.reshape(()))
        )

    # Attributes; ONNX's own schema has been checked: types are right.

    def has(self, name: str) -> bool:
        return name in self._attributes

    def integer(self, name: str, default: int = 0) -> int:
        a = self._attributes.get(name)
        return default if a is None else int(a.i)

    def real(self, name: str, default: float = 0.0) -> float:
        a = self._attributes.get(name)
        return default if a is None else float(a.f)

    def text(self, name: str, default: str = "") -> str:
        a = self._attributes.get(name)
        return default if a is None else a.s.decode("utf-8", "replace")

    def ints(self, name: str) -> list[int] | None:
        a = self._attributes.get(name)
        return None if a is None else [int(i) for i in a.ints]

    def attribute(self, name: str) -> Any:
        return self._attributes.get(name)

    # Results.

    def value(self, t: Tensor) -> Value:
        return Value(shape=tuple(t.shape), dtype=t.dtype, tensor=t)  # type: ignore[arg-type]

    def later(
        self, shape: Sequence[int], dtype: str, make: Callable[[], Tensor], note: tuple[Any, ...] = ()
    ) -> Value:
        """A value whose loop nest is made only if its data is read."""
        b, source, eqn = self.b, self.b.source, self.b.eqn

        def made() -> Tensor:
            before = b.source, b.eqn
            b.source, b.eqn = source, eqn
            try:
                return make()
            finally:
                b.source, b.eqn = before

        return Value(shape=self.shape(shape), dtype=dtype, make=made, note=note)

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape, if it is one."""
        out = tuple(int(s) for s in shape)
        if any(s < 0 for s in out) or math.prod(out) > _MOST_ELEMENTS or len(out) > 64:
            raise self.fail(
                f"it makes a tensor of shape {[int(s) for s in out[:8]]}: not a size to compute with"
            )
        return out

    def axis(self, axis: int, rank: int) -> int:
        if not -rank <= axis < rank:
            raise self.fail(f"axis {axis} of a tensor of {rank} dims")
        return axis % rank

    def axes(self, axes: Sequence[int], rank: int) -> list[int]:
        out = [self.axis(a, rank) for a in axes]
        if len(set(out)) != len(out):
            raise self.fail(f"axes {list(axes)[:8]} name a dim twice")
        return out

    def dtype(self, name: str, default: str) -> str:
        a = self._attributes.get(name)
        return default if a is None or not a.i else dtype_name(int(a.i), self.place)

    def broadcast(self, *shapes: Sequence[int]) -> tuple[int, ...]:
        try:
            return tuple(map(int, np.broadcast_shapes(*map(tuple, shapes))))
        except ValueError:
            raise self.fail(
                f"shapes {', '.join(str(list(s)) for s in shapes[:6])} do not broadcast"
            ) from None

    def elementwise(
        self,
        values: Sequence[Value],
        function: Function,
        *,
        dtype: str | None = None,
        flops: float | None = None,
    ) -> Value:
        """A function of broadcast inputs, point by point; numbers are part of the op."""
        shape = self.shape(self.broadcast(*(v.shape for v in values)))
        dtype = "bool" if function.boolean else dtype or values[0].dtype
        if math.prod(shape) == 0:
            return Value(shape=shape, dtype=dtype)
        reads = [self.tensor(v) for v in values if not v.literal]
        if not reads:
            return Value(shape=shape, dtype=dtype, settled=False)
        (out,) = nests.elementwise(self.b, function, reads, [dtype], flops=flops, shape=shape)
        return self.value(out)

    def reshape(self, v: Value, shape: Sequence[int]) -> Value:
        """A reshape, made when it is read; of a reshape, of what that was made of; none where the shape is the same."""
        new = self.shape(shape)
        if math.prod(new) != v.elements:
            raise self.fail(f"{list(v.shape)} cannot become {list(new)}: another number of elements")
        base: Value = v.note[1] if v.note[:1] == ("view",) else v
        if new == v.shape or new == base.shape:
            return v if new == v.shape else base
        if v.known is not None:
            return known(v.known.reshape(new), v.dtype)
        if v.elements == 0 or (v.tensor is None and v.make is None):
            return Value(shape=new, dtype=v.dtype)
        return self.later(new, v.dtype, lambda: nests.reshape(self.b, self.tensor(base), new), ("view", base))

    def unmerged(self, v: Value) -> Value:
        """[b s d] where v is the [(b s) d] made of it: a product over d may then be split as b and s are."""
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
