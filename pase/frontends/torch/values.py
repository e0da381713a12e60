"""What a rule sees of one call of an ATen op (``TorchCall``), and what a list of nodes was lowered to (``TorchScope``).

Operands go by the names in the op's own schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from pase.errors import PaseError
from pase.frontends.common.values import Site, Value
from pase.frontends.torch.types import FxNode
from pase.ir import Tensor, functions
from pase.ir.functions import Function
from pase.ir.literals import Number
from pase.ops import GraphBuilder, nests
from pase.pytree import Tree

if TYPE_CHECKING:
    import torch
    from torch import SymInt
    from torch._ops import OpOverload
    from torch.fx import GraphModule

    from pase.frontends.torch.lower import TorchLowering

__all__ = [
    "TorchCall",
    "TorchOperand",
    "TorchScope",
    "TorchSpec",
    "arguments",
    "dtype_of",
    "known_size",
    "one_kernel",
    "op_name",
    "reads_contents",
    "shared_heads",
    "specs_of",
]

TorchSpec = tuple[tuple[int, ...], str]
"""Shape and dtype."""
TorchOperand: TypeAlias = Any
"""What a call passes for an argument of its op: a value or a tensor, a number, a string, None, or a list of these."""


def dtype_of(dtype: torch.dtype | str) -> str:
    """``torch.float32`` -> float32."""
    return str(dtype).removeprefix("torch.")


def specs_of(val: Tree, place: str) -> list[TorchSpec | None]:
    """Shape and dtype of each result of a node; None for a result that is no tensor.

    val: the fake tensors of the results. place: names the op in messages. Raises PaseError if a size depends on data.
    """
    import torch

    out: list[TorchSpec | None] = []
    for t in val if isinstance(val, (tuple, list)) else (val,):
        if not isinstance(t, torch.Tensor):
            out.append(None)
            continue
        sizes = [known_size(s) for s in t.shape]
        known = [n for n in sizes if n is not None]
        if len(known) < len(sizes):
            raise PaseError(
                f"the size of its result, {[str(s) for s in t.shape]}, depends on the data",
                where=place,
                fix="give it a fixed capacity, keep all elements and mask them (torch.where), or count by "
                "torch.nn.functional.one_hot(x, n).sum(0) instead of bincount",
            )
        out.append((tuple(known), dtype_of(t.dtype)))
    return out


def known_size(s: int | SymInt) -> int | None:
    """A size as a number, also if only its readers determine it: ``torch.bincount(x, minlength=n)`` times n numbers."""
    return s if isinstance(s, int) else s.node.maybe_as_int()


def arguments(
    target: OpOverload, args: Sequence[TorchOperand], kwargs: Mapping[str, TorchOperand]
) -> dict[str, TorchOperand]:
    """Argument of the op's schema -> what a call passes for it, or its default."""
    out: dict[str, TorchOperand] = {}
    for i, a in enumerate(target._schema.arguments):
        if not a.kwarg_only and i < len(args):
            out[a.name] = args[i]
        elif a.name in kwargs:
            out[a.name] = kwargs[a.name]
        else:
            out[a.name] = a.default_value
    return out


def op_name(n: FxNode) -> str:
    """The name of a call's op, with its library unless that is aten; for a higher-order op, its target's name."""
    schema = getattr(n.target, "_schema", None)
    return str(n.target) if schema is None else str(schema.name).removeprefix("aten::")


_LIKE_ANOTHER = frozenset({"expand_as", "reshape_as", "type_as", "view_as"})
"""Ops that give their first operand the shape or the dtype of their second one."""


def reads_contents(n: FxNode, operand: FxNode) -> bool:
    """Whether an op reads an operand's contents, and not only its shape and dtype."""
    name = op_name(n)
    if name in _LIKE_ANOTHER:
        return operand is n.args[0]
    return not name.endswith("_like") and not name.startswith("new_")


