"""TensorFlow graphs as plain data: sorted nodes with checked references, and functions with their bodies.

This module only reads protos; nothing is executed. A reference to a tensor is always ``node:k``, even in the body of a
function (where TensorFlow writes ``node:name:k``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pase.errors import PaseError

if TYPE_CHECKING:
    from tensorflow.core.framework.attr_value_pb2 import AttrValue
    from tensorflow.core.framework.function_pb2 import FunctionDef
    from tensorflow.core.framework.node_def_pb2 import NodeDef
    from tensorflow.core.framework.tensor_shape_pb2 import TensorShapeProto

__all__ = ["CALLS", "TfBody", "TfGraph", "TfNode", "data_inputs", "dtype_name", "ordered", "static_shape"]

CALLS = {
    "PartitionedCall": "f",
    "StatefulPartitionedCall": "f",
    "TPUPartitionedCall": "f",
    "RemoteCall": "f",
    "XlaLaunch": "function",
    "BatchFunction": "f",
}
"""Ops that call a function once -> the attribute that names the function."""

_REGIONS = {
    "While": ("cond", "body"),
    "StatelessWhile": ("cond", "body"),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "StatelessCase": ("branches",),
}

_MOST_NODES = 300_000
"""The most nodes after inlining. The largest model of keras.applications has 12,000."""

_DTYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    7: "string",
    8: "complex64",
    9: "int64",
    10: "bool",
    11: "int8",
    12: "uint8",
    13: "int32",
    14: "bfloat16",
    15: "int16",
    16: "uint16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    20: "resource",
    21: "variant",
    22: "uint32",
    23: "uint64",
    24: "float8_e5m2",
    25: "float8_e4m3fn",
    29: "int4",
    30: "uint4",
}


def dtype_name(number: int) -> str:
    """The name of a dtype from TensorFlow's DataType. A reference type has the name of the type that it refers to.

    >>> dtype_name(1), dtype_name(101), dtype_name(20)
    ('float32', 'float32', 'resource')
    """
    try:
        return _DTYPES[number - 100 if number > 100 else number]
    except KeyError:
        raise PaseError(f"pase does not know TensorFlow's DataType {number}") from None


def static_shape(proto: TensorShapeProto) -> tuple[int | None, ...] | None:
    """The sizes in a TensorShapeProto, with None for an unknown size; None if even the rank is unknown."""
    if proto.unknown_rank:
        return None
    return tuple(None if d.size < 0 else int(d.size) for d in proto.dim)


@dataclass(frozen=True, kw_only=True)
class TfNode:
    """One op. attr: the map of AttrValue protos in its NodeDef."""

    name: str
    op: str
    inputs: tuple[str, ...]
    """``node:k`` for each data input. Control inputs are left out."""
    attr: Mapping[str, AttrValue]

    def hint(self, k: int) -> tuple[int | None, ...] | None:
        """The shape that TensorFlow recorded for output k, or None."""
        if "_output_shapes" not in self.attr:
            return None
        shapes = self.attr["_output_shapes"].list.shape
        return static_shape(shapes[k]) if k < len(shapes) else None


@dataclass(frozen=True, kw_only=True)
class TfBody:
    """A graph or the body of a function: the nodes that its outputs need, each after the nodes that it reads."""

    name: str
    nodes: tuple[TfNode, ...]
    args: tuple[str, ...]
    """References of the arguments."""
    outputs: tuple[str, ...]


@dataclass(kw_only=True)
class TfGraph:
    """A main body and a library of functions. A function is converted when it is first needed."""

    main: TfBody
    library: Mapping[str, FunctionDef]
    """Name -> FunctionDef."""
    made: dict[str, TfBody] = field(default_factory=dict)
    """Name -> body, for functions that have been converted and for loops raised from version 1 control flow."""
    _sizes: dict[str, int] = field(default_factory=dict)

    def body(self, name: str) -> TfBody:
        """The body of the function of this name."""
        if name not in self.made:
            if name not in self.library:
                raise PaseError(
                    "the graph calls this function, but its library does not have it",
                    where=f"function '{name}'",
                )
            self.made[name] = _function(self.library[name], self.library)
        return self.made[name]

    def called(self, node: TfNode) -> tuple[str, ...]:
        """The names of the functions that a node calls, in the order of its attributes."""
        if node.op in self.library:
            return (node.op,)
        names: list[str] = []
        for key in (CALLS[node.op],) if node.op in CALLS else _REGIONS.get(node.op, ()):
            attr = node.attr[key] if key in node.attr else None  # noqa: SIM401 (a map of protos has no such get)
            if attr is None or not (attr.func.name or attr.list.func):
                raise PaseError(
                    f"attribute '{key}' names no function", where=f"TensorFlow op '{node.op}' at {node.name}"
                )
            names += [attr.func.name] if attr.func.name else [f.name for f in attr.list.func]
        return tuple(names)

    def check_size(self) -> None:
        """PaseError for recursion, and for functions that expand to more nodes than can be read."""
        total = self._expanded(self.main, ("the graph",))
        if total > _MOST_NODES:
            raise PaseError(
                f"with its functions inlined, the graph has {total} nodes, but pase reads at most {_MOST_NODES}"
            )

    def _expanded(self, body: TfBody, stack: tuple[str, ...]) -> int:
        """The number of nodes of a body with its functions inlined. stack: the enclosing functions."""
        if len(stack) > 100:
            raise PaseError(
                f"function calls are nested more than 100 levels deep, through {', '.join(stack[-3:])}"
            )
        total = len(body.nodes)
        for node in body.nodes:
            for name in self.called(node):
                if name in stack:
                    raise PaseError(
                        f"it calls itself (at {node.name}), but recursion cannot be inlined",
                        where=f"function '{name}'",
                    )
                if name not in self._sizes:
                    self._sizes[name] = self._expanded(self.body(name), (*stack, name))
                total += self._sizes[name]
        return total


def data_inputs(refs: Sequence[str], plain: Callable[[str], str]) -> list[str]:
    """The data inputs among a node's inputs. plain: converts a reference to ``node:k``."""
    return [plain(r) for r in refs if not r.startswith("^")]


