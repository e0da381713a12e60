"""ONNX models to graphs: an ONNX file or a ModelProto, its weights unread.

Reading is in ``model``, the rules for single ops in ``rules*``; here are the traversal, functions and
control flow. Every node gets a stable path (the index of each enclosing function or graph, then its own).
``backends/emit/onnx`` uses it to find the node again.

What is trained: every float tensor of more than one element that the file stores, as an initializer or in a Constant
node, and the float ConstantOfShape of a stored shape (how models are published without their weights), unless it is a
running statistic, a quantizer's scale, an initial state, or an attribute in the form of an input. Integers of 8 bits
and fewer are stored weights that are not trained; others are constants. Loss and optimizer are not in an ONNX file:
gradients flow into every float output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pase.errors import PaseError, install_line
from pase.frontends import registry
from pase.frontends.common.values import Value
from pase.frontends.onnx.control import CONTROL, apart_value, captures
from pase.frontends.onnx.fold import fold
from pase.frontends.onnx.model import OnnxModel, dtype_name, load, ordered
from pase.frontends.onnx.rules import RULES
from pase.frontends.onnx.values import MOST_KNOWN, OnnxCall
from pase.frontends.registry import DimSizes, Unknown, UnknownOp, by_nest, type_names
from pase.garbage import uncollected
from pase.ir import Place, SourceLine, Tensor
from pase.ir.places import NOWHERE
from pase.ir.types import is_floating
from pase.ops import GraphBuilder, nests

if TYPE_CHECKING:
    from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, ValueInfoProto

__all__ = ["OnnxLowering", "TracedOnnx", "coverage", "lowered", "reads", "trace"]

_MOST_DEPTH = 24
"""Functions and graphs inside of one another."""


def reads(model: object) -> bool:
    """A path ending in .onnx, or a ModelProto."""
    if isinstance(model, (str, Path)):
        return Path(model).suffix.lower() == ".onnx"
    return "onnx.onnx_ml_pb2.ModelProto" in type_names(model)


def coverage() -> dict[str, list[str]]:
    """loop nest -> ops, for ``pase ops``."""
    out = by_nest(RULES, CONTROL)
    return out | {"no work": sorted({*out["no work"], "Constant"})}


@dataclass(frozen=True, kw_only=True)
class TracedOnnx(registry.Traced):
    """A model's graph, and which tensor of it is which value of the model."""

    values: Mapping[str, tuple[str, tuple[int, ...]]]
    """Name of a value in the ONNX graph -> (name of the graph's tensor, which may be of another shape with the same
    elements; the value's own shape). What needs no tensor is left out."""
    operands: tuple[frozenset[str], ...]
    """The inputs and outputs of each node of the ONNX graph."""


def trace(
    model: object,
    *args: object,
    name: str | None = None,
    unknown: Unknown = "error",
    dims: DimSizes | None = None,
) -> TracedOnnx:
    """Read an ONNX file or ModelProto; see the module's text for what counts as trained.

    Raises PaseError for a file that is damaged, malformed, cyclic or unsound, for sizes that are not bound, and
    (UnknownOp) for an op without a rule unless ``unknown`` is "replicate".
    """
    try:
        import onnx  # noqa: F401
    except ModuleNotFoundError:
        raise PaseError(f"reading an ONNX model needs the onnx package: {install_line('onnx')}") from None
    if args:
        raise PaseError("an ONNX model contains its inputs: give no arguments after it")
    with uncollected():
        return _trace(load(model, dims, name), unknown)


def lowered(m: OnnxModel, unknown: Unknown = "error") -> OnnxLowering:
    """All of a model's values by name, in ``env``, and its loop nests so far, in ``b``."""
    b = GraphBuilder(name=m.name)
    low = OnnxLowering(b=b, model=m, unknown=unknown, left=[10_000 + 50 * _size(m.proto)], opsets=m.opsets)
    low.initializers(m.graph)
    weights = {t.name for t in m.graph.initializer}
    for v in m.graph.input:
        if v.name not in weights:
            low.env[v.name] = low.input(v)
    low.nodes(m.graph, "")
    return low