def shared_heads(v: Value) -> Value | None:
    """The heads [batch, groups, positions, width] of which v, [batch, heads, positions, width], repeats each for the
    query heads that share it; None if v is something else.

    Libraries write these copies out, but attention reads the heads as they are (``enable_gqa``).
    """
    match v.note:
        case ("view", Value(note=("repeated", Value() as heads))):
            batch, groups, *rest = heads.shape
            same = v.shape == (batch, v.elements // (heads.elements // groups), *rest)
            return heads if same else None
    return None


_CALLS_ONE = frozenset(
    ("batch_norm", "dropout", "group_norm", "layer_norm", "linear", "log_softmax", "rms_norm", "softmax")
)
"""Ops that PyTorch writes as a call of another one, which has a kernel."""


def one_kernel(n: FxNode) -> str:
    """The name of a call's op if PyTorch runs it as one kernel, which it does unless it has written it in other ops; ""
    if not."""
    import torch

    schema, name = getattr(n.target, "_schema", None), op_name(n)
    if schema is None:
        return ""
    full = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    written = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
    return "" if written and name not in _CALLS_ONE else name


@dataclass
class TorchCall(Site):
    """One call of an op.

    given: operands (values, numbers, lists of them) by the names of the op's schema. outs: shape and dtype of each
    result, as PyTorch found them; None for a result that is no tensor.
    """

    low: TorchLowering
    op: str
    given: dict[str, TorchOperand]
    outs: list[TorchSpec | None]
    place: str = field(default="")

    @property
    def b(self) -> GraphBuilder:
        return self.low.b

    # Operands.

    def x(self, name: str = "self") -> Value:
        """The operand, which must be a tensor."""
        v = self.given.get(name)
        if not isinstance(v, Value):
            raise self.fail(f"operand '{name}' is {v!r}, but must be a tensor")
        return v

    def opt(self, name: str) -> Value | None:
        """The operand if it is a tensor, else None."""
        v = self.given.get(name)
        return v if isinstance(v, Value) else None

    def arg(self, name: str, default: Any = None) -> Any:
        """An operand that is no tensor; the default if it is not given."""
        v = self.given.get(name)
        return default if v is None else v

    @property
    def values(self) -> list[Value]:
        """All tensor operands in the schema's order, including those in lists."""
        out: list[Value] = []
        for v in self.given.values():
            out += [x for x in (v if isinstance(v, (list, tuple)) else (v,)) if isinstance(x, Value)]
        return out

    @property
    def operands(self) -> list[Value | Number]:
        """The op's tensors and numbers in the schema's order."""
        return [v for v in self.given.values() if isinstance(v, (Value, bool, int, float, complex))]

    def ints(self, name: str, n: int, default: Sequence[int] = ()) -> list[int]:
        """An operand as a list of n integers. A single integer applies to all n."""
        v = self.arg(name)
        found = [v] if isinstance(v, int) else list(v or default)
        return found * n if len(found) == 1 else found

    def dims(self, name: str, rank: int) -> list[int]:
        """An operand as dims of a tensor of this rank. All dims if none are given."""
        v = self.arg(name)
        found = [v] if isinstance(v, int) else list(v or ())
        return self.axes(found, rank) if found and rank else list(range(rank))

    # Results.

    def out(self, i: int = 0) -> TorchSpec:
        spec = self.outs[i]
        if spec is None:
            raise self.fail(f"result {i} is not a tensor")
        return spec

    @property
    def shape_out(self) -> tuple[int, ...]:
        return self.out()[0]

    def filled(self, shape: Sequence[int], dtype: str, number: Number | None = None) -> Value:
        """A tensor with the same number everywhere; None: it is not known. It becomes part of the op that reads it."""
        if not self.low.folds:
            make = partial(self._made, tuple(shape), dtype, number)
            return self.later(shape, dtype, make)
        return Value(shape=tuple(shape), dtype=dtype, foldable=True, note=("filled",), number=number)

    def _made(self, shape: tuple[int, ...], dtype: str, number: Number | None) -> Tensor:
        if number is not None:
            return self.b.constant(shape, dtype, number)
        return nests.generate(self.b, functions.OPAQUE, shape, dtype, name=self.op)

    def transpose(self, v: Value, order: Sequence[int]) -> Value:
        """The value with its dims in another order.

        In PyTorch this only changes strides, so the transpose is made when something reads its data. Two transposes in
        a row become one.
        """
        base, whole = v, list(order)
        if v.note[:1] == ("transposed",):
            _, base, before = v.note
            whole = [before[i] for i in order]
        if whole == list(range(len(whole))):
            return base
        shape = [base.shape[i] for i in whole]
        make = partial(self._transposed, base, whole)
        return self.later(shape, base.dtype, make, ("transposed", base, whole))

    def _transposed(self, base: Value, order: Sequence[int]) -> Tensor:
        return nests.transpose(self.b, self.tensor(base), order)

    def pointwise(
        self,
        function: Function,
        operands: Sequence[Value | Number | None] | None = None,
        *,
        flops: float | None = None,
        name: str = "",
    ) -> Value:
        """The op's result, computed elementwise from its operands. Operands that are numbers become part of the op.

        operands: the function's operands (``nests.elementwise``); by default, the tensors and numbers that the op is
            given. flops: per element; the function's own by default. name: of the op, if not the function's.
        """
        shape, dtype = self.out()
        operands = self.operands if operands is None else operands
        if math.prod(shape) == 0 or not any(isinstance(v, Value) and v.note != ("filled",) for v in operands):
            return self.filled(shape, dtype)
        given = [
            (v.scalar if v.note == ("filled",) else self.tensor(v)) if isinstance(v, Value) else v
            for v in operands
        ]
        made = nests.elementwise(self.b, function, given, [dtype], name=name, flops=flops, shape=shape)
        return self.value(made[0])


@dataclass(frozen=True, kw_only=True)
class TorchScope:
    """A lowered list of nodes: those of the exported graph, of a decomposed op, or of the body of a loop or a branch.

    nodes: the place of a node is the place of the enclosing op, if any, followed by the node's index here.
    values: node -> what it was lowered to.
    leaves: for a decomposed op or a branch, placeholder -> the outer node that it stands for.
    inner: place of an op -> its decomposition or its body. For branches, the key is the op's place and the branch's
        number.
    module: holds the constants.
    names: the placeholders of a body.
    results: the nodes that a body or a decomposition returns.
    """

    nodes: Sequence[FxNode]
    values: dict[FxNode, Value | list[Value | None]]
    leaves: dict[FxNode, FxNode] = field(default_factory=dict)
    inner: dict[str, TorchScope] = field(default_factory=dict)
    module: GraphModule | None = None
    names: Sequence[FxNode] = ()
    results: Sequence[FxNode] = ()

    def every(self, prefix: str = "") -> Iterator[tuple[FxNode, str]]:
        """All nodes with their places, including those of decompositions and bodies."""
        for i, n in enumerate(self.nodes):
            yield n, f"{prefix}{i}"
        for path, inner in self.inner.items():
            yield from inner.every(f"{path}.")

    def scopes(self) -> Iterator[TorchScope]:
        """This scope and all scopes nested in it."""
        yield self
        yield from (inner for _, inner in self.placed())

    def placed(self) -> Iterator[tuple[str, TorchScope]]:
        """All scopes nested in this one, each with the place of its op."""
        for path, inner in self.inner.items():
            yield path, inner
            yield from inner.placed()
