"""Lowers a TensorFlow graph node by node to loop nests: constants, variables, calls, lists, and the ops with rules.

Every node has a stable path, ``CALL/CALL/NODE``: the names of the enclosing calls and loops, followed by its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pase.errors import PaseError
from pase.frontends.common.folding import MOST_KNOWN
from pase.frontends.common.values import Value, known
from pase.frontends.registry import Unknown, UnknownOp
from pase.frontends.tf.graph import CALLS, TfBody, TfGraph, TfNode, dtype_name, static_shape
from pase.frontends.tf.known import constant, evaluate
from pase.frontends.tf.lists import LISTS
from pase.frontends.tf.rules import RULES, opaque
from pase.frontends.tf.values import (
    Absent,
    Handle,
    TfCall,
    TfResult,
    TfValue,
    elements,
    tensor_of,
    value_of,
    whole,
)
from pase.ir import Place, SourceLine, Tensor
from pase.ops import GraphBuilder

if TYPE_CHECKING:
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

__all__ = ["PASSED_ON", "TfLowering"]

_LOOKS_BEHIND = frozenset(
    {
        "Reshape",
        "MatMul",
        "BatchMatMul",
        "BatchMatMulV2",
        "BatchMatMulV3",
        "_FusedMatMul",
        "Identity",
        "IdentityN",
        "SparseSoftmaxCrossEntropyWithLogits",
        "SoftmaxCrossEntropyWithLogits",
        "Shape",
        "Size",
        "Rank",
        "ShapeN",
    }
)
"""Ops that can read the source of a reshape. For any other op the reshape is made."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PASSED_ON = _words(
    "Identity Snapshot PreventGradient CheckNumerics CheckNumericsV2 EnsureShape DebugIdentity DebugIdentityV2 "
    "DebugIdentityV3 DeepCopy RefIdentity XlaSharding PlaceholderWithDefault Print PrintV2 Copy Enter RefEnter "
    "Exit RefExit LoopCond"
)
"""Ops whose result is their first operand."""

_NO_NUMBERS = _words(
    "NoOp Assert VarIsInitializedOp AsString StringFormat AssignVariableOp AssignAddVariableOp AssignSubVariableOp "
    "SaveV2 RestoreV2 MergeV2Checkpoints ScalarSummary HistogramSummary ImageSummary MergeSummary Timestamp "
    "HashTableV2 LookupTableFindV2 StaticRegexFullMatch StringJoin ShardedFilename ControlTrigger"
)
"""Ops on effects, strings and tables. They cost nothing, and an op that uses their results as tensors is refused."""


