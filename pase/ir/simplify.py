"""From one node per equation to about ten nodes per layer: light ops join their neighbours.

The raw graph has one node per equation, thousands of them. ``simplify`` returns the graph that is searched:

1. Values that depend on no data (masks, position tables) become constants; every layout of them is free.
2. Views and casts of a parameter join the parameter, so that an all-gather sends the cast tensor.
3. Neighbouring light ops (elementwise, views, reductions) of one level join into one node: softmax, layer norm, a
   residual addition. A level counts the heavy ops (matmul, conv, gather, loop carry) on the way to an op, so that no
   node both feeds and follows a heavy op, and no cycle can arise. What is computed of parameters alone (a normalised,
   merged or quantised weight) joins nothing else, so that it can be computed as the parameters are stored: then its
   result is gathered and its gradient reduce-scattered.
4. A joined node without reductions that feeds one matmul joins it, on the operand's side, unless the matmul would lose
   a dim to split (the halves of rotary embeddings, the parts of a fused qkv). A view of a matmul's result joins it.
5. A tensor with several readers gets a copy node, so that one all-gather serves all readers of the same layout. Casts
   and views of a parameter that is also read otherwise move there.
6. An attention gets a ring dim, which splits queries and keys at the same time.

Joining unifies iteration dims through the shared tensor. A dim is split if the other side has it split (a reshape). If
dims cannot be unified (x + xᵀ), the nodes stay apart and an edge connects them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from pase.errors import PaseError
from pase.ir.added import with_copies, with_rings, with_states
from pase.ir.dims import Conflict, DimTable
from pase.ir.functions import CAST
from pase.ir.maps import AccessMap, Walk
from pase.ir.parameters import EqualPart, Slice
from pase.ir.recompute import mark_recomputed
from pase.ir.sizes import is_one
from pase.ir.types import LEAF, Access, Dim, Graph, IterationSpace, Node, Op
from pase.ir.verify import verify_reads
from pase.once import once

__all__ = ["simplify"]

LIGHT = frozenset({"elementwise", "view", "reduce", "generate"})
PARTIAL_SUMS = frozenset({"matmul", "conv", "gather", "attention"})
"""Kinds of ops whose results may be partial sums when they leave their node."""

_MOST_KEYS = 256
_WIDE = 512  # elements of a dim that is worth a mesh axis; the dims of routers and gates are far smaller


def simplify(graph: Graph, like: Graph | None = None) -> Graph:
    """Returns the graph to search: about ten nodes per transformer layer, each with one config.

    like: a graph that differs from this one only in rematerialised regions. These do not change which nodes join, so
        the groups are computed once for all such graphs.
    Raises PaseError if a pass lost a value that is read: it would count as a constant, without a gradient.
    """
    groups = _joined(graph) if like is None else _joined_once(like)
    made = with_rings(with_states(with_copies(groups.finish(mark_recomputed(graph)))))
    try:
        return verify_reads(made)
    except PaseError as e:
        raise PaseError(
            f"the graph to search is not valid: {e.what}",
            where=e.where,
            fix="please report this fault of pase, with this message and the model",
        ) from e


def _joined(graph: Graph) -> _NodeGroups:
    """Determines which raw nodes become one node."""
    groups = _NodeGroups(graph, DimTable())
    groups.join_parameters()
    groups.find_constants()
    groups.find_narrowing()
    groups.find_weights()
    groups.join_light()
    groups.join_operands()
    groups.join_results()
    return groups


_joined_once = once(_joined)


class _NodeGroups:
    """Union-find over raw nodes, and the dims that joining them identifies.

    It is written here rather than taken from a library because joins are tried and undone, and because a group keeps
    the name of its first node.
    """

    def __init__(self, graph: Graph, table: DimTable):
        self.graph, self.table = graph, table
        self.root = list(range(len(graph.nodes)))
        self.producer = {t: i for i, n in enumerate(graph.nodes) for t in n.internal}
        self.readers: dict[str, list[int]] = defaultdict(list)
        for i, n in enumerate(graph.nodes):
            for d in n.space:
                table.add((i, d.name), d.size, d.kind)
            for op in n.ops:
                for a in op.reads:
                    self.readers[a.tensor].append(i)
        self.members: dict[int, list[int]] = {i: [i] for i in self.root}
        self.shares = {i: (i, own) for i, n in enumerate(graph.nodes) if (own := _share(n)) is not None}
        self.whole = {
            i
            for i, n in enumerate(graph.nodes)
            if n.ops[0].kind == "reduce"
            and any(
                d.kind == "replicated" and not (isinstance(d.size, int) and d.size < _WIDE) for d in n.space
            )
        }

    def find(self, i: int) -> int:
        """The raw node that represents the group of raw node i."""
        return self.root[i]

    def _walks(self, i: int, access: Access) -> list[list[tuple[int, str]]]:
        return [[(i, d) for d in w.dims] for w in access.map.walks]

    def join(self, i: int, j: int, *, free: bool = False) -> bool:
        """Joins the groups of raw nodes i and j through every tensor that passes between them. False on a conflict.

        free: a dim that may be split must not become one that may not (after a slice or a concatenation).
        """
        a, b = self.find(i), self.find(j)
        if a == b:
            return True
        pairs = []
        for src, dst in ((a, b), (b, a)):
            for p in self.members[src]:
                for w in (w for op in self.graph.nodes[p].ops for w in op.writes):
                    for q in set(self.readers[w.tensor]):
                        if self.find(q) == dst:
                            reads = (r for o in self.graph.nodes[q].ops for r in o.reads)
                            pairs += [(p, w, q, r) for r in reads if r.tensor == w.tensor]
        return self._merge([a, b], pairs, None, free)

    def add(self, i: int, groups: list[int], *, free: bool = False) -> bool:
        """Joins raw node i, which is still alone, to all of these groups that it reads, or to none of them."""
        pairs = []
        for r in self._op(i).reads:
            p = self.producer.get(r.tensor)
            if p is not None and self.find(p) in groups:
                pairs.append((p, self.graph.nodes[p].write_of(r.tensor)[1], i, r))
        return self._merge([*groups, i], pairs, i, free)

    def _merge(
        self, groups: list[int], pairs: list[tuple[int, Access, int, Access]], fresh: int | None, free: bool
    ) -> bool:
        """Unifies the walks of each (writer, write, reader, read). fresh: a raw node whose dims are not used yet."""
        with self.table.attempt() as attempt:
            try:
                for p, w, q, r in pairs:
                    if any(walk.window for walk in r.map.walks):
                        raise Conflict
                    for left, right in zip(self._walks(p, w), self._walks(q, r), strict=True):
                        self.table.unify(left, right)
                if free and attempt.restricted:
                    raise Conflict
                alone = fresh is not None and all(type(k) is tuple and k[0] == fresh for k in attempt.merged)
                for m in [fresh] if alone else [m for g in groups for m in self.members[g]]:
                    self._check(m)  # type: ignore[arg-type]
            except Conflict:
                attempt.undo()
                return False
        first, *rest = groups
        for g in rest:
            if g in self.whole:
                self.whole.add(first)
            for m in self.members[g]:
                self.root[m] = first
            self.members[first] += self.members.pop(g)
        return True

    def _check(self, i: int) -> None:
        """Raises Conflict if an access would walk one dim twice, or if a cut's shares would be divided: then a reader
        needs more than its own share, and the cut stays apart so that no more than it takes is resharded."""
        if i in self.shares and len(self.table.resolve(self.shares[i])) > 1:
            raise Conflict
        for op in self.graph.nodes[i].ops:
            for access in (*op.reads, *op.writes):
                flat = [d for w in self._walks(i, access) for x in w for d in self.table.resolve(x)]
                if len(set(flat)) != len(flat):
                    raise Conflict

    def _op(self, i: int) -> Op:
        return self.graph.nodes[i].ops[0]

    def _inputs(self, i: int) -> list[int]:
        return [self.producer[a.tensor] for a in self._op(i).reads if a.tensor in self.producer]

    def join_parameters(self) -> None:
        """Joins views and casts of a parameter to the parameter, because an all-gather sends what is used. Also joins
        views of an input to the input."""
        sizes = self.graph.tensors
        for i, n in enumerate(self.graph.nodes):
            op = n.ops[0]
            if (
                op.kind not in ("view", "elementwise")
                or op.backward
                or not op.reads
                or set(op.dims) != set(op.reads[0].map.dims)
            ):
                continue
            sources = {self.find(p) for p in self._inputs(i)}
            if len(sources) != 1 or len(op.reads) != 1:
                continue
            (root,) = sources
            if self._op(root).kind != "parameter" and (self._op(root).kind != "input" or op.kind != "view"):
                continue
            read, write = sizes[op.reads[0].tensor], sizes[op.writes[0].tensor]
            if write.itemsize <= read.itemsize and (
                op.flops_per_point == 0 or len(self.readers[read.name]) == 1
            ):
                self.join(root, i)

    def find_constants(self) -> None:
        """Marks values that depend on no data as constant. Each device makes the part that it needs, fused into the
        reader.

        Arithmetic on random keys is constant too: it works on a few integers, which are equal on every device.
        """
        self.constant: set[int] = set()
        keys: set[int] = set()
        for i, n in enumerate(self.graph.nodes):
            op = n.ops[0]
            if op.kind == "constant" or (
                op.kind in LIGHT | {"opaque", "sequential", "gather", "scatter", "window", "copy"}
                and all(p in self.constant for p in self._inputs(i))
            ):
                self.constant.add(i)
            elif self._is_key(i):
                before = self._inputs(i)
                if op.kind == "input" or all(p in keys or p in self.constant for p in before):
                    keys.add(i)
        self.constant |= {i for i in keys if self._op(i).kind != "input"}

    def _is_key(self, i: int) -> bool:
        """Whether the op makes a few unsigned integers or keys, as random.split and fold_in do."""
        op, tensors = self._op(i), self.graph.tensors
        return op.kind in LIGHT | {"opaque", "copy", "input"} and all(
            tensors[a.tensor].dtype in ("key", "uint32")
            and isinstance(n := tensors[a.tensor].elements, int)
            and n <= _MOST_KEYS
            for a in op.writes
        )

    def find_narrowing(self) -> None:
        """Finds casts of a heavy op's result to fewer bytes. They are not joined to their readers, so that the smaller
        of the two tensors is resharded. They cannot join the matmul's node, because it may write partial sums."""
        self.narrowing: set[int] = set()
        for i in range(len(self.graph.nodes)):
            op = self._op(i)
            if op.function is not CAST or len(op.reads) != 1:
                continue
            (read,), (write,) = op.reads, op.writes
            if self.graph.tensors[write.tensor].itemsize < self.graph.tensors[read.tensor].itemsize:
                before = self._inputs(i)
                while before and self._op(before[0]).kind == "view":
                    before = self._inputs(before[0])
                self.narrowing |= {i for p in before if self._op(p).kind in PARTIAL_SUMS}

    def find_weights(self) -> None:
        """Finds the ops that compute something of parameters alone, such as a weight divided by its norm.

        A view, a linear function of one value and an op on numbers go with their readers: a gradient passes these
        before it is summed, and a broadcast to the activations' shape is better made where the activations are.
        """
        self.weights: set[int] = set()
        for i in range(len(self.graph.nodes)):
            kinds = {self._op(i).kind, self._op(self.find(i)).kind}
            if not kinds & {*LEAF, "carry"} and i not in self.constant and self._of_weights(i):
                self.weights.add(i)
        while late := {i for i in self.weights if self._goes_with_readers(i) or not self._of_weights(i)}:
            self.weights -= late

    def _of_weights(self, i: int) -> bool:
        """Whether the op reads parameters, and nothing else that depends on data."""
        before = [p for p in self._inputs(i) if p not in self.constant]
        return bool(before) and all(
            p in self.weights or self._op(self.find(p)).kind == "parameter" for p in before
        )

    def _alike(self, i: int, j: int) -> bool:
        """Whether both ops or neither of them compute something of parameters alone. Only such ops may be one node."""
        return (i in self.weights) == (j in self.weights)

    def _goes_with_readers(self, i: int) -> bool:
        op = self._op(i)
        passes = op.kind == "view" or (len(op.reads) == 1 and op.function.linear)
        passes |= all(is_one(d.size) for d in self.graph.nodes[i].space)
        return passes and not all(q in self.weights for a in op.writes for q in self.readers[a.tensor])

    def join_light(self) -> None:
        """Joins neighbouring light ops of one level and one loop.

        Levels order the groups: the heavy ops of a level come before its light groups, and these come before the heavy
        ops of the next level. Nothing flows between light groups of one level, so no cycle can arise.
        """
        level: list[int] = []
        for i, n in enumerate(self.graph.nodes):
            op = n.ops[0]
            before = [p for p in self._inputs(i) if p < i and p not in self.constant and self._alike(p, i)]
            top = max((level[p] for p in before), default=0)
            if op.kind in LEAF or i in self.constant:
                level.append(0)
            elif not self._is_light(i):
                level.append(top + (op.kind not in LIGHT or i in self.narrowing))
            else:
                near = [p for p in before if self._is_light(p) and level[p] == top]
                groups = list(dict.fromkeys(self.find(p) for p in near))
                joins = all(self._op(p).stage == op.stage for p in near) and not self._independent(i, near)
                free = any(self._whole(g) for g in (*groups, i))
                level.append(top if joins and self.add(i, groups, free=free) else top + 1)
        for i in range(len(self.graph.nodes)):  # a light op with a single reader may join it at any level
            if self._is_light(i) and self.find(i) == i:
                readers = self._outside_readers(i)
                target = next(iter(readers), i)
                if (
                    len(readers) == 1
                    and self._is_light(target)
                    and self._op(target).stage == self._op(i).stage
                    and self._alike(target, i)
                    and not self._passes_numbers(i, target)
                ):
                    self.join(target, i, free=self._whole(target) or self._whole(i))
        for root in {self.find(i) for i in range(len(self.graph.nodes)) if self._is_light(i)}:
            self._unify_reads(root)

    def _independent(self, i: int, near: list[int]) -> bool:
        """Whether joining these inputs to the op would make a node of ops that share no dim.

        Such ops pass nothing but a number to each other, as the sums of a global norm do. As one node, they would have
        all combinations of their configs.
        """
        by_number, by_array = set[int](), set[int]()
        for a in self._op(i).reads:
            p = self.producer.get(a.tensor)
            if p in near:
                (by_number if self.graph.tensors[a.tensor].elements == 1 else by_array).add(self.find(p))
        apart = [g for g in by_number - by_array if self._has_dims(g)]
        return len(apart) + (bool(by_array) or self._has_dims(i)) > 1

    def _passes_numbers(self, source: int, target: int) -> bool:
        """Whether two groups that both have dims pass nothing but numbers to each other."""
        passed = {
            a.tensor
            for m in self.members[source]
            for a in self._op(m).writes
            if any(self.find(q) == target for q in self.readers[a.tensor])
        }
        numbers = all(self.graph.tensors[t].elements == 1 for t in passed)
        return numbers and self._has_dims(source) and self._has_dims(target)

    def _has_dims(self, root: int) -> bool:
        return any(not is_one(d.size) for m in self.members[root] for d in self.graph.nodes[m].space)

    def _outside_readers(self, root: int) -> set[int]:
        """The groups that read what this group writes."""
        return {
            self.find(q)
            for i in self.members[root]
            for a in self._op(i).writes
            for q in self.readers[a.tensor]
        } - {root}

    def _whole(self, i: int) -> bool:
        """Whether the group reduces a wide dim that must stay whole for it (argmax over a vocabulary).

        Joining must not impose this on other groups: the loss over the same logits may be split along that dim.
        """
        return self.find(i) in self.whole

    def _unify_reads(self, root: int) -> None:
        """Makes ops of one node that read the same outside tensor walk it in the same way, if this is possible."""
        first: dict[str, tuple[int, Access]] = {}
        for i in sorted(self.members[root]):
            for a in self._op(i).reads:
                j, b = first.setdefault(a.tensor, (i, a))
                if self.find(self.producer.get(a.tensor, i)) == root or b is a:
                    continue
                with self.table.attempt() as attempt:
                    try:
                        for left, right in zip(self._walks(j, b), self._walks(i, a), strict=True):
                            self.table.unify(left, right)
                        for m in self.members[root]:
                            self._check(m)
                    except Conflict:
                        attempt.undo()

    def _is_light(self, i: int) -> bool:
        root = self.find(i)
        stays = i in self.constant or i in self.narrowing
        return self._op(i).kind in LIGHT and not stays and self._op(root).kind not in LEAF

    def join_operands(self) -> None:
        """Joins a light node without reductions to its single heavy reader: it is computed on that operand's side."""
        roots = sorted({self.find(i) for i in range(len(self.graph.nodes)) if self._is_light(i)})
        for root in roots:
            group = self.members[root]
            if any(self._op(i).kind == "reduce" for i in group):
                continue
            outside = self._outside_readers(root)
            if len(outside) != 1:
                continue
            (target,) = outside
            reader = self._op(target)
            takes = ("matmul", "conv", "attention", "gather", "scatter", "output")
            if reader.kind in takes and reader.stage == self._op(root).stage and self._alike(target, root):
                self.join(target, root, free=True)

    def join_results(self) -> None:
        """Joins transposes and reshapes of a heavy op's result to that op, so that it writes what its readers read."""
        for i in range(len(self.graph.nodes)):
            op = self._op(i)
            if not self._is_light(i) or op.kind != "view" or len(op.reads) != 1 or self.find(i) != i:
                continue
            views = all(self._op(m).kind == "view" and len(self._op(m).reads) == 1 for m in self.members[i])
            same = all(set(a.map.dims) == set(op.dims) for a in (*op.reads, *op.writes))
            source = self.producer.get(op.reads[0].tensor)
            if not views or not same or source is None or len(self.members[i]) > 1:
                continue
            kind = self._op(self.find(source)).kind
            alone = len(self.readers[op.reads[0].tensor]) == 1
            if (
                alone
                and kind in ("matmul", "conv", "attention", "gather")
                and self._op(source).stage == op.stage
            ):
                self.join(source, i, free=True)

    def finish(self, g: Graph) -> Graph:
        """Builds one node per group, with dims named d0, d1, … (``names`` gives readable names later).

        g: the graph that was grouped, or one that differs only in rematerialised regions.
        """
        tensors = dict(g.tensors)
        for i in self.constant:
            for op in g.nodes[i].ops:
                for a in op.writes:
                    tensors[a.tensor] = replace(tensors[a.tensor], role="constant", needs_grad=False)
        roots = dict.fromkeys(self.find(i) for i in range(len(g.nodes)))
        nodes = [
            self._node(g, root, sorted(self.members[root])) for root in roots if root not in self.constant
        ]
        return replace(g, nodes=_ordered(nodes), tensors=tensors)

    def _node(self, g: Graph, root: int, members: list[int]) -> Node:
        dims: dict[object, Dim] = {}

        def names(i: int, dim: str) -> tuple[str, ...]:
            out = []
            for d in self.table.resolve((i, dim)):
                size = self.table.size(d)
                if is_one(size):
                    continue
                if d not in dims:
                    dims[d] = Dim(name=f"d{len(dims)}", size=size, kind=self.table.kind(d))
                out.append(dims[d].name)
            return tuple(out)

        def renamed(i: int, access: Access) -> Access:
            walks = tuple(
                Walk(tuple(n for d in w.dims for n in names(i, d)), w.window) for w in access.map.walks
            )
            return replace(access, map=AccessMap(walks))

        ops = []
        for i in members:
            for op in g.nodes[i].ops:
                ops.append(
                    replace(
                        op,
                        reads=tuple(renamed(i, a) for a in op.reads),
                        writes=tuple(renamed(i, a) for a in op.writes),
                        over=None if op.over is None else tuple(n for d in op.over for n in names(i, d)),
                    )
                )
            for d in g.nodes[i].space:  # keep dims that no map walks (pending)
                names(i, d.name)
        return Node(name=g.nodes[root].name, space=IterationSpace(tuple(dims.values())), ops=tuple(ops))


