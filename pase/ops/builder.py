"""A graph under construction. Every frontend adds its loop nests through ``GraphBuilder.nest``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from pase.errors import PaseError
from pase.ir import (
    Access,
    AccessMap,
    Dim,
    DimKind,
    Graph,
    IterationSpace,
    Node,
    Op,
    OpKind,
    Place,
    Remark,
    RemarkKind,
    Role,
    Scope,
    ScopeKind,
    Size,
    SourceLine,
    Tensor,
)
from pase.ir.facts import GraphFacts
from pase.ir.functions import BY_KIND, CARRY, Function
from pase.ir.literals import Literals, Number
from pase.ir.parameters import Parameters
from pase.ir.places import NO_PLACE, NOWHERE
from pase.ir.sizes import is_one
from pase.ir.types import FactorPrecision, is_floating
from pase.ir.verify import wrong_operands

__all__ = ["Computes", "Dims", "GraphBuilder", "Read", "Write", "parallel_dims", "plain_map"]

Dims = dict[str, tuple[Size, DimKind]]
"""Iteration dims by name, each with its size and kind."""

_MAX_NODES = 2_000_000


@dataclass(frozen=True)
class Read:
    """A tensor that is read through a map. For sparse and gradient, see ``pase.ir.Access``."""

    tensor: Tensor
    map: AccessMap
    sparse: bool = False
    gradient: bool = False


@dataclass(frozen=True)
class Write:
    """A new tensor of this shape and dtype that is written through a map."""

    shape: tuple[Size, ...]
    dtype: str
    map: AccessMap
    differentiable: bool = True
    sparse: bool = False


@dataclass(frozen=True, kw_only=True)
class Computes:
    """What each point of a nest computes.

    function: None means the function of the nest's kind.
    literals: the function's operands that are numbers (``pase.ir.literals``).
    parameters: what the nest computes beyond its maps (``pase.ir.parameters``).
    differentiable: whether gradients pass, if they pass through the function.
    """

    function: Function | None = None
    literals: Literals = ()
    parameters: Parameters | None = None
    differentiable: bool = True


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The loops and branches around a nest, as ``pase.ir.Op`` has them."""

    scope: tuple[Scope, ...] = ()
    times: Size = 1
    chance: float = 1.0
    remat: bool = False
    backward: bool = False


@dataclass(frozen=True)
class Standing:
    """A position at which nests are added."""

    source: SourceLine
    eqn: Place
    frozen: bool
    around: Surroundings