def _trace(m: OnnxModel, unknown: Unknown) -> TracedOnnx:
    low = lowered(m, unknown)
    b = low.b
    outs: list[Tensor] = []
    for o in m.graph.output:
        if o.name not in low.env:
            raise PaseError(f"{m.name}: output '{o.name}' is not made by any node")
        for v in low.env[o.name].items or (low.env[o.name],):
            if v.tensor is None and v.make is not None and v.note and v.note[0] != "initializer":
                v.tensor = v.make()
            if v.tensor is not None and v.tensor.role == "activation":
                outs.append(v.tensor)
    if not outs:
        raise PaseError(f"{m.name}: no output depends on the model's inputs or weights: nothing to compute")
    for t in {t.name: t for t in outs}.values():
        b.output(t)
    meta = {"frontend": "onnx"} | ({"dims": json.dumps(m.dims)} if m.dims else {})
    graph = b.finish(outs, **meta)
    made: dict[str, tuple[str, tuple[int, ...]]] = {}
    for k, v in low.env.items():
        of = v.note[1] if v.tensor is None and v.note[:1] == ("view",) else v
        if of.tensor is not None:
            made[k] = (of.tensor.name, v.shape)
    return TracedOnnx(
        graph=graph,
        param_paths=tuple(t.path for t in graph.parameters),
        input_paths=tuple(t.path for t in graph.inputs),
        values=made,
        operands=tuple(frozenset((*n.input, *n.output)) for n in m.graph.node),
    )


