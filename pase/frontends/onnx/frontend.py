"""Reads an ONNX file or a ModelProto into a graph, without reading its weights.

``model`` reads and checks the file, and ``rules*`` has the rules for single ops. This module walks the graph and
inlines functions. Every node gets a stable path (the index of each enclosing function or graph, then its own), by which
``backends/emit/onnx`` finds the node again.

Trained tensors are the float tensors of more than one element that the file stores, as initializers or in Constant
nodes, and the float ConstantOfShape of a stored shape (the form of models that are published without their weights).
Running statistics, scales of quantizers, initial states, and inputs that stand for attributes are not trained. Integers
of 8 bits and fewer are weights that are not trained; other integers are constants. An ONNX file contains neither loss
nor optimizer: gradients flow into every float output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pase.errors import PaseError, install_line
from pase.frontends import registry
from pase.frontends.common.folding import MOST_KNOWN
from pase.frontends.common.values import Value
from pase.frontends.onnx.control import CONTROL, apart_value, captures
from pase.frontends.onnx.fold import fold
from pase.frontends.onnx.model import OnnxModel, dtype_name, load, ordered
from pase.frontends.onnx.rules import RULES
from pase.frontends.onnx.values import OnnxCall
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
_FREE_NODES = 10_000
"""Nodes that functions and branches may expand to, besides 50 for each node of the file."""
"""How deeply functions and graphs may be nested."""


def reads(model: object) -> bool:
    """Whether the model is a path ending in .onnx, or a ModelProto."""
    if isinstance(model, (str, Path)):
        return Path(model).suffix.lower() == ".onnx"
    return "onnx.onnx_ml_pb2.ModelProto" in type_names(model)


def coverage() -> dict[str, list[str]]:
    """Loop nest -> the ops that are lowered to it, for ``pase ops``."""
    out = by_nest(RULES, CONTROL)
    return out | {"no work": sorted({*out["no work"], "Constant"})}


@dataclass(frozen=True, kw_only=True)
class TracedOnnx(registry.Traced):
    """A model's graph, and the tensor of the graph for each value of the model."""

    values: Mapping[str, tuple[str, tuple[int, ...]]]
    """Name of a value in the ONNX graph -> (name of the tensor, shape of the value).

    The tensor may have another shape with the same elements. Values without a tensor are left out.
    """
    operands: tuple[frozenset[str], ...]
    """The inputs and outputs of each node of the ONNX graph."""


def trace(
    model: object,
    *args: object,
    name: str | None = None,
    unknown: Unknown = "error",
    dims: DimSizes | None = None,
) -> TracedOnnx:
    """Read an ONNX file or a ModelProto. The module's docstring says which tensors are trained.

    Raises PaseError for an invalid, damaged or cyclic file and for sizes that are not bound, and UnknownOp for an op
    without a rule unless ``unknown`` is "replicate".
    """
    try:
        import onnx  # noqa: F401
    except ModuleNotFoundError:
        raise PaseError(
            "reading an ONNX model needs the onnx package", fix=f"run: {install_line('onnx')}"
        ) from None
    if args:
        raise PaseError("an ONNX model takes no example arguments", fix="give no arguments after the model")
    with uncollected():
        return _trace(load(model, dims, name), unknown)


def lowered(m: OnnxModel, unknown: Unknown = "error") -> OnnxLowering:
    """The lowered model: all of its values by name in ``env``, and its loop nests in ``b``."""
    b = GraphBuilder(name=m.name)
    low = OnnxLowering(
        b=b, model=m, unknown=unknown, left=[_FREE_NODES + 50 * _size(m.proto)], opsets=m.opsets
    )
    low.initializers(m.graph)
    weights = {t.name for t in m.graph.initializer}
    for v in m.graph.input:
        if v.name not in weights:
            low.env[v.name] = low.input(v)
    low.nodes(m.graph, "")
    return low


