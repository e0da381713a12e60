"""The types of the IR: iteration spaces, ops, nodes, tensors, edges and the graph.

A node is a loop nest: named iteration dims, and ops that read and write tensors through access maps over these dims.
The compiler derives everything else (work, collectives, layouts) from the maps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from pase.errors import PaseError
from pase.ir.facts import GraphFacts, facts_text
from pase.ir.fixed import FixedLayout
from pase.ir.functions import Function
from pase.ir.literals import Literals, Number
from pase.ir.maps import AccessMap
from pase.ir.parameters import Parameters
from pase.ir.places import NO_PLACE, NOWHERE, Place, Scope, SourceLine
from pase.ir.remarks import Remark
from pase.ir.sizes import Size, bind_size, free_symbols, product

__all__ = [
    "LEAF",
    "PRODUCTS",
    "WORKLESS",
    "Access",
    "Dim",
    "DimKind",
    "Edge",
    "FactorPrecision",
    "Graph",
    "IterationSpace",
    "Node",
    "Op",
    "OpKind",
    "Role",
    "Tensor",
    "shared_edge",
]

DimKind = Literal["parallel", "reduction", "window", "replicated", "pending", "state", "ring"]
"""parallel: may be split. reduction: may be split, which leaves partial sums. window: a filter's extent, never split.
replicated: may not be split. pending (copy nodes only): mesh axes over which gradients arrive as partial sums.
state (parameter nodes only): mesh axes that split the gradient and the optimizer's state, but not the parameter.
ring (attention only): mesh axes that split the positions of both queries and keys; keys are sent around the ring. A
ring dim has size one, and the walks over positions begin with it."""

Role = Literal["parameter", "input", "activation", "constant"]

FactorPrecision = Literal["high", "highest"]
"""highest: all bits of the factors count. high: those of TF32, or of three passes of bfloat16."""

OpKind = Literal[
    "matmul",
    "conv",
    "attention",
    "gather",
    "scatter",
    "window",
    "elementwise",
    "reduce",
    "view",
    "generate",
    "sequential",
    "opaque",
    "parameter",
    "input",
    "constant",
    "copy",
    "carry",
    "cotangent",
    "gradient",
    "output",
]

WORKLESS: frozenset[OpKind] = frozenset(
    ("input", "constant", "copy", "carry", "cotangent", "gradient", "output")
)
"""Kinds of ops that compute nothing. They represent a layout, and only resharding into it costs something."""

PRODUCTS: frozenset[OpKind] = frozenset(("matmul", "conv", "attention"))
"""Kinds of ops that multiply matrices, which take most of a step."""

LEAF: frozenset[OpKind] = frozenset(("parameter", "input", "constant"))
"""Kinds of ops that read nothing: what the model gets from outside."""


@dataclass(frozen=True, kw_only=True)
class Dim:
    """One named iteration dim of a node."""

    name: str
    size: Size
    kind: DimKind = "parallel"


@dataclass(frozen=True)
class IterationSpace:
    """Named iteration dims.

    >>> s = IterationSpace((Dim(name="b", size=8), Dim(name="k", size=4, kind="reduction")))
    >>> s.points, s["k"].kind
    (32, 'reduction')
    """

    dims: tuple[Dim, ...]

    def __getitem__(self, name: str) -> Dim:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Dim]:
        return iter(self.dims)

    @cached_property
    def _by_name(self) -> dict[str, Dim]:
        return {d.name: d for d in self.dims}

    @property
    def points(self) -> Size:
        return product(d.size for d in self.dims)


@dataclass(frozen=True)
class Access:
    """A tensor that is read or written through a map.

    sparse: the op touches only as many elements as it has points (an embedding lookup, one layer's slice of a stack),
        not the whole tensor.
    recompute: backward needs the value and it is gathered a second time, because the read is inside a rematerialised
        region, or because no parameter stays gathered (``pase.ir.recompute.gathering_again``).
    gradient: for a read of an op of kind "gradient": nothing is read; the tensor's gradient is handed back here.
    """

    tensor: str
    map: AccessMap
    sparse: bool = False
    recompute: bool = False
    gradient: bool = False


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation of a node's loop nest.

    name: the framework's name, for people to read.
    function: what the op computes; its cost, gradient and memory follow from this.
    literals: the function's operands: the numbers among them, and None for each that is read, in order; () if all are
        read; None if the graph does not determine them. Only the ops of kind "elementwise" have literals.
    parameters: what the op computes beyond its function, literals and maps (``pase.ir.parameters``).
    flops_per_point: FLOPs (a multiply-add counts as two) per point of the dims in ``over``.
    over: the dims whose points count as work; None means all dims of the maps.
    eqn: where the frontend found the op, so that a backend can find it again; for a leaf, its name in the model.
    scope: the loops, branches and rematerialised regions that enclose the op, outermost first.
    times: how often the op runs per step (the product of the trip counts of its scope).
    chance: the probability that the conditional branches around it are taken. It weights time, but not memory.
    remat: the op's forward runs again during backward.
    product_dtype: for a product, the dtype to which its operands and its result's gradient are cast; None: no cast.
    precision: for a product of float32, how many bits of its factors count, in the words of JAX and PyTorch; None means
        as few as the device likes: TF32 on NVIDIA GPUs, one pass of bfloat16 on TPUs.
    backward: the op runs during backward, as part of a derivative rule that the user wrote. What it reads of forward is
        kept for it. An op of kind "cotangent" passes a value on and gives the rule the value's gradient in the same
        layout. An op of kind "gradient" hands back the gradient that the rule computed for an operand.
    """

    name: str
    kind: OpKind
    function: Function
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    flops_per_point: float = 1.0
    over: tuple[str, ...] | None = None
    differentiable: bool = True
    source: SourceLine = NOWHERE
    eqn: Place = NO_PLACE
    scope: tuple[Scope, ...] = ()
    times: Size = 1
    chance: float = 1.0
    remat: bool = False
    backward: bool = False
    product_dtype: str | None = None
    precision: FactorPrecision | None = None
    literals: Literals = ()
    parameters: Parameters | None = None

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """Every iteration dim that the op uses, in order of appearance."""
        maps = (a.map.dims for a in (*self.reads, *self.writes))
        return tuple(dict.fromkeys(itertools.chain(*maps, self.over or ())))

    @property
    def worked(self) -> tuple[str, ...]:
        """The dims whose points count as the op's work. The node that contains it may have more."""
        return self.dims if self.over is None else self.over

    @property
    def numbers(self) -> Literals:
        """One entry per operand of the function: the number, or None for the op's next read. None if the graph does not
        determine the operands."""
        return self.literals if self.literals != () else (None,) * len(self.reads)

    @property
    def factors(self) -> tuple[Access, ...]:
        """The operands that a product multiplies. A matmul's third read holds the ends of its groups of rows."""
        return self.reads[:2] if self.kind == "matmul" else self.reads

    @cached_property
    def region(self) -> tuple[Scope, ...] | None:
        """The scope up to and including the innermost rematerialised region around the op, or None."""
        inner = next((i for i in reversed(range(len(self.scope))) if self.scope[i].kind == "remat"), None)
        return None if inner is None else self.scope[: inner + 1]

    @property
    def loops(self) -> tuple[Scope, ...]:
        """The loops and branches around it, outermost first."""
        return tuple(s for s in self.scope if s.kind != "remat")

    @property
    def stage(self) -> tuple[tuple[Scope, ...], bool]:
        """When the op runs: its loops and branches, and whether in backward. A node's ops share one stage."""
        return self.loops, self.backward

    @property
    def einsum(self) -> str:
        """The op's reads and writes as an einsum, such as ``b m k, k n -> b m n``."""
        return f"{', '.join(str(a.map) for a in self.reads)} -> {', '.join(str(a.map) for a in self.writes)}".strip()


@dataclass(frozen=True, kw_only=True)
class Node:
    """Ops that share one iteration space and therefore one config (how its dims are split)."""

    name: str
    space: IterationSpace
    ops: tuple[Op, ...]

    @cached_property
    def main(self) -> Op:
        """The op that characterizes the node; for example, a matmul takes precedence over an elementwise op."""
        rank: dict[OpKind, int] = {"matmul": 0, "conv": 0, "attention": 0}
        rank |= {"gather": 1, "scatter": 1, "window": 1, "sequential": 1, "opaque": 1}
        light = {"reduce": 3, "elementwise": 4, "generate": 5, "view": 6}
        return min(self.ops, key=lambda op: rank.get(op.kind, light.get(op.kind, 2)))

    @property
    def kind(self) -> OpKind:
        return self.main.kind

    @property
    def source(self) -> SourceLine:
        return self.main.source

    @property
    def times(self) -> Size:
        """How often the main op runs per step."""
        return self.main.times

    @cached_property
    def internal(self) -> frozenset[str]:
        """The tensors that the node's own ops write."""
        return frozenset(a.tensor for op in self.ops for a in op.writes)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that its ops read or write, without duplicates, in order of appearance."""
        return tuple(dict.fromkeys(a.tensor for op in self.ops for a in (*op.reads, *op.writes)))

    @cached_property
    def reads(self) -> tuple[tuple[Op, Access], ...]:
        """The reads of tensors that other nodes write."""
        return tuple((op, a) for op in self.ops for a in op.reads if a.tensor not in self.internal)

    def write_of(self, tensor: str) -> tuple[Op, Access]:
        return next((op, a) for op in self.ops for a in op.writes if a.tensor == tensor)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of the graph, with its role in the model."""

    name: str
    shape: tuple[Size, ...]
    dtype: str
    role: Role = "activation"
    path: str = ""
    """The user's name for it: a parameter's path in the pytree, or an input's argument name."""
    needs_grad: bool = False
    number: Number | None = None
    """For a constant: what every element is, if it is the same number."""
    copy_of: str = ""
    """The tensor of which this one is a copy for several readers; "" if it is not a copy."""

    @property
    def original(self) -> str:
        """The tensor of the traced graph: this one, or the tensor that it copies."""
        return self.copy_of or self.name

    @property
    def elements(self) -> Size:
        return product(self.shape)

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> Size:
        return self.elements * self.itemsize


_ITEMSIZE = {
    "bool": 1,
    "bfloat16": 2,
    "float16": 2,
    "float4_e2m1fn": 1,
    "int4": 1,
    "uint4": 1,
    "key": 8,
    "complex64": 8,
    "complex128": 16,
}


def itemsize(dtype: str) -> int:
    """Returns the bytes of one element of this dtype.

    >>> itemsize("bfloat16"), itemsize("float32"), itemsize("float8_e4m3fn")
    (2, 4, 1)
    """
    if dtype in _ITEMSIZE:
        return _ITEMSIZE[dtype]
    if dtype.startswith("float8"):
        return 1
    bits = dtype.lstrip("abcdefghijklmnopqrstuvwxyz")
    if not bits.isdecimal():
        raise PaseError(
            f"dtype '{dtype}' is not known",
            fix="use one of bool, int*, uint*, float*, bfloat16, float8_*, complex*",
        )
    return max(int(bits) // 8, 1)


def is_floating(dtype: str) -> bool:
    """Whether this is a floating-point or complex dtype, through which a gradient may flow."""
    return "float" in dtype or "complex" in dtype


@dataclass(frozen=True, kw_only=True)
class Edge:
    """``tensor`` flows from ``src`` to the read ``access`` of op ``op`` in ``dst``."""

    src: str
    dst: str
    tensor: str
    op: Op
    access: Access


def shared_edge(node: Node, op: Op, access: Access) -> object:
    """A key that is equal for the reads of a node's ops that share one edge."""
    return node.name, access.tensor, access.map, op.scope, frozenset(op.dims), access.gradient


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The graph. Its nodes are ordered so that every tensor is written before it is read, except a loop's carry."""

    name: str
    tensors: Mapping[str, Tensor]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...] = ()
    facts: GraphFacts = field(default_factory=GraphFacts)
    fixed: Mapping[str, FixedLayout] = field(default_factory=dict)
    """Parameter or input -> the layout that the user fixed. The search decides the layouts of the others."""
    remarks: tuple[Remark, ...] = ()
    """What the frontend and later passes note about the graph's cost."""

    @property
    def meta(self) -> Mapping[str, str]:
        """The facts as text, by the keys that layout files have."""
        return facts_text(self.facts)

    @cached_property
    def node(self) -> dict[str, Node]:
        return {n.name: n for n in self.nodes}

    @cached_property
    def producer(self) -> dict[str, Node]:
        """Tensor -> the node that writes it."""
        return {t: n for n in self.nodes for t in n.internal}

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Every flow of a tensor between two nodes; parallel edges are kept.

        Ops of one node that read a tensor in the same way share one edge, because the tensor and its gradient are
        resharded only once for them.
        """
        found: dict[object, Edge] = {}
        for n in self.nodes:
            for op, a in n.reads:
                if a.tensor not in self.producer:
                    continue
                key = shared_edge(n, op, a)
                old = found.get(key)
                edge = Edge(src=self.producer[a.tensor].name, dst=n.name, tensor=a.tensor, op=op, access=a)
                if old is not None and (old.op.differentiable or not op.differentiable):
                    edge = old
                again = a.recompute or (old is not None and old.access.recompute)
                found[key] = replace(edge, access=replace(edge.access, recompute=again))
        return tuple(found.values())

    @cached_property
    def readers(self) -> dict[str, frozenset[str]]:
        """Tensor -> the names of the nodes that read it."""
        out: dict[str, set[str]] = {}
        for n in self.nodes:
            for _, a in n.reads:
                out.setdefault(a.tensor, set()).add(n.name)
        return {t: frozenset(who) for t, who in out.items()}

    def read_outside(self, node: Node, tensor: str) -> bool:
        """Whether a node other than ``node`` reads this tensor."""
        return bool(self.readers.get(tensor, frozenset()) - {node.name})

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors.values() if t.role == "parameter")

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors.values() if t.role == "input")

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The names of the sizes that are still symbolic, sorted."""
        sizes = [s for t in self.tensors.values() for s in t.shape]
        sizes += [d.size for n in self.nodes for d in n.space]
        sizes += [op.times for n in self.nodes for op in n.ops]
        return tuple(sorted(free_symbols(sizes)))

    def bind(self, **values: int) -> Graph:
        """The same graph with integers in place of some symbols. It can then be priced without tracing again."""
        if unknown := set(values) - set(self.symbols):
            have = ", ".join(self.symbols) or "none"
            raise PaseError(
                f"there is no symbolic size {', '.join(sorted(unknown))}",
                where=f"graph '{self.name}'",
                fix=f"bind only its symbolic sizes: {have}",
            )

        def bound(n: Node) -> Node:
            dims = tuple(replace(d, size=bind_size(d.size, values)) for d in n.space)
            ops = tuple(replace(op, times=bind_size(op.times, values)) for op in n.ops)
            return replace(n, space=IterationSpace(dims), ops=ops)

        tensors = {
            k: replace(t, shape=tuple(bind_size(s, values) for s in t.shape)) for k, t in self.tensors.items()
        }
        return replace(self, tensors=tensors, nodes=tuple(map(bound, self.nodes)))