def ordered(
    nodes: Mapping[str, TfNode], outputs: Sequence[str], args: Sequence[str], where: str
) -> tuple[TfNode, ...]:
    """The nodes that the outputs need, producers first. PaseError for a cycle or a reference to a missing node.

    where: names the graph or function in messages.
    """
    given = {a.rpartition(":")[0] for a in args}
    out: list[TfNode] = []
    state: dict[str, int] = {}  # 1: being visited, 2: done

    def find(ref: str, reader: str) -> TfNode:
        name = ref.rpartition(":")[0]
        try:
            return nodes[name]
        except KeyError:
            raise PaseError(
                f"{reader} reads '{name}', which does not exist",
                where=where,
                fix="check that the file is complete",
            ) from None

    for wanted in outputs:
        if wanted.rpartition(":")[0] in given:
            continue
        stack = [find(wanted, "an output")]
        while stack:
            node = stack[-1]
            if state.get(node.name) == 2:
                stack.pop()
                continue
            if state.get(node.name) == 1:
                state[node.name] = 2
                out.append(node)
                stack.pop()
                continue
            state[node.name] = 1
            for ref in reversed(node.inputs):
                if ref.rpartition(":")[0] in given:
                    continue
                before = find(ref, f"node '{node.name}'")
                mark = state.get(before.name)
                if mark == 1:
                    raise PaseError(
                        f"there is a cycle through '{before.name}' and '{node.name}'", where=where
                    )
                if mark is None:
                    stack.append(before)
    return tuple(out)


def _function(definition: FunctionDef, library: Mapping[str, FunctionDef]) -> TfBody:
    """The body of a FunctionDef."""
    name = definition.signature.name
    args = [a.name for a in definition.signature.input_arg]
    given = set(args)
    kinds = {n.name: n for n in definition.node_def}
    offsets: dict[str, dict[str, int]] = {}

    def plain(ref: str) -> str:
        if ref in given:
            return f"{ref}:0"
        node, _, rest = ref.partition(":")
        if node not in kinds:
            raise PaseError(
                f"it reads '{node}', which does not exist",
                where=f"function '{name}'",
                fix="check that the file is complete",
            )
        which, _, k = rest.rpartition(":")
        if not k.isdecimal() or len(k) > 6:
            raise PaseError(f"'{ref[:200]}' is not a reference to a tensor", where=f"function '{name}'")
        if node not in offsets:
            offsets[node] = _offsets(kinds[node], library)
        return f"{node}:{offsets[node].get(which, 0) + int(k)}"

    nodes = {
        n.name: TfNode(name=n.name, op=n.op, inputs=tuple(data_inputs(n.input, plain)), attr=n.attr)
        for n in definition.node_def
    }
    ret = dict(definition.ret)
    try:
        wanted = tuple(plain(ret[o.name]) for o in definition.signature.output_arg)
    except KeyError as e:
        raise PaseError(
            f"it does not return its output {e}",
            where=f"function '{name}'",
            fix="check that the file is complete",
        ) from None
    refs = tuple(f"{a}:0" for a in args)
    where = f"function '{name}'"
    return TfBody(name=name, nodes=ordered(nodes, wanted, refs, where), args=refs, outputs=wanted)


def _offsets(node: NodeDef, library: Mapping[str, FunctionDef]) -> dict[str, int]:
    """Name of an output of an op -> index of the output's first tensor among all tensors that the op returns."""
    if node.op in library:
        return {o.name: k for k, o in enumerate(library[node.op].signature.output_arg)}
    from tensorflow.python.framework import op_def_registry

    found = op_def_registry.get(node.op)
    if found is None:  # an op of a custom library: assume that it has one output, like most ops
        return {}
    out: dict[str, int] = {}
    at = 0
    for arg in found.output_arg:
        out[arg.name] = at
        if arg.number_attr:
            at += int(node.attr[arg.number_attr].i)
        elif arg.type_list_attr:
            at += len(node.attr[arg.type_list_attr].list.type)
        else:
            at += 1
    return out