def _few_numbers(v: Value) -> object:
    """A value of a few numbers, which an op may take as attributes (a tile's repeats); None for any other value."""
    known = v.known if v.elements <= _MOST_NUMBERS else None
    return None if known is None else known.tolist()


def _trace(m: OnnxModel, unknown: Unknown) -> TracedOnnx:
    low = lowered(m, unknown)
    b = low.b
    outs: list[Tensor] = []
    for o in m.graph.output:
        if o.name not in low.env:
            raise PaseError(f"no node makes output '{o.name}'", where=m.name)
        for v in low.env[o.name].items or (low.env[o.name],):
            if v.tensor is None and v.make is not None and v.note and v.note[0] != "initializer":
                v.tensor = v.make()
            if v.tensor is not None and v.tensor.role == "activation":
                outs.append(v.tensor)
    if not outs:
        raise PaseError(
            "no output depends on the model's inputs or weights, so there is nothing to compute", where=m.name
        )
    for t in {t.name: t for t in outs}.values():
        b.output(t)
    graph = b.finish(outs, frontend="onnx", dims=m.dims)
    made: dict[str, tuple[str, tuple[int, ...]]] = {}
    for k, v in low.env.items():
        of = v.note[1] if v.tensor is None and v.note[:1] == ("view",) else v
        if of.tensor is not None:
            made[k] = (of.tensor.name, v.shape)
    return TracedOnnx(
        graph=graph,
        contents=b.contents,
        attributes=b.attributes,
        param_paths=tuple(t.path for t in graph.parameters),
        input_paths=tuple(t.path for t in graph.inputs),
        values=made,
        operands=tuple(frozenset((*n.input, *n.output)) for n in m.graph.node),
    )


