"""A Mesh-TensorFlow program under construction: values with named dims, statements, and reshards between layouts.

The source's ops are translated in order, by the rules of their frontend (``tf_ops``, ``jax_ops``). A value has the dims
of the loop nest that computes it. An op reads it in the dims of its own nest. If the two differ, a reshape is inserted,
which readers with the same dims share. Most views need no code, because dims have names and their order does not
matter.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pase.backends.mesh_tf.names import MeshTfDim, Names, TensorDims, flat
from pase.backends.mesh_tf.reshapes import reshape_steps
from pase.errors import PaseError
from pase.ir import Access, Node, Op, Place

__all__ = ["Input", "MeshTfProgram", "MeshTfValue", "SourceOp", "comment"]

_MOST_INLINE = 64
"""The number of elements of the largest constant that is written as literal numbers."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """An operand: a tensor of the graph, or a value that does not depend on data."""

    tensor: str | None
    value: np.ndarray | None = None
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    behind: str | None = None
    """The tensor that this is a reshape of. A reader that ignores the reshape reads that tensor."""

    def named(self, tensor: str) -> bool:
        return tensor in (self.tensor, self.behind)


@dataclass(frozen=True, kw_only=True)
class SourceOp:
    """One op of the source program. attrs: the framework's own attributes."""

    at: Place | None
    """The op's place in the traced program; None for an op that only pase has."""
    name: str
    label: str
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    """Tensors of the graph; "" if nothing reads the output."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    attrs: Any = None

    @property
    def where(self) -> str:
        return f"'{self.name}' at {self.label}"


@dataclass(frozen=True)
class MeshTfValue:
    """A value of the program.

    code: an expression.
    order: the dims of the Mesh-TF tensor, in order.
    dims: the same dims, grouped by the dims of the source's tensor.
    """

    code: str
    order: tuple[MeshTfDim, ...]
    dims: TensorDims
    dtype: str = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(np.prod([d.size for d in g], dtype=np.int64)) for g in self.dims)


@dataclass
class MeshTfProgram:
    names: Names
    lines: list[str] = field(default_factory=list)
    values: dict[str, MeshTfValue] = field(default_factory=dict)
    """tensor of the graph -> the value that holds it"""
    known: dict[str, np.ndarray] = field(default_factory=dict)
    """tensor of the graph -> its value, if it does not depend on data"""
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    """name in the program -> an array too large to be written out"""
    dim_names: dict[tuple[str, int], str] = field(default_factory=dict)
    """(dim name, size) -> its variable in the program"""
    _reshaped: dict[tuple[str, TensorDims], MeshTfValue] = field(default_factory=dict)
    _at: dict[Place, list[tuple[Node, Op]]] = field(default_factory=dict)
    """Source op -> its loop nests in the graph, in order."""
    _writes: dict[str, tuple[Node, Op, Access]] = field(default_factory=dict)
    _copies: dict[str, list[str]] = field(default_factory=dict)
    _node: str = ""
    _count: int = 0
    _taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        tensors = self.names.graph.tensors
        for n in self.names.graph.nodes:
            for op in n.ops:
                made = op.writes[0].tensor if op.writes else ""
                if made and (source := tensors[made].copy_of):
                    self._copies.setdefault(source, []).append(made)
                elif op.kind not in (
                    "parameter",
                    "input",
                    "constant",
                ):  # these have the user's names, not places
                    self._at.setdefault(op.eqn, []).append((n, op))
                for a in op.writes:
                    self._writes.setdefault(a.tensor, (n, op, a))
        made_as = {name: i for i, name in enumerate(tensors)}
        for nests in self._at.values():
            nests.sort(key=lambda pair: min((made_as[a.tensor] for a in pair[1].writes), default=-1))

    # --- statements

    def let(
        self, code: str, order: Sequence[MeshTfDim], dims: TensorDims, dtype: str, hint: str = "t"
    ) -> MeshTfValue:
        """Assign an expression to a new variable."""
        name = self.variable(hint)
        self.lines.append(f"{name} = {code}")
        return MeshTfValue(name, tuple(order), dims, dtype)

    def variable(self, hint: str) -> str:
        word = re.sub(r"\W+", "_", hint, flags=re.ASCII).strip("_") or "t"
        word = f"t_{word}" if not word[0].isalpha() or keyword.iskeyword(word) else word
        name, k = word, 1
        while name in self._taken:
            name, k = f"{word}_{k}", k + 1
        self._taken.add(name)
        return name

    def dim(self, d: MeshTfDim) -> str:
        """The program's variable for a dim."""
        key = (self.names.name(d), d.size)
        if key not in self.dim_names:
            sizes = [size for name, size in self.dim_names if name == key[0]]
            self.dim_names[key] = self.variable(f"{key[0]}_{key[1]}" if sizes else key[0])
        return self.dim_names[key]

    def shape(self, dims: Sequence[MeshTfDim]) -> str:
        return f"[{', '.join(self.dim(d) for d in dims)}]"

    # --- layouts

    def dims(self, node: Node, access: Access) -> TensorDims:
        return self.names.dims(node, access, self.names.graph.tensors[access.tensor])

    def written(self, tensor: str) -> TensorDims | None:
        """The dims in which the plan computes a tensor."""
        if tensor not in self._writes:
            return None
        node, _, access = self._writes[tensor]
        return self.dims(node, access)

    def node_of(self, op: SourceOp) -> Node | None:
        """The plan's node that computes the op's first output."""
        return next((self._writes[t][0] for t in op.outputs if t in self._writes), None)

    def to(self, value: MeshTfValue, want: TensorDims) -> MeshTfValue:
        """The value in these dims: the value itself, or reshaped."""
        have = flat(value.dims)
        if set(have) == set(flat(want)) and len(have) == len(flat(want)) and value.dims == want:
            return replace(value, dims=want)
        key = (value.code, want)
        if key in self._reshaped:
            return self._reshaped[key]
        alike = [[d.size for d in g] for g in value.dims] == [[d.size for d in g] for g in want]
        if alike:  # each dim is replaced by one dim, in any order
            new = dict(zip(have, flat(want), strict=True))
            order = value.order
            steps = reshape_steps(
                tuple((d,) for d in order), tuple((new[d],) for d in order), self.names.axes
            )
        else:
            value = self.ordered(value, have)
            steps = reshape_steps(value.dims, want, self.names.axes)
        code, out = value.code, value
        for step in steps:
            out = self.let(
                f"mtf.reshape({code}, {self.shape(step)})", step, want, value.dtype, f"{value.code}_as"
            )
            code = out.code
        out = replace(out, dims=want)
        self._reshaped[key] = out
        return out

    def ordered(self, value: MeshTfValue, order: Sequence[MeshTfDim]) -> MeshTfValue:
        """The value with its dims in this order."""
        if value.order == tuple(order):
            return value
        code = f"mtf.transpose({value.code}, {self.shape(order)})"
        return self.let(code, order, value.dims, value.dtype, f"{value.code}_t")

    def regrouped(self, value: MeshTfValue, dims: TensorDims) -> MeshTfValue:
        """The same elements in another shape. This is a reshard only if the dims themselves differ."""
        if set(flat(value.dims)) == set(flat(dims)):
            return replace(value, dims=dims)
        value = self.ordered(value, flat(value.dims))
        joined = replace(value, dims=(flat(value.dims),))
        return replace(self.to(joined, (flat(dims),)), dims=dims)

    # --- operands

    def nests(self, op: SourceOp) -> list[tuple[Node, Op]]:
        """The loop nests of this op in the plan's graph, in order."""
        return self._at.get(op.at, []) if op.at is not None else []

    def arg(self, op: SourceOp, k: int) -> MeshTfValue:
        """Operand k in the dims in which the plan's op reads it."""
        given = op.inputs[k]
        reads = [(n, a) for n, o in self.nests(op) for a in o.reads]
        if given.value is None or any(given.named(self._original(a)) for _, a in reads):
            nth = sum(i.tensor == given.tensor for i in op.inputs[:k])
            found = [(n, a) for n, a in reads if given.named(self._original(a))]
        else:  # a number that the frontend turned into a constant: the constant that is no other operand
            mine = {t for i in op.inputs for t in (i.tensor, i.behind)}
            alike = [i for i in op.inputs[:k] if i.value is not None and i.shape == given.shape]
            nth = len(alike)
            found = [
                (n, a)
                for n, a in reads
                if self._original(a) not in mine
                and self.names.graph.tensors[a.tensor].role == "constant"
                and tuple(self.names.graph.tensors[a.tensor].shape) == given.shape
            ]
        if given.value is not None:
            want = self.dims(*found[min(nth, len(found) - 1)]) if found else None
            return self.constant(given.value, want, given.dtype)
        if not found:
            return self.held(op, given.tensor)
        return self.read(op, *found[min(nth, len(found) - 1)])

    def _original(self, access: Access) -> str:
        """The tensor of the source program that is read, possibly through a copy."""
        return self.names.graph.tensors[access.tensor].original

    def read(self, op: SourceOp, node: Node, access: Access) -> MeshTfValue:
        """A tensor in the dims in which this access of the op's loop nests reads it."""
        name, want = access.tensor, self.dims(node, access)
        raw = self._original(access)
        if raw not in self.values and self.names.graph.tensors[raw].role == "constant":
            shape = tuple(self.names.graph.tensors[raw].shape)
            for given in op.inputs:
                if given.value is not None and given.tensor in (raw, None) and given.shape == shape:
                    return self.constant(given.value, want, given.dtype)
        held = self._copy(name) if name != raw and name in self._writes else self.held(op, raw)
        return self.to(held, want)

    def held(self, op: SourceOp, tensor: str | None) -> MeshTfValue:
        """A tensor's value in the dims in which it was computed."""
        if tensor is None or tensor not in self.values:
            raise PaseError(
                f"it reads a value that the Mesh-TensorFlow program does not have ({tensor})", where=op.where
            )
        return self.values[tensor]

    def _copy(self, copy: str) -> MeshTfValue:
        """The copy of a tensor that several readers share. The first read makes it."""
        if copy not in self.values:
            node, op, access = self._writes[copy]
            source = op.reads[0].tensor
            held = self._copy(source) if source not in self.values else self.values[source]
            self.values[copy] = self.to(held, self.dims(node, access))
        return self.values[copy]

    def scalar(self, op: SourceOp, k: int) -> str | None:
        """Operand k as a literal, if it is a single known number."""
        v = op.inputs[k].value
        return None if v is None or v.size != 1 else _literal(v.reshape(()).item())

    def static(self, op: SourceOp, k: int) -> np.ndarray:
        """Operand k, which must not depend on data: a shape, an axis, a permutation."""
        v = op.inputs[k].value
        if v is None:
            raise PaseError(
                f"operand {k} depends on data, but a Mesh-TensorFlow program needs it when it is built",
                where=op.where,
            )
        return v

    def constant(self, array: np.ndarray, want: TensorDims | None, dtype: str) -> MeshTfValue:
        """A known array as a tensor in these dims, by default in new unsplit dims."""
        if want is None:
            want = tuple((self.names.fresh(s),) if s > 1 else () for s in array.shape)
        dims = flat(want)
        shape = [d.size for d in dims]
        if not dims or (array == array.reshape(-1)[0]).all():
            value = _literal(array.reshape(-1)[0].item())
            code = f"mtf.constant(mesh, {value}, shape={self.shape(dims)}, dtype=tf.{dtype})"
            return self.let(code, dims, want, dtype, "const")
        if array.size <= _MOST_INLINE:
            code = f"tf.constant({array.reshape(shape).tolist()}, tf.{dtype})"
        else:
            key = next((k for k, a in self.constants.items() if a is array), None)
            if key is None:
                key = f"c{len(self.constants)}"
                self.constants[key] = array
            code = f'tf.reshape(tf.constant(CONSTANTS["{key}"]), {shape})'
        return self.let(
            f"mtf.import_tf_tensor(mesh, {code}, shape={self.shape(dims)})", dims, want, dtype, "const"
        )

    # --- results

    def store(self, op: SourceOp, made: Sequence[MeshTfValue | None]) -> None:
        """Store the results of a rule, in the dims that the plan gives them. If the frontend added a reshape at the end
        of the op, or omitted one that nothing needs, the rule's result has the shape before that reshape."""
        tensors = self.names.graph.tensors
        for k, value in enumerate(made):
            name = op.outputs[k] if k < len(op.outputs) else ""
            if value is None:
                continue
            if name and (name not in tensors or tuple(tensors[name].shape) == value.shape):
                self.keep(name, value)
            elif k == 0:
                written = [a.tensor for _, o in self.nests(op) for a in o.writes]
                alike = [t for t in written if tuple(tensors[t].shape) == value.shape]
                if not alike:
                    raise PaseError(
                        f"the plan's graph has no tensor of shape {value.shape} that it computes",
                        where=op.where,
                    )
                self.keep(alike[-1], value)
                self.views_of(op, alike[-1])

    def views_of(self, op: SourceOp, tensor: str) -> None:
        """Compute the reshapes at the end of the op."""
        for node, nest in self.nests(op):
            if nest.kind == "view" and [a.tensor for a in nest.reads] == [tensor]:
                dims = self.dims(node, nest.writes[0])
                x = self.read(op, node, nest.reads[0])
                self.keep(nest.writes[0].tensor, self.viewed(x, dims))

    def viewed(self, x: MeshTfValue, dims: TensorDims) -> MeshTfValue:
        """Translate a reshape, transpose or broadcast. Usually the dims stay the same, and are only grouped anew."""
        have, want = set(flat(x.dims)), set(flat(dims))
        if have == want:
            return replace(x, dims=dims)
        if have < want:
            return self.let(f"mtf.broadcast({x.code}, {self.shape(flat(dims))})", flat(dims), dims, x.dtype)
        return self.regrouped(x, dims)

    def keep(self, name: str, value: MeshTfValue) -> None:
        """Set the value of a tensor from here on, in the plan's dims. Each iteration of a loop sets it again."""
        want = self.written(name)
        self.values[name] = value if want is None else self.to(value, want)
        for copy in self._copies.get(name, ()):
            self.values.pop(copy, None)

    def heading(self, op: SourceOp) -> None:
        """Write a comment if another node of the plan begins."""
        node = self.node_of(op)
        if node is None or node.name == self._node:
            return
        self._node = node.name
        split = ", ".join(
            f"{d}: {'·'.join(a)}" for d, a in self.names.strategy.get(node.name, {}).items() if a
        )
        einsum = node.main.einsum if len(node.main.einsum) < 90 else ""
        self.lines += ["", f"# {comment(node.name)}   {einsum}" + (f"   ({split})" if split else "")]


def comment(text: str) -> str:
    """Text from another source, shortened to one printable line."""
    return "".join(c if c.isprintable() else " " for c in text)[:200]


def _literal(x: object) -> str:
    if isinstance(x, float) and not np.isfinite(x):
        return f'float("{x}")'
    return repr(x)