@dataclass
class OnnxLowering:
    """A graph, or a graph inside of it, on its way through the rules."""

    b: GraphBuilder
    model: OnnxModel
    unknown: Unknown
    left: list[int]
    """How many nodes may still be lowered, shared by all graphs inside: functions in functions multiply."""
    opsets: Mapping[str, int]
    env: dict[str, Value] = field(default_factory=dict)
    outer: OnnxLowering | None = None
    captured: dict[str, Value] | None = None
    """In a body lowered apart: values of the graphs around it that it reads."""
    apart: OnnxLowering | None = None
    """The innermost body lowered apart that this graph is in."""
    weights: dict[tuple[str, str], Value] = field(default_factory=dict)
    """(scope, name there) -> a stored tensor, shared by all graphs inside: a function called twice has its weights
    once."""
    taken: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name of a parameter -> whose it is, so that two tensors never share a name."""
    scope: str = ""
    """Where names of stored tensors are unique: the graph's place, or its function."""
    owner: str = ""
    """What the names of stored tensors start with."""
    prefix: str = ""
    """What the paths of its nodes start with."""
    depth: int = 0
    attributes: Mapping[str, AttributeProto] = field(default_factory=dict)
    """Inside of a function: what its call gave."""
    absent: set[str] = field(default_factory=set)
    """Inside of a function: inputs that its call left out."""

    # What a graph starts from.

    def initializers(self, graph: GraphProto) -> None:
        for t in graph.initializer:
            dtype = dtype_name(t.data_type, f"{self.model.name}: initializer '{t.name}'")
            v = self.env[t.name] = self.stored(t.name, tuple(t.dims), dtype)
            if v.elements <= MOST_KNOWN and t.data_location != 1 and dtype != "string":
                v.read = lambda t=t: _contents(t)  # type: ignore[misc]
            v.foldable = not _trained(v)
        for s in graph.sparse_initializer:
            name = s.values.name
            self.env[name] = self.stored(name, tuple(s.dims), dtype_name(s.values.data_type, self.model.name))

    def stored(self, name: str, shape: tuple[int, ...], dtype: str, *, call: str = "") -> Value:
        """A tensor that the file stores, which becomes a parameter or a constant when a loop nest reads it.

        call: of a tensor that one call of a function gives it, what tells this call from others.
        """
        key, label = (f"{self.scope}{call}", name), f"{self.owner}{name}"
        if self.taken.setdefault(label, key) != key:
            label = f"{self.scope}{call}{name}"
            self.taken[label] = key
        return self._stored(key, label, shape, dtype)

    def _stored(self, key: tuple[str, str], label: str, shape: tuple[int, ...], dtype: str) -> Value:
        if self.apart is not None:  # its weights are the model's
            assert self.apart.outer is not None and self.apart.captured is not None
            v = self.apart.captured[label] = self.apart.outer._stored(key, label, shape, dtype)
            return apart_value(v)
        if key in self.weights:
            return self.weights[key]
        v = Value(shape=shape, dtype=dtype, note=("initializer", label))
        v.weight = _trained(v) or (v.elements > 1 and dtype in ("int8", "uint8", "int4", "uint4"))

        def make() -> Tensor:
            return self.b.parameter(label, shape, dtype) if v.weight else self.b.constant(shape, dtype)

        v.make = make
        self.weights[key] = v
        return v

    def constant(self, c: OnnxCall, shape: tuple[int, ...], dtype: str, data: np.ndarray | None) -> Value:
        """The tensor of a Constant node: what it would be as an initializer. A few numbers may be worked with, too."""
        call = f"{c.path}:" if any(a.ref_attr_name for a in c.node.attribute) else ""
        v = self.stored(c.node.output[0], shape, dtype, call=call)
        v.foldable = not _trained(v) or v.elements <= _MOST_NUMBERS
        v._data = data
        return v

    def input(self, v: ValueInfoProto) -> Value:
        where = f"{self.model.name}: input '{v.name}'"
        if v.type.WhichOneof("value") != "tensor_type":
            raise PaseError(
                f"{where} is a {v.type.WhichOneof('value') or 'value without a type'}: pase reads only tensors"
            )
        dtype = dtype_name(v.type.tensor_type.elem_type, where)
        shape = self.model.shape(v)
        if shape is None:
            raise PaseError(f"{where} has no shape: give it one (onnx.tools.update_model_dims)")
        if dtype == "string":
            raise PaseError(f"{where} is text, which pase cannot price: remove it from the model")
        out = Value(shape=shape, dtype=dtype)
        if out.elements > 1 << 50:
            raise PaseError(f"{where} has shape {list(shape)}: too large to compute with")
        if out.elements:
            out.make = lambda: self.b.input(v.name, shape, dtype)
        return out

    def find(self, name: str, place: str) -> Value:
        if name in self.env:
            return self.env[name]
        if self.outer is None:
            raise PaseError(f"{place}: it reads '{name}', which no node before it makes")
        v = self.outer.find(name, place)
        if self.captured is not None:
            self.captured[name] = v
            v = self.env[name] = apart_value(v)
        return v

    # The nodes.

    def key(self, node: NodeProto) -> str:
        return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}:{node.op_type}"

    def nodes(self, graph: GraphProto, prefix: str) -> None:
        """Lower the nodes of a graph on which an output depends."""
        inside = {x for n in graph.node for x in n.input}
        have = {*self.env, *self.absent, *(x for x in inside if self._outside(x))}
        todo = ordered(graph.node, have, self.model.name)
        wanted = {o if isinstance(o, str) else o.name for o in graph.output}
        live: set[int] = set()
        for i, n in reversed(todo):
            if any(o in wanted for o in n.output):
                live.add(i)
                wanted.update(n.input)
                wanted.update(captures(n))
        declared = {v.name: v for v in getattr(graph, "value_info", ())} | {
            v.name: v for v in graph.output if not isinstance(v, str)
        }
        made: set[str] = set()
        self.prefix = prefix
        for i, n in todo:
            if i in live:
                for o in n.output:
                    if o and (o in made or o in self.env):
                        raise PaseError(
                            f"{self.model.name}: '{o}' is made twice, by {n.op_type} '{n.name}' too"
                        )
                made.update(n.output)
                self.lower(n, f"{prefix}{i}", declared)

    def _outside(self, name: str) -> bool:
        at = self.outer
        while at is not None:
            if name in at.env:
                return True
            at = at.outer
        return False

    def lower(self, n: NodeProto, path: str, declared: Mapping[str, ValueInfoProto]) -> None:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise PaseError(
                f"{self.model.name}: its functions expand to far more nodes than the file has, so it is refused"
            )
        place = f"{self.model.name}: {n.op_type} '{n.name or path}'"
        self.b.source, self.b.eqn = _source(n) or SourceLine(f"{n.op_type} {n.name or path}"), Place(path)
        ins = [self.find(x, place) if x and x not in self.absent else None for x in n.input]
        key = self.key(n)
        domain = "" if n.domain == "ai.onnx" else n.domain
        version = self.opsets.get(domain, 1)
        c = OnnxCall(low=self, node=n, op=n.op_type, version=version, ins=ins, place=place, path=path)
        c.resolve(self.attributes)
        outs: Sequence[Value | None]
        if (domain, n.op_type) in self.model.functions and (domain or n.op_type not in RULES):
            outs = self._function(c, self.model.functions[domain, n.op_type], path)
        else:
            c.check()
            folded = fold(c) if domain == "" else None
            if folded is not None:
                outs = folded
            elif key in CONTROL:
                outs = CONTROL[key].lower(self, c, path, declared)
            elif key in RULES:
                outs = self._rule(c, key)
            elif self.unknown == "replicate":
                self.b.remark_unknown(key)
                outs = self.replicate(c, 0.0, declared)
            else:
                raise UnknownOp(
                    f"{place}: no lowering for ONNX op '{key}' (opset {c.version}).\n"
                    f"Add one to frontends/onnx/rules*.py, or pass unknown='replicate' (the op is then not split)."
                )
        if len(outs) < len([o for o in n.output if o]):
            raise c.fail(f"it has {len(n.output)} outputs, but this op makes {len(outs)}")
        for name, v in zip(n.output, outs, strict=False):
            if name and v is not None:
                self.env[name] = v

    def _rule(self, c: OnnxCall, key: str) -> Sequence[Value | None]:
        try:
            out = RULES[key](c)
        except PaseError:
            raise
        except (ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError) as e:
            shapes = ", ".join("-" if v is None else f"{v.dtype}{list(v.shape)}" for v in c.ins[:6])
            raise c.fail(f"inputs {shapes} and its attributes do not fit together: {e}") from e
        return [out] if isinstance(out, Value) else out

    def _function(self, c: OnnxCall, f: FunctionProto, path: str) -> Sequence[Value | None]:
        """A model's own function, inlined."""
        inner = self.inner(c)
        inner.outer = None
        inner.scope, inner.owner = f"{f.domain}:{f.name}:", f"{f.name}."
        inner.opsets = {
            ("" if o.domain == "ai.onnx" else o.domain): o.version for o in f.opset_import
        } or self.opsets
        inner.attributes = {a.name: a for a in f.attribute_proto} | {a.name: a for a in c.node.attribute}
        for name, v in zip(f.input, c.ins, strict=False):
            if v is not None:
                inner.env[name] = v
        inner.absent = set(f.input) - set(inner.env)
        inner.nodes(f, f"{path}.")
        return [inner.env.get(o) for o in f.output]

    def inner(self, c: OnnxCall) -> OnnxLowering:
        if self.depth >= _MOST_DEPTH:
            raise c.fail(
                f"functions and graphs are nested more than {_MOST_DEPTH} deep: does one call itself?"
            )
        return OnnxLowering(
            b=self.b,
            model=self.model,
            unknown=self.unknown,
            left=self.left,
            opsets=self.opsets,
            outer=self,
            depth=self.depth + 1,
            attributes=self.attributes,
            apart=self.apart,
            weights=self.weights,
            taken=self.taken,
            scope=self.scope,
            owner=self.owner,
        )

    # Control flow, conservatively.

    def replicate(
        self,
        c: OnnxCall,
        flops: float,
        declared: Mapping[str, ValueInfoProto],
        outs: Sequence[tuple[tuple[int, ...], str]] = (),
        more: Sequence[Value] = (),
    ) -> list[Value]:
        """One op that is not split, of this many FLOPs; shapes are those given, or declared by the file."""
        results = list(outs)
        for name in list(c.node.output)[len(results) :]:
            v = declared.get(name)
            shape = None if v is None else self.model.shape(v)
            if shape is None:
                raise c.fail(
                    f"the shape of its output '{name}' is not known: declare it (value_info) in the file"
                )
            results.append((c.shape(shape), dtype_name(v.type.tensor_type.elem_type, c.place)))  # type: ignore[union-attr]
        reads = [
            c.tensor(v) for v in (*(v for v in c.ins if v is not None), *more) if v.elements and not v.literal
        ]
        filled = [(s, d) for s, d in results if 0 not in s]
        made = iter(nests.opaque(self.b, c.op.lower(), reads, filled, flops=flops))
        return [Value(shape=s, dtype=d) if 0 in s else c.value(next(made)) for s, d in results]


def _size(proto: TensorProto) -> int:
    """Number of nodes in the file, including those in functions."""
    return len(proto.graph.node) + sum(len(f.node) for f in proto.functions)


_MOST_NUMBERS = 16
"""Elements of a float Constant that may be scales or bounds of an op: shapes may be computed with it."""


def _trained(v: Value) -> bool:
    return v.elements > 1 and is_floating(v.dtype)


def _contents(t: TensorProto) -> np.ndarray | None:
    """A small tensor's data; None where the file keeps none."""
    from onnx import numpy_helper

    try:
        return np.asarray(numpy_helper.to_array(t))
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d{1,7}), in ([^\n]{1,80})')


def _source(n: NodeProto) -> SourceLine:
    """The user's line, where the exporter wrote it down (PyTorch does)."""
    for p in n.metadata_props:
        if p.key == "pkg.torch.onnx.stack_trace":
            frames = _FRAME.findall(p.value[-4000:])
            own = [f for f in frames if "/torch/" not in f[0]] or frames
            return SourceLine(f"{own[-1][0]}:{own[-1][1]}", own[-1][2]) if own else NOWHERE
    return NOWHERE


registry.FRONTENDS.add("onnx", registry.Frontend(reads=reads, trace=trace, coverage=coverage))
