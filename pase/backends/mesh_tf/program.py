"""A Mesh-TensorFlow program under construction: values with named dims, statements, and reshards between layouts.

The ops of the plan's graph are translated in order (``lower``). A value has the dims of the loop nest that computes it.
An op reads it in the dims of its own nest. If the two differ, a reshape is inserted, which readers with the same dims
share. Most views need no code, because dims have names and their order does not matter.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pase.backends.mesh_tf.names import MeshTfDim, Names, TensorDims, flat
from pase.backends.mesh_tf.reshapes import reshape_steps
from pase.errors import PaseError
from pase.ir import Access, Node

__all__ = ["MeshTfProgram", "MeshTfValue", "comment", "number"]

_MOST_INLINE = 64
"""The number of elements of the largest constant that is written as literal numbers."""


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
    known: Mapping[str, np.ndarray] = field(default_factory=dict)
    """tensor of the graph -> its value, if it does not depend on data"""
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    """name in the program -> an array too large to be written out"""
    dim_names: dict[tuple[str, int], str] = field(default_factory=dict)
    """(dim name, size) -> its variable in the program"""
    _reshaped: dict[tuple[str, TensorDims], MeshTfValue] = field(default_factory=dict)
    _node: str = ""
    _taken: set[str] = field(default_factory=set)

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

    def read(self, node: Node, access: Access) -> MeshTfValue:
        """A tensor in the dims in which this access of the node's ops reads it. Raises PaseError if nothing has made
        it."""
        name, want = access.tensor, self.dims(node, access)
        if (array := self.known.get(name)) is not None:
            key = (f"known {name}", want)
            if key not in self._reshaped:
                self._reshaped[key] = self.constant(array, want, self.names.graph.tensors[name].dtype)
            return self._reshaped[key]
        if name not in self.values:
            raise PaseError(
                f"it reads a value that the Mesh-TensorFlow program does not have ({name})", where=node.name
            )
        return self.to(self.values[name], want)

    def constant(self, array: np.ndarray, want: TensorDims | None, dtype: str) -> MeshTfValue:
        """A known array as a tensor in these dims, by default in new unsplit dims."""
        if want is None:
            want = tuple((self.names.fresh(s),) if s > 1 else () for s in array.shape)
        dims = flat(want)
        shape = [d.size for d in dims]
        if not dims or (array == array.reshape(-1)[0]).all():
            value = number(array.reshape(-1)[0].item())
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

    def viewed(self, x: MeshTfValue, dims: TensorDims) -> MeshTfValue:
        """Translate a reshape, transpose or broadcast. Usually the dims stay the same, and are only grouped anew."""
        have, want = set(flat(x.dims)), set(flat(dims))
        if have == want:
            return replace(x, dims=dims)
        if have < want:
            return self.let(f"mtf.broadcast({x.code}, {self.shape(flat(dims))})", flat(dims), dims, x.dtype)
        return self.regrouped(x, dims)

    def keep(self, node: Node, write: Access, value: MeshTfValue) -> None:
        """Set the value of a tensor from here on, in the plan's dims. Each iteration of a loop sets it again."""
        self.values[write.tensor] = self.to(value, self.dims(node, write))

    def heading(self, node: Node) -> None:
        """Write a comment if another node of the plan begins."""
        if node.name == self._node:
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


def number(x: object) -> str:
    """A number as code."""
    if isinstance(x, float) and not np.isfinite(x):
        return f'float("{x}")'
    return repr(x)