@dataclass
class OnnxLowering:
    """The state of the lowering of a graph, of a function, or of a graph inside of a node."""

    b: GraphBuilder
    model: OnnxModel
    unknown: Unknown
    left: list[int]
    """How many nodes may still be lowered. All nested graphs share it, because nested functions multiply nodes."""
    opsets: Mapping[str, int]
    env: dict[str, Value] = field(default_factory=dict)
    outer: OnnxLowering | None = None
    captured: dict[str, Value] | None = None
    """For a body that is lowered separately: the values of enclosing graphs that it reads."""
    apart: OnnxLowering | None = None
    """The innermost separately lowered body that contains this graph."""
    weights: dict[tuple[str, str], Value] = field(default_factory=dict)
    """(scope, name there) -> a stored tensor. All nested graphs share them: two calls of a function have one weight."""
    taken: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name of a parameter -> its key in ``weights``, so that two tensors never share a name."""
    scope: str = ""
    """The scope in which names of stored tensors are unique: the place of the graph, or its function."""
    owner: str = ""
    """The prefix of the names of stored tensors."""
    prefix: str = ""
    """The prefix of the paths of its nodes."""
    depth: int = 0
    attributes: Mapping[str, AttributeProto] = field(default_factory=dict)
    """Inside of a function: the attributes of the call."""
    absent: set[str] = field(default_factory=set)
    """Inside of a function: the inputs that the call left out."""

    # Initializers, constants and inputs.

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
        """A tensor that the file stores. It becomes a parameter or a constant when a loop nest first reads it.

        call: distinguishes the call, for a tensor that is an attribute of one call of a function.
        """
        key, label = (f"{self.scope}{call}", name), f"{self.owner}{name}"
        if self.taken.setdefault(label, key) != key:
            label = f"{self.scope}{call}{name}"
            self.taken[label] = key
        return self._stored(key, label, shape, dtype)

    def _stored(self, key: tuple[str, str], label: str, shape: tuple[int, ...], dtype: str) -> Value:
        if self.apart is not None:  # weights of a separately lowered body belong to the model
            assert self.apart.outer is not None and self.apart.captured is not None
            v = self.apart.captured[label] = self.apart.outer._stored(key, label, shape, dtype)
            return apart_value(v)
        if key in self.weights:
            return self.weights[key]
        v = Value(shape=shape, dtype=dtype, note=("initializer", label))
        v.weight = _trained(v) or (v.elements > 1 and dtype in ("int8", "uint8", "int4", "uint4"))

        def make() -> Tensor:
            if v.weight:
                return self.b.parameter(label, shape, dtype)
            return self.b.constant(shape, dtype, contents=f"stored as {label}")

        v.make = make
        self.weights[key] = v
        return v

    def constant(self, c: OnnxCall, shape: tuple[int, ...], dtype: str, data: np.ndarray | None) -> Value:
        """The tensor of a Constant node, treated like an initializer. A few numbers may also be used for shapes."""
        call = f"{c.path}:" if any(a.ref_attr_name for a in c.node.attribute) else ""
        v = self.stored(c.node.output[0], shape, dtype, call=call)
        v.foldable = not _trained(v) or v.elements <= _MOST_NUMBERS
        v._data = data
        return v

    def input(self, v: ValueInfoProto) -> Value:
        where = f"{self.model.name}: input '{v.name}'"
        if v.type.WhichOneof("value") != "tensor_type":
            raise PaseError(
                f"it is a {v.type.WhichOneof('value') or 'value without a type'}, but pase reads only tensors",
                where=where,
            )
        dtype = dtype_name(v.type.tensor_type.elem_type, where)
        shape = self.model.shape(v)
        if shape is None:
            raise PaseError("it has no shape", where=where, fix="give it one (onnx.tools.update_model_dims)")
        if dtype == "string":
            raise PaseError(
                "it is text, which pase cannot price", where=where, fix="remove it from the model"
            )
        out = Value(shape=shape, dtype=dtype)
        if out.elements > 1 << 50:
            raise PaseError(f"its shape {list(shape)} is too large", where=where)
        if out.elements:
            out.make = lambda: self.b.input(v.name, shape, dtype)
        return out

    def find(self, name: str, place: str) -> Value:
        """The value of this name, in this graph or in an enclosing one. place: names the reader in the message."""
        if name in self.env:
            return self.env[name]
        if self.outer is None:
            raise PaseError(f"it reads '{name}', which no earlier node makes", where=place)
        v = self.outer.find(name, place)
        if self.captured is not None:
            self.captured[name] = v
            v = self.env[name] = apart_value(v)
        return v

    # Nodes.

    def key(self, node: NodeProto) -> str:
        """The key of a node's op in the table of rules."""
        return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}:{node.op_type}"

    def nodes(self, graph: GraphProto, prefix: str) -> None:
        """Lower the nodes of a graph that its outputs depend on."""
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
                            f"two nodes make '{o}', one of them {n.op_type} '{n.name}'", where=self.model.name
                        )
                made.update(n.output)
                self.lower(n, f"{prefix}{i}", declared)

    def _outside(self, name: str) -> bool:
        """Whether an enclosing graph has a value of this name."""
        at = self.outer
        while at is not None:
            if name in at.env:
                return True
            at = at.outer
        return False

    def lower(self, n: NodeProto, path: str, declared: Mapping[str, ValueInfoProto]) -> None:
        """Lower a node. declared: name of a value -> its type and shape, as the file declares them."""
        self.left[0] -= 1
        if self.left[0] < 0:
            raise PaseError("its functions expand to far more nodes than the file has", where=self.model.name)
        place = f"{self.model.name}: {n.op_type} '{n.name or path}'"
        self.b.source, self.b.eqn = _source(n) or SourceLine(f"{n.op_type} {n.name or path}"), Place(path)
        ins = [self.find(x, place) if x and x not in self.absent else None for x in n.input]
        key = self.key(n)
        domain = "" if n.domain == "ai.onnx" else n.domain
        version = self.opsets.get(domain, 1)
        c = OnnxCall(low=self, node=n, op=n.op_type, version=version, ins=ins, place=place, path=path)
        c.resolve(self.attributes)
        self.b.tell((key, [_few_numbers(v) for v in ins if v is not None]))
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
                raise UnknownOp.in_frontend(
                    f"pase has no rule for ONNX op '{key}' (opset {c.version})",
                    where=place,
                    rules="frontends/onnx/rules*.py",
                )
        if len(outs) < len([o for o in n.output if o]):
            raise c.fail(f"the node has {len(n.output)} outputs, but its op makes {len(outs)}")
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
            raise c.fail(f"its inputs {shapes} and its attributes do not fit together: {e}") from e
        return [out] if isinstance(out, Value) else out

    def _function(self, c: OnnxCall, f: FunctionProto, path: str) -> Sequence[Value | None]:
        """The outputs of a call of a function that the model defines. The function is inlined."""
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
        """The lowering for a graph or a function inside of a node."""
        if self.depth >= _MOST_DEPTH:
            raise c.fail(
                f"functions and graphs are nested more than {_MOST_DEPTH} levels deep",
                fix="check that no function calls itself",
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

    # Ops that are not split.

    def replicate(
        self,
        c: OnnxCall,
        flops: float,
        declared: Mapping[str, ValueInfoProto],
        outs: Sequence[tuple[tuple[int, ...], str]] = (),
        more: Sequence[Value] = (),
    ) -> list[Value]:
        """The node as one op that is not split.

        outs: shape and dtype of the first results. Those of other results must be declared in the file. more: further
        operands, besides the node's inputs.
        """
        results = list(outs)
        for name in list(c.node.output)[len(results) :]:
            v = declared.get(name)
            shape = None if v is None else self.model.shape(v)
            if shape is None:
                raise c.fail(
                    f"the shape of its output '{name}' is not known",
                    fix="declare it in the file (value_info)",
                )
            results.append((c.shape(shape), dtype_name(v.type.tensor_type.elem_type, c.place)))  # type: ignore[union-attr]
        reads = [
            c.tensor(v) for v in (*(v for v in c.ins if v is not None), *more) if v.elements and not v.literal
        ]
        filled = [(s, d) for s, d in results if 0 not in s]
        made = iter(nests.opaque(self.b, c.op.lower(), reads, filled, flops=flops))
        return [Value(shape=s, dtype=d) if 0 in s else c.value(next(made)) for s, d in results]


def _size(proto: TensorProto) -> int:
    """The number of nodes in the file, including those in functions."""
    return len(proto.graph.node) + sum(len(f.node) for f in proto.functions)


_MOST_NUMBERS = 16
"""A float Constant of at most this many elements may be scales or bounds of an op, or be used for shapes."""


def _trained(v: Value) -> bool:
    """Whether a stored tensor is trained."""
    return v.elements > 1 and is_floating(v.dtype)


def _contents(t: TensorProto) -> np.ndarray | None:
    """The data of a small tensor; None if the file does not hold it."""
    from onnx import numpy_helper

    try:
        return np.asarray(numpy_helper.to_array(t))
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d{1,7}), in ([^\n]{1,80})')


def _source(n: NodeProto) -> SourceLine:
    """The user's line, if the exporter recorded it (PyTorch's does)."""
    for p in n.metadata_props:
        if p.key == "pkg.torch.onnx.stack_trace":
            frames = _FRAME.findall(p.value[-4000:])
            own = [f for f in frames if "/torch/" not in f[0]] or frames
            return SourceLine(f"{own[-1][0]}:{own[-1][1]}", own[-1][2]) if own else NOWHERE
    return NOWHERE


registry.FRONTENDS.add(
    "onnx",
    registry.Frontend(
        reads=reads,
        trace=trace,
        coverage=coverage,
        fused_attention="The operator Attention (opset 23) is one",
    ),
)
