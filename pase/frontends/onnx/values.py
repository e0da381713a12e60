"""How a rule looks at an ONNX node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from pase.frontends.common.values import Site, Value
from pase.frontends.onnx.model import dtype_name
from pase.ir import Tensor
from pase.ops import GraphBuilder

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, NodeProto

    from pase.frontends.onnx.frontend import OnnxLowering

__all__ = ["MOST_KNOWN", "OnnxCall"]


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


@dataclass
class OnnxCall(Site):
    """One ONNX node, as its rule sees it."""

    low: OnnxLowering
    node: NodeProto
    op: str
    version: int
    ins: list[Value | None]
    place: str
    """Which node of which model, for messages."""
    path: str = ""
    """Its place among the nodes."""
    _attributes: dict[str, AttributeProto] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._attributes = {a.name: a for a in self.node.attribute}

    def resolve(self, given: Mapping[str, AttributeProto]) -> None:
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
                f"{len(self.node.input)} inputs and {len(self.node.output)} outputs; opset {self.version} allows "
                f"{fewest} to {most} inputs and at most {outs} outputs"
            )
        for name, a in self._attributes.items():
            if name in types and a.type not in (types[name], 0):
                raise self.fail(f"attribute '{name}' is of the wrong type")
        if lacking := [r for r in required if r not in self._attributes]:
            raise self.fail(f"attribute '{lacking[0]}' is missing")

    @property
    def b(self) -> GraphBuilder:
        return self.low.b

    # Inputs.

    def x(self, i: int = 0) -> Value:
        """Input i, which must be there."""
        v = self.opt(i)
        if v is None:
            raise self.fail(f"input {i} is missing")
        if v.items is not None:
            raise self.fail(f"input {i} is a sequence of tensors, but must be a tensor")
        return v

    def opt(self, i: int) -> Value | None:
        return self.ins[i] if i < len(self.ins) else None

    def buffer(self, v: Value) -> Tensor:
        """The tensor of what is not trained whatever it is (running statistics, scales): constant if stored."""
        if v.weight or v.note[:1] == ("initializer",):
            return self.b.constant(v.shape, v.dtype)
        return self.tensor(v)

    def ints_of(self, i: int, what: str) -> list[int]:
        """Input i as integers that the model alone determines."""
        v = self.x(i)
        data = v.data
        if data is None:
            raise self.fail(
                f"its {what} is computed from the model's data, or too large to read: pase needs it as numbers; "
                f"bind the model's symbolic sizes, or fold constants (onnxsim, onnxruntime) first"
            )
        if data.dtype.kind not in "iub":
            raise self.fail(f"its {what} has dtype {data.dtype}, but must be integers")
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

    def attribute(self, name: str) -> AttributeProto | None:
        return self._attributes.get(name)

    def subgraph(self, name: str) -> GraphProto:
        return self._attributes[name].g

    def dtype(self, name: str, default: str) -> str:
        a = self._attributes.get(name)
        return default if a is None or not a.i else dtype_name(int(a.i), self.place)
