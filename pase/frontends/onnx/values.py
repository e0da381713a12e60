"""What a rule sees of an ONNX node: its inputs and attributes (``OnnxCall``)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from pase.frontends.common.values import Site, Value
from pase.frontends.onnx.model import DTYPES, dtype_name
from pase.ir import Tensor
from pase.ops import GraphBuilder

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, NodeProto

    from pase.frontends.onnx.frontend import OnnxLowering

__all__ = ["OnnxCall"]


@dataclass(frozen=True, kw_only=True)
class _InputTypes:
    """What the schema says of an input: the types that it may have, and the variable that stands for its type.
    any_types: it stands for several inputs that may differ in type."""

    types: frozenset[str]
    variable: str
    any_types: bool


@dataclass(frozen=True, kw_only=True)
class _Schema:
    """What ONNX says of an op. fewest, most: numbers of inputs. attributes: name -> type. required: attributes."""

    fewest: int
    most: int
    outputs: int
    attributes: Mapping[str, int]
    required: tuple[str, ...]
    inputs: tuple[_InputTypes, ...]


_TENSOR = re.compile(r"tensor\((\w+)\)")


@cache
def _dtypes() -> Mapping[str, str]:
    """Name of an element type in ONNX's schemas -> its dtype."""
    from onnx import TensorProto

    return {name.lower(): DTYPES.get(code, name.lower()) for name, code in TensorProto.DataType.items()}


@cache
def _schema(op: str, version: int, domain: str) -> _Schema | None:
    """What ONNX says of an op; None if it does not know the op."""
    from onnx import defs

    try:
        s = defs.get_schema(op, max_inclusive_version=version, domain=domain)
    except (defs.SchemaError, TypeError, OverflowError):
        return None
    inputs = []
    for i in s.inputs:
        names = (m[1] for t in i.types if (m := _TENSOR.fullmatch(t)))
        types = frozenset(_dtypes()[n] for n in names)
        inputs.append(_InputTypes(types=types, variable=i.type_str, any_types=not i.is_homogeneous))
    return _Schema(
        fewest=s.min_input,
        most=s.max_input,
        outputs=s.max_output,
        attributes={k: int(a.type.value) for k, a in s.attributes.items()},  # type: ignore[attr-defined]
        required=tuple(k for k, a in s.attributes.items() if a.required),
        inputs=tuple(inputs),
    )


@dataclass
class OnnxCall(Site):
    """An ONNX node with the values of its inputs, as its rule sees it."""

    low: OnnxLowering
    node: NodeProto
    op: str
    version: int
    ins: list[Value | None]
    place: str
    """Names the model and the node in messages."""
    path: str = ""
    """The path of the node."""
    _attributes: dict[str, AttributeProto] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._attributes = {a.name: a for a in self.node.attribute}

    def resolve(self, given: Mapping[str, AttributeProto]) -> None:
        """Inside of a function: replace references to attributes of the call by these attributes."""
        for name, a in list(self._attributes.items()):
            if a.ref_attr_name:
                if a.ref_attr_name in given:
                    self._attributes[name] = given[a.ref_attr_name]
                else:
                    del self._attributes[name]

    def check(self) -> None:
        """PaseError if the inputs, outputs or attributes do not match ONNX's schema of the op."""
        schema = _schema(self.op, self.version, "" if self.node.domain == "ai.onnx" else self.node.domain)
        if schema is None:
            return
        fewest, most, outs = schema.fewest, schema.most, schema.outputs
        given = [x for x in self.node.input if x]
        if (
            not fewest <= len(self.node.input) <= most
            or len(given) < min(fewest, 1)
            or len(self.node.output) > outs
        ):
            raise self.fail(
                f"it has {len(self.node.input)} inputs and {len(self.node.output)} outputs, but opset {self.version} "
                f"allows {fewest} to {most} inputs and at most {outs} outputs"
            )
        for name, a in self._attributes.items():
            if a.type not in (schema.attributes.get(name, a.type), 0):
                raise self.fail(f"attribute '{name}' has the wrong type")
        if lacking := [r for r in schema.required if r not in self._attributes]:
            raise self.fail(f"attribute '{lacking[0]}' is missing")
        self._check_types(schema.inputs)

    def _check_types(self, wanted: Sequence[_InputTypes]) -> None:
        """PaseError if an input has a type that the op does not take, or inputs that must have one type differ."""
        bound: dict[str, tuple[int, str]] = {}
        for i, v in enumerate(self.ins):
            own = wanted[min(i, len(wanted) - 1)] if wanted else None
            if v is None or v.items is not None or own is None or own.any_types:
                continue
            if own.types and v.dtype not in own.types:
                raise self.fail(f"its input {i} is {v.dtype}, which ONNX does not allow there")
            first, dtype = bound.setdefault(own.variable, (i, v.dtype))
            if v.dtype != dtype:
                raise self.fail(
                    f"its input {first} is {dtype} and its input {i} is {v.dtype}, but ONNX requires the same type",
                    fix="convert one of them (Cast)",
                )

    @property
    def b(self) -> GraphBuilder:
        return self.low.b

    # Inputs.

    def x(self, i: int = 0) -> Value:
        """Input i, which must be given and must be a tensor."""
        v = self.opt(i)
        if v is None:
            raise self.fail(f"input {i} is missing")
        if v.items is not None:
            raise self.fail(f"input {i} is a sequence of tensors, but must be a tensor")
        return v

    def opt(self, i: int) -> Value | None:
        """Input i; None if it is not given."""
        return self.ins[i] if i < len(self.ins) else None

    def buffer(self, v: Value) -> Tensor:
        """The tensor of a value that is never trained (running statistics, scales). A stored one is a constant."""
        if v.weight or v.note[:1] == ("initializer",):
            return self.b.constant(v.shape, v.dtype, contents=f"stored as {v.note[-1]}")
        return self.tensor(v)

    def ints_of(self, i: int, what: str) -> list[int]:
        """Input i as integers. PaseError if they are not known without data. what: names the input in the message."""
        v = self.x(i)
        data = v.data
        if data is None:
            raise self.fail(
                f"input {i}, which gives the {what}, is computed from the model's data or is too large to read",
                fix="bind the model's symbolic sizes, or fold constants (onnxsim, onnxruntime) first",
            )
        if data.dtype.kind not in "iub":
            raise self.fail(
                f"input {i}, which gives the {what}, has dtype {data.dtype}, but must be integers"
            )
        return [int(n) for n in data.reshape(-1)]

    def number_of(self, i: int, default: float) -> float:
        """Input i as a number; the default if it is not given or is not known without data."""
        v = self.opt(i)
        data = None if v is None else v.data
        return (
            default
            if data is None or data.size != 1 or data.dtype.kind not in "iufb"
            else float(data.reshape(()))
        )

    # Attributes. Their types are right, because ``check`` compared them with ONNX's schema.

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

    def attribute(self, name: str) -> AttributeProto | None:
        return self._attributes.get(name)

    def subgraph(self, name: str) -> GraphProto:
        return self._attributes[name].g

    def dtype(self, name: str, default: str) -> str:
        a = self._attributes.get(name)
        return default if a is None or not a.i else dtype_name(int(a.i), self.place)