@dataclass
class GraphBuilder:
    """A graph under construction, and the position (loop, branch, source line) at which the next nests are added."""

    name: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    source: SourceLine = NOWHERE
    """The source line of the next nests."""
    eqn: Place = NO_PLACE
    """The place in the traced program of the next nests."""
    saved: bool = False
    """Whether the next nests' results are kept although the region around them is rematerialised."""
    remarks: list[Remark] = field(default_factory=list)
    """What the cost assumes or leaves out, for readers of the plan."""
    frozen: bool = False
    """Whether the next nests have no gradient, because they are in a while loop or in a program that is not trained."""
    contents: dict[str, object] = field(default_factory=dict)
    """Constant -> its number or array, as far as they are known (``pase.ir.two_batches.FullGraph``)."""
    attributes: dict[Place, list[object]] = field(default_factory=dict)
    """Place -> what the program says about the ops there, for ops that the graph does not determine."""
    precision: Mapping[OpKind, FactorPrecision] = field(default_factory=dict)
    """The precision of the next products of float32, by kind; none if the program states none."""
    lying: set[str] = field(default_factory=set)
    """Tensors that are parts of other tensors and are read in place."""
    _undetermined: bool = False
    _around: Surroundings = Surroundings()
    _count: int = 0

    @contextmanager
    def region(
        self, kind: ScopeKind, path: str, *, times: Size = 1, remat: bool = False, chance: float = 1.0
    ) -> Iterator[None]:
        """A context for a loop body, a rematerialised region, or a branch of a conditional.

        path: the prefix of the paths of the equations inside.
        times: the trip count of the loop.
        chance: the probability that the branch is taken.
        """
        a = self._around
        inside = replace(
            a,
            scope=(*a.scope, Scope(kind, path)),
            times=a.times * times,
            chance=a.chance * chance,
            remat=a.remat or remat,
        )
        with self._surrounded(inside):
            yield

    @contextmanager
    def _surrounded(self, by: Surroundings) -> Iterator[None]:
        before, self._around = self._around, by
        try:
            yield
        finally:
            self._around = before

    def here(self) -> Standing:
        """The position at which the next nests would be added."""
        return Standing(self.source, self.eqn, self.frozen, self._around)

    @contextmanager
    def standing(self, at: Standing) -> Iterator[None]:
        """A context that adds nests at a position that ``here`` returned earlier. A value that is made only when it is
        first read, perhaps inside a loop or a branch, belongs where it was defined."""
        before = self.here()
        self.source, self.eqn, self.frozen = at.source, at.eqn, at.frozen
        try:
            with self._surrounded(at.around):
                yield
        finally:
            self.source, self.eqn, self.frozen = before.source, before.eqn, before.frozen

    def weigh(self, first: int, scope: Scope, chance: float) -> None:
        """Sets the probability of a branch after it was lowered. first: the number of nodes before the branch."""
        for at in range(first, len(self.nodes)):
            node = self.nodes[at]
            if any(scope in op.scope for op in node.ops):
                ops = (replace(op, chance=op.chance * chance) if scope in op.scope else op for op in node.ops)
                self.nodes[at] = replace(node, ops=tuple(ops))

    @property
    def line(self) -> str:
        """The source line as remarks say it, which lie in layouts, and so tell nothing of their maker's folders."""
        return str(self.source.from_root()) or "an unknown line"

    def remark(self, kind: RemarkKind, what: str) -> None:
        """Adds a remark about the op that is being lowered."""
        self.remarks.append(Remark(kind, what, str(self.source.from_root())))

    def remark_unknown(self, name: str) -> None:
        """Notes that there is no rule for the op that is being lowered, which the user allowed."""
        self.remark(
            "unknown",
            f"there is no rule for '{name}': it is not split, and only its memory traffic is priced",
        )

    @contextmanager
    def called(self, kernel: str) -> Iterator[None]:
        """A context in which added nests run as one kernel of this name (``SourceLine.call``)."""
        before, self.source = self.source, replace(self.source, call=kernel)
        try:
            yield
        finally:
            self.source = before

    @contextmanager
    def without_gradient(self) -> Iterator[None]:
        """A context in which added nests have no gradient."""
        before, self.frozen = self.frozen, True
        try:
            yield
        finally:
            self.frozen = before

    @contextmanager
    def undetermined(self, unless: bool = False) -> Iterator[None]:
        """A context in which the graph gives the cost of added nests, but does not determine what they compute.

        unless: the context has no effect.
        """
        before, self._undetermined = self._undetermined, self._undetermined or not unless
        try:
            yield
        finally:
            self._undetermined = before

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """A context in which added nests run once during backward, in the loops and branches of the forward here."""
        with self._surrounded(replace(self._around, backward=True, remat=False)):
            yield

    def parameter(self, path: str, shape: Sequence[Size], dtype: str) -> Tensor:
        """Adds a parameter: a node whose config is the layout in which the parameter is stored."""
        return self._leaf("parameter", path, shape, dtype, needs_grad=is_floating(dtype) and not self.frozen)

    def input(self, path: str, shape: Sequence[Size], dtype: str) -> Tensor:
        """Adds a batch input. It may arrive in any layout."""
        return self._leaf("input", path, shape, dtype)

    def constant(
        self, shape: Sequence[Size], dtype: str, number: Number | None = None, contents: object = None
    ) -> Tensor:
        """Adds a value that is known without data (a mask, a table). Every device has all of it.

        number: what all of its elements are, if they are the same. contents: its number, its array, or a name of what
            is stored elsewhere, if they are known. They are not part of the graph.
        """
        t = self._leaf("constant", f"const{self._count}", shape, dtype)
        if contents is not None:
            self.contents[t.name] = contents
        if number is not None:
            t = self.tensors[t.name] = replace(t, number=number)
        return t

    def tell(self, attributes: object) -> None:
        """Notes what the program says about the op that is being lowered. It is not part of the graph."""
        if not self._around.backward:
            self.attributes.setdefault(self.eqn, []).append(attributes)

    def output(self, tensor: Tensor) -> None:
        """Marks a result of the model. Every device gets the whole of a scalar; other results keep their layout."""
        read = Read(tensor, plain_map(tensor.shape))
        self.nest("output", "output", [read], [], parallel_dims(tensor.shape), flops=0)

    def nest(
        self,
        name: str,
        kind: OpKind,
        reads: Sequence[Read],
        writes: Sequence[Write],
        dims: Mapping[str, tuple[Size, DimKind]],
        computes: Computes | None = None,
        *,
        flops: float | None = None,
        over: Sequence[str] | None = None,
    ) -> tuple[Tensor, ...]:
        """Adds one loop nest over ``dims`` and returns the tensors that it writes.

        name: the framework's name of the op.
        computes: what each point computes; None means the function of the kind, of tensors only.
        flops: FLOPs per point of ``over`` (all dims if None), if they differ from the function's. A multiply-add counts
            as two.
        """
        computes = computes or Computes()
        function, literals = computes.function or BY_KIND[kind], computes.literals
        differentiable = computes.differentiable and function.differentiable
        if len(self.nodes) >= _MAX_NODES:
            raise PaseError(
                f"it has more than {_MAX_NODES} ops",
                where=f"graph '{self.name}'",
                fix="roll its loops with scan",
            )
        if what := wrong_operands(function, literals, len(reads), kind == "elementwise"):
            raise PaseError(
                what,
                where=f"op '{name}' at {self.source}",
                fix="list its numbers among the operands, and None for an operand that is not known",
            )
        differentiable = differentiable and not self.frozen
        grad = differentiable and any(r.tensor.needs_grad for r in reads)
        out = tuple(
            self._tensor(
                w.shape, w.dtype, "activation", needs_grad=grad and w.differentiable and is_floating(w.dtype)
            )
            for w in writes
        )
        node_name = f"{name}.{self._count}"
        if (
            not out and self.nodes and self.nodes[-1].name.startswith(node_name)
        ):  # nests without results do not advance the counter
            node_name = f"{node_name}.{len(self.nodes)}"
        op = Op(
            name=name,
            kind=kind,
            function=function,
            reads=tuple(Access(r.tensor.name, r.map, r.sparse, gradient=r.gradient) for r in reads),
            writes=tuple(Access(t.name, w.map, w.sparse) for t, w in zip(out, writes, strict=True)),
            flops_per_point=function.flops if flops is None else flops,
            over=None if over is None else tuple(over),
            differentiable=differentiable,
            source=self.source,
            eqn=self.eqn,
            scope=self._around.scope,
            times=self._around.times,
            chance=self._around.chance,
            remat=self._around.remat and not self.saved,
            backward=self._around.backward,
            literals=None if self._undetermined else literals,
            parameters=computes.parameters,
            precision=self.precision.get(kind),
        )
        space = IterationSpace(tuple(Dim(name=n, size=s, kind=k) for n, (s, k) in dims.items()))
        self.nodes.append(Node(name=node_name, space=space, ops=(op,)))
        return out

    def carry(self, init: Tensor, eqn: Place) -> Tensor:
        """Adds a loop's carry before the loop's body. It is one node, so the value enters and leaves in one layout."""
        self.eqn = eqn
        dims, m = parallel_dims(init.shape), plain_map(init.shape)
        (t,) = self.nest("carry", "carry", [Read(init, m)], [Write(init.shape, init.dtype, m)], dims, flops=0)
        if (
            is_floating(t.dtype) and not self.frozen
        ):  # the body may give it a gradient even if the initial value has none
            t = self.tensors[t.name] = replace(t, needs_grad=True)
        return t

    def thread(self, leaf: Tensor, value: Tensor) -> None:
        """Sets the next value of a parameter or an input. The value is resharded to the layout that the leaf has."""
        with self.without_gradient():
            if leaf.name != value.name:
                self.close_carry(leaf, value)

    def close_carry(self, carried: Tensor, value: Tensor) -> None:
        """Feeds the body's result back into the carry. Must be called inside the loop's region."""
        at = next(i for i in reversed(range(len(self.nodes))) if carried.name in self.nodes[i].internal)
        node = self.nodes[at]
        back = Op(
            name="carry",
            kind="carry",
            function=CARRY,
            reads=(Access(value.name, plain_map(value.shape)),),
            writes=(),
            flops_per_point=0,
            source=node.ops[0].source,
            eqn=node.ops[0].eqn,
            scope=self._around.scope,
            times=self._around.times,
            chance=self._around.chance,
            remat=self._around.remat,
            differentiable=not self.frozen,
        )
        self.nodes[at] = replace(node, ops=(*node.ops, back))

    def settle_gradients(self) -> None:
        """Removes the gradient of each value that depends on no parameter. Must be called after the last loop.

        A loop's carry was given one before its body was known. Without this, the gradient of a counter in floating
        point would be listed and priced in each iteration, and never sent."""
        if not any(n.ops[0].kind == "carry" for n in self.nodes):
            return
        readers: dict[str, list[tuple[str, ...]]] = {}
        reached: list[str] = []
        for n in self.nodes:
            for op in n.ops:
                written = op.writes or (n.ops[0].writes if op.kind == "carry" else ())
                made = tuple(a.tensor for a in written if self.tensors[a.tensor].needs_grad)
                if op.kind in ("parameter", "cotangent"):
                    reached += made
                for a in op.reads:
                    if a.gradient:
                        reached.append(a.tensor)
                    elif op.differentiable:
                        readers.setdefault(a.tensor, []).append(made)
        needed = set(reached)
        while reached:
            for made in readers.get(reached.pop(), ()):
                reached += [t for t in made if t not in needed]
                needed.update(made)
        for name, t in self.tensors.items():
            if t.needs_grad and name not in needed:
                self.tensors[name] = replace(t, needs_grad=False)

    def finish(
        self,
        outputs: Sequence[Tensor] = (),
        *,
        frontend: str = "",
        dims: Mapping[str, int] | None = None,
        eager: bool = False,
    ) -> Graph:
        """Returns the finished graph. frontend: the framework that the model comes from. dims: the sizes that the user
        gave to its symbolic dims. eager: see ``GraphFacts``.

        Raises PaseError if a parameter and an input have one path."""
        self.settle_gradients()
        stored, given = (
            {t.path for t in self.tensors.values() if t.role == role} for role in ("parameter", "input")
        )
        if both := stored & given:
            raise PaseError(
                f"a parameter and an input are both called '{min(both)}'",
                where=self.name,
                fix="give one of them another name",
            )
        return Graph(
            name=self.name,
            tensors=dict(self.tensors),
            nodes=tuple(self.nodes),
            outputs=tuple(t.name for t in outputs),
            facts=GraphFacts(frontend=frontend, dims=dims or {}, eager=eager),
            remarks=tuple(dict.fromkeys(self.remarks)),
        )

    def _tensor(
        self, shape: Sequence[Size], dtype: str, role: Role, *, path: str = "", needs_grad: bool = False
    ) -> Tensor:
        self._count += 1
        t = Tensor(
            name=f"t{self._count}",
            shape=tuple(shape),
            dtype=dtype,
            role=role,
            path=path,
            needs_grad=needs_grad,
        )
        self.tensors[t.name] = t
        return t

    def _leaf(
        self,
        role: Literal["parameter", "input", "constant"],
        path: str,
        shape: Sequence[Size],
        dtype: str,
        needs_grad: bool = False,
    ) -> Tensor:
        t = self._tensor(shape, dtype, role, path=path, needs_grad=needs_grad)
        kind: DimKind = "replicated" if role == "constant" else "parallel"
        op = Op(
            name=role,
            kind=role,
            function=BY_KIND[role],
            reads=(),
            writes=(Access(t.name, plain_map(shape)),),
            flops_per_point=0,
            eqn=Place(path),
        )
        space = IterationSpace(
            tuple(Dim(name=n, size=s, kind=kind) for n, (s, _) in parallel_dims(shape).items())
        )
        self.nodes.append(Node(name=f"{role}.{self._count}", space=space, ops=(op,)))
        return t


def parallel_dims(shape: Sequence[Size]) -> Dims:
    """A dim di for each tensor dim i with more than one element."""
    return {f"d{i}": (s, "parallel") for i, s in enumerate(shape) if not is_one(s)}


def plain_map(shape: Sequence[Size]) -> AccessMap:
    """The map in which dim di walks tensor dim i. A tensor dim with one element is walked by no dim."""
    return AccessMap.of(*[() if is_one(s) else (f"d{i}",) for i, s in enumerate(shape)])