@dataclass(kw_only=True)
class TfLowering:
    """The state of a graph's lowering."""

    b: GraphBuilder
    graph: TfGraph
    unknown: Unknown
    variable: Callable[[TfNode], TfResult]
    """The value of a VarHandleOp or of a version 1 variable."""
    weight: Callable[[TfNode, tuple[int, ...], str], Tensor | None] = lambda node, shape, dtype: None
    """For frozen graphs: the parameter that a Const stands for; None if it is a plain constant."""
    source: Callable[[str], str] = lambda name: ""
    """The user's line for the name of a node, or ""."""
    operands: dict[Place, tuple[str | None, ...]] = field(default_factory=dict)
    results: dict[Place, tuple[str, ...]] = field(default_factory=dict)
    reshaped: dict[Place, Value] = field(default_factory=dict)
    """Node -> its result, if that is a reshape which was not made when the node was lowered."""

    def body(self, body: TfBody, args: Sequence[TfValue], prefix: str) -> list[TfValue]:
        """Lower a body and return its outputs. args: the values of its arguments. prefix: of its nodes' paths."""
        if len(args) < len(body.args):
            raise PaseError(
                f"it gets {len(args)} values from {prefix or 'the graph'}, but takes {len(body.args)}",
                where=f"function '{body.name}'",
            )
        env: dict[str, TfValue] = dict(zip(body.args, args, strict=False))
        for node in body.nodes:
            path = f"{prefix}{node.name}"
            at = self.b.eqn = Place(path)
            self.b.source = self._source(path, node.name)
            ins = [self._read(env, ref, node) for ref in node.inputs]
            numbers = [a.tolist() for a in _arrays(ins) if a.size <= 8]
            self.b.tell(
                (
                    node.op,
                    [(k, a) for k, v in sorted(node.attr.items()) if (a := _plain(v)) is not None],
                    numbers,
                )
            )
            if node.op not in _LOOKS_BEHIND and node.op not in CALLS and node.op not in self.graph.library:
                ins = [whole(v) for v in ins]
            outs = [value_of(v) if isinstance(v, Tensor) else v for v in self.node(node, ins, path)]
            self.b.eqn = at
            self.operands[at] = tuple(map(_tensor_name, ins))
            self.results[at] = tuple(_tensor_name(v) or "" for v in outs)
            if outs and isinstance(outs[0], Value) and outs[0].make is not None:
                self.reshaped.setdefault(at, outs[0])
            for k, v in enumerate(outs):
                env[f"{node.name}:{k}"] = v
        return [self._read(env, ref, None) for ref in body.outputs]

    def finish(self) -> None:
        """Record the names of reshapes that were made later than their nodes."""
        for at, v in self.reshaped.items():
            if v.tensor is not None:
                self.results[at] = (v.tensor.name,)

    def _read(self, env: dict[str, TfValue], ref: str, node: TfNode | None) -> TfValue:
        try:
            return env[ref]
        except KeyError:
            who = f"node '{node.name}'" if node else "an output of the graph"
            raise PaseError(f"it reads '{ref}', but that node has no such output", where=who) from None

    def _source(self, path: str, name: str) -> SourceLine:
        """The source of a node: its path and scope, as in ``dense/MatMul (dense)``, after the user's line if known."""
        scope = path.rpartition("/")[0].rpartition("/")[2] or "graph"
        where = self.source(name)
        function = "".join(ch if ch.isalnum() else "_" for ch in scope)
        return SourceLine(f"{where} {path}" if where else path, function)

    def node(self, node: TfNode, ins: Sequence[TfValue], path: str) -> Sequence[TfResult]:
        from pase.frontends.tf.loops import REGIONS

        op = node.op
        if op == "Const":
            return [self._const(node)]
        if op in CALLS or op in self.graph.library:
            (name,) = self.graph.called(node)
            return self.body(self.graph.body(name), ins, f"{path}/")
        if op in REGIONS:
            return REGIONS[op].lower(self, node, ins, path)
        if op in ("VarHandleOp", "VariableV2", "Variable", "AutoReloadVariable"):
            return [self.variable(node)]
        if op in ("Placeholder", "PlaceholderV2"):
            raise PaseError(
                "the outputs of the graph depend on this placeholder, which is not one of the inputs",
                where=f"placeholder '{path}'",
            )
        if op in _NO_NUMBERS:
            return [Absent(f"the result of {op}")] * 4
        c = TfCall(builder=self.b, node=node, ins=ins)
        if op in PASSED_ON or (op == "Cast" and c.operand(0) is not None and c.type("DstT") == c.dtype(0)):
            return [c.operand(0)]
        if op == "IdentityN":
            return list(ins)
        if op in ("Switch", "RefSwitch"):
            return [c.operand(0), c.operand(0)]
        if op == "ReadVariableOp":
            return [self._variable(c)]
        if op in ("Assign", "AssignAdd", "AssignSub"):
            return [c.operand(1)]
        if op in LISTS:
            return LISTS[op](c)
        if ins and len(arrays := _arrays(ins)) == len(ins):
            made = evaluate(node, arrays)
            if made is not None:
                return [self._value(c, a) for a in made]
        if op in RULES:
            return RULES[op](c)
        if self.unknown == "replicate":
            self.b.remark_unknown(node.op)
            return self._replicate(c)
        raise UnknownOp.in_frontend(
            "pase has no rule for this op",
            where=f"TensorFlow op '{op}' at {path}",
            rules="frontends/tf/rules*.py",
        )

    def _value(self, c: TfCall, a: np.ndarray) -> TfValue:
        if 0 in a.shape and a.size == 0 and a.ndim > 1:
            raise c.fail(f"its result has shape {a.shape}, but a dim without elements cannot be parallelized")
        return known(a)

    def _variable(self, c: TfCall) -> Tensor:
        v = c.operand(0)
        if not isinstance(v, Handle):
            raise c.fail("it reads something that is not a variable")
        return v.tensor

    def _const(self, node: TfNode) -> TfResult:
        if "value" not in node.attr:
            raise PaseError(
                "it has no value",
                where=f"TensorFlow op 'Const' at {node.name}",
                fix="check that the file is complete",
            )
        proto = node.attr["value"].tensor
        shape = static_shape(proto.tensor_shape)
        if shape is None or any(s is None for s in shape):
            raise PaseError("it has no static shape", where=f"TensorFlow op 'Const' at {node.name}")
        whole = tuple(s for s in shape if s is not None)
        dtype = dtype_name(proto.dtype)
        if dtype in ("string", "resource", "variant"):
            return Absent(f"a {dtype}")
        found = self.weight(node, whole, dtype)
        if found is not None:
            return found
        if elements(whole) <= MOST_KNOWN:
            a = constant(node, proto, whole)
            if a is not None:
                return known(a)
        if any(s < 1 for s in whole):
            raise PaseError(
                f"its shape {whole} has a dim without elements", where=f"TensorFlow op 'Const' at {node.name}"
            )
        return self.b.constant(whole, dtype, contents=partial(constant, node, proto, whole))

    def _replicate(self, c: TfCall) -> Sequence[TfResult]:
        """An op without a rule, if the user allows it: replicated. Only its memory traffic is priced."""
        return opaque(c, [(c.hinted(k), dtype) for k, dtype in enumerate(_output_types(c))])


def _tensor_name(v: TfValue) -> str | None:
    t = tensor_of(v)
    return None if t is None else t.name


def _arrays(ins: Sequence[TfValue]) -> list[np.ndarray]:
    """The contents of the values that are known."""
    return [v.known for v in ins if isinstance(v, Value) and v.known is not None]


def _plain(attribute: AttrValue) -> object:
    """The number or the text of an attribute; None if it is something else, such as the functions of a loop that was
    found in a graph without functions (``v1``)."""
    kind = attribute.WhichOneof("value") if hasattr(attribute, "WhichOneof") else None
    return getattr(attribute, kind) if kind in ("i", "f", "b", "s") else None


def _output_types(c: TfCall) -> list[str]:
    """The dtypes of a node's results, from the definition of its op.

    For an op without a definition, as many results as TensorFlow recorded shapes for (or one), all of one dtype.
    """
    from tensorflow.python.framework import op_def_registry

    found = op_def_registry.get(c.node.op)
    if found is None:
        count = len(c.node.attr["_output_shapes"].list.shape) if "_output_shapes" in c.node.attr else 1
        return [c.type("T", "dtype")] * count
    out: list[str] = []
    attr: Mapping[str, AttrValue] = c.node.attr
    for arg in found.output_arg:
        if arg.type_list_attr:
            out += [dtype_name(t) for t in attr[arg.type_list_attr].list.type]
            continue
        number = arg.type or (attr[arg.type_attr].type if arg.type_attr in attr else 0)
        times = int(attr[arg.number_attr].i) if arg.number_attr else 1
        out += [dtype_name(number) if number else c.dtype(0)] * times
    return out