def _share(n: Node) -> str | None:
    """The dim of a cut whose part of each device is in the device's part of what is cut; None if there is none."""
    op = n.ops[0]
    if op.kind != "view" or not isinstance(op.parameters, EqualPart | Slice):
        return None
    walks = ((r.dims, w.dims) for r, w in zip(op.reads[0].map.walks, op.writes[0].map.walks, strict=True))
    return next(
        (r[0] for r, w in walks if r != w and r[:1] == w[:1] and n.space[r[0]].kind == "parallel"), None
    )


def _ordered(nodes: list[Node]) -> tuple[Node, ...]:
    """Orders producers before consumers. A loop's carry comes before the loop's body."""
    import heapq

    position = {n.name: i for i, n in enumerate(nodes)}
    producer = {t: n.name for n in nodes for t in n.internal}
    waits: dict[str, set[str]] = {}
    feeds: dict[str, list[str]] = defaultdict(list)
    for n in nodes:
        reads = (
            [a.tensor for op in n.ops[:1] for a in op.reads]
            if n.ops[0].kind in LEAF | {"carry"}
            else [a.tensor for _, a in n.reads]
        )
        waits[n.name] = {producer[t] for t in reads if t in producer} - {n.name}
        for p in waits[n.name]:
            feeds[p].append(n.name)
    ready = [position[k] for k, w in waits.items() if not w]
    heapq.heapify(ready)
    out: list[Node] = []
    while ready:
        n = nodes[heapq.heappop(ready)]
        out.append(n)
        for f in feeds[n.name]:
            waits[f].discard(n.name)
            if not waits[f]:
                heapq.heappush(ready, position[f])
    if len(out) != len(nodes):
        stuck = [k for k, w in waits.items() if w and k not in {n.name for n in out}][:5]
        raise AssertionError(f"joining nodes made a cycle through {stuck}; this is a bug in pase.ir.simplify")
    return tuple(out)
