"""Walks a plan's graph and translates its ops in order. Loops are written out, iteration by iteration.

``RULES`` has a rule for each kind of op (``lower``, ``images``). An op for which there is none is refused before
anything is written, all of them in one error. Values that do not depend on data are constants of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pase.backends.mesh_tf import images, lower
from pase.backends.mesh_tf.lower import EXPRESSIONS, REDUCTIONS, ROLES, looked_up, refuse
from pase.backends.mesh_tf.program import MeshTfProgram, MeshTfValue
from pase.errors import PaseError
from pase.ir import Access, Graph, Node, Op, Place, Scope, functions
from pase.ir.parameters import Concatenate, EqualPart, Pad, Reshape, Slice, StackRow, Take
from pase.ir.types import LEAF
from pase.tables.layouts import concrete_size

__all__ = ["translate"]

MeshTfRule = Callable[[MeshTfProgram, Node, Op], MeshTfValue]
PlacedOp = tuple[Node, Op]

_MOST_TRIPS = 200
"""The most iterations of a loop that are written out."""


def _conv(p: MeshTfProgram, node: Node, op: Op) -> MeshTfValue:
    """A convolution without windows is a product."""
    return (images.conv2d if _slides(op) else lower.product)(p, node, op)


def _pool(p: MeshTfProgram, node: Node, op: Op) -> MeshTfValue:
    """A pool whose windows have one element is a copy."""
    return (images.pool2d if _slides(op) else lower.copy)(p, node, op)


def _slides(op: Op) -> bool:
    return any(w.window for w in op.reads[0].map.walks)


RULES: Mapping[str, MeshTfRule] = {
    "elementwise": lower.elementwise,
    "reduce": lower.reduce,
    "matmul": lower.product,
    "conv": _conv,
    "window": _pool,
    "gather": lower.lookup,
    "view": lower.view,
    "copy": lower.copy,
    "carry": lower.copy,
}
"""Kind of op -> its rule. Of a carry, it sets the value before the first iteration."""


# --- what can be translated


def _views(op: Op) -> str | None:
    """Why a view cannot be translated; None if it can."""
    match op.parameters:
        case Slice(step=steps):
            return "Mesh-TensorFlow's slices have no strides" if set(steps) - {1} else None
        case Pad(before=before, interior=interior, value=value):
            plain = not any(interior) and min(before, default=0) >= 0 and not value
            return None if plain else "Mesh-TensorFlow pads only with zeros, and only around a tensor"
        case EqualPart() | Take() | Concatenate() | Reshape():
            return None
    if op.function is functions.UNSTACK or op.name == "stack":
        return None
    part = set(op.reads[0].map.dims) - set(op.writes[0].map.dims)
    return "the graph does not say which elements its result has" if part or len(op.reads) > 1 else None


def _elementwise(op: Op) -> str | None:
    """Why an elementwise op cannot be translated; None if it can."""
    name, numbers = op.function.name, op.numbers or ()
    if name == "select" and len(numbers) != 3:
        return "it selects among more than two values"
    return None if name in EXPRESSIONS or name in ROLES else _ADD


_ADD = "its function has no Mesh-TensorFlow translation; add one to pase/backends/mesh_tf/lower.py"
_NO_LOOPS = (
    "Mesh-TensorFlow programs have no loops whose trip count depends on data; write it as a lax.scan, or as a "
    "fori_loop with constant bounds, which is written out"
)
_INSTEAD = {
    "attention": "Mesh-TensorFlow has no fused kernel for it; write it as two products and a softmax (models of the "
    "zoo take attention=plain)",
    "opaque": "what it computes depends on data, or has no Mesh-TensorFlow translation",
    "cotangent": "Mesh-TensorFlow differentiates the program itself, without the derivative rule that it has",
}
"""Kind of op that Mesh-TF cannot express -> the reason, and what to do instead."""


def missing(p: MeshTfProgram, op: Op) -> str | None:
    """Why an op cannot be translated, and what to do; None if it can."""
    if op.kind not in RULES:
        return _INSTEAD.get(op.kind, _ADD)
    if op.literals is None or len(op.writes) > 1:
        return "the graph does not determine what it computes"
    lost = [a.tensor for a in op.reads if a.tensor not in p.known and a.tensor not in p.names.graph.producer]
    if lost:
        return "it reads a constant whose value the traced model does not have"
    if op.kind == "elementwise" and (why := _elementwise(op) or _integers(p, op)):
        return why
    if op.kind == "view":
        return _views(op)
    if op.kind == "reduce" and op.function.name not in REDUCTIONS:
        return _ADD
    if op.kind == "matmul" and len(op.reads) > 2:
        return "its rows are in groups, and Mesh-TensorFlow's products are of whole tensors"
    if op.kind == "gather" and looked_up(op) is None:
        return "only lookups of whole rows by one index can be expressed"
    return None


def _integers(p: MeshTfProgram, op: Op) -> str | None:
    """Why Mesh-TF's function would be another one of the op's operands, if they are integers."""
    fn = EXPRESSIONS.get(op.function.name, "")
    given = p.names.graph.tensors[op.reads[0].tensor].dtype if op.reads else ""
    if fn.startswith("mtf.logical_") and given != "bool":
        return f"it works on the bits of {given}, and Mesh-TensorFlow has only logical functions"
    if fn in ("mtf.divide", "mtf.reciprocal") and "int" in given:
        return "Mesh-TensorFlow divides by multiplication, which gives other integers"
    if op.function.name == "select" and given != "bool":
        return "it selects by an index, and Mesh-TensorFlow only by a condition"
    return None


def _live(graph: Graph, known: Mapping[str, object]) -> list[PlacedOp]:
    """The ops that the outputs depend on, in order, without those of values that do not depend on data."""
    maker = {a.tensor: (node, op) for node in graph.nodes for op in node.ops for a in op.writes}
    ends = {
        op.eqn: (node, op) for node in graph.nodes for op in node.ops if op.kind == "carry" and not op.writes
    }
    found: set[int] = set()
    waiting = [maker[t] for t in graph.outputs if t not in known]
    while waiting:
        _, op = waiting.pop()
        if id(op) in found:
            continue
        found.add(id(op))
        waiting += [maker[a.tensor] for a in op.reads if a.tensor not in known and a.tensor in maker]
        if op.kind == "carry" and op.eqn in ends:
            waiting.append(ends[op.eqn])
    return [(node, op) for node in graph.nodes for op in node.ops if id(op) in found and op.kind not in LEAF]


def _loops(op: Op) -> tuple[str, str] | None:
    """(the name of a loop or a branch around an op that cannot be written out, the reason); None if all can be."""
    for scope in op.loops:
        if scope.kind != "loop":
            return "cond", "which of its branches is taken depends on data"
        if op.eqn.path.removeprefix(scope.path)[:2] in ("b.", "c."):  # a while loop's body or condition
            return "while", _NO_LOOPS
    return None


def check_known(p: MeshTfProgram, ops: Sequence[PlacedOp]) -> None:
    """Raise one PaseError that lists all ops without a translation, each once."""
    unknown: dict[str, PaseError] = {}
    for _, op in ops:
        name, why = _loops(op) or (op.name, missing(p, op))
        if why is not None:
            unknown.setdefault(name, refuse(replace(op, name=name), why))
    if unknown:
        raise PaseError("; ".join(str(e) for _, e in sorted(unknown.items())))


def translate(p: MeshTfProgram) -> None:
    """Add the ops on which the graph's outputs depend. The values of parameters and inputs must be there. Raises
    PaseError if Mesh-TensorFlow cannot express one of the ops."""
    ops = _live(p.names.graph, p.known)
    check_known(p, ops)
    _MeshTfWalk(p).run(ops, 1)


@dataclass
class _MeshTfWalk:
    """turns: of each loop around the statements that are written, the iteration and the number of iterations."""

    p: MeshTfProgram
    turns: list[tuple[int, int]] = field(default_factory=list)
    begins: Mapping[Place, Access] = field(init=False)
    """Place of a carry -> the write that gives it its first value."""

    def __post_init__(self) -> None:
        ops = (op for node in self.p.names.graph.nodes for op in node.ops)
        self.begins = {op.eqn: op.writes[0] for op in ops if op.kind == "carry" and op.writes}

    def run(self, ops: Sequence[PlacedOp], times: int) -> None:
        """Write ops of one loop's body, or of the whole program. times: how often they run."""
        depth = len(self.turns)
        units: dict[Hashable, list[PlacedOp]] = {}
        for node, op in ops:
            units.setdefault(op.loops[depth] if len(op.loops) > depth else id(op), []).append((node, op))
        maker = {a.tensor: key for key, unit in units.items() for _, op in unit for a in op.writes}
        last = {  # a carry -> the loop that sets it
            self.begins[op.eqn].tensor: key
            for key, unit in units.items()
            for _, op in unit
            if op.kind == "carry" and not op.writes and isinstance(key, Scope)
        }
        done: set[Hashable] = set()

        def visit(key: Hashable) -> None:
            """Write a unit (an op, or a loop with all its ops) after those that make what it reads."""
            if key in done:
                return
            done.add(key)
            for _, op in units[key]:
                for a in op.reads:
                    for before in (maker.get(a.tensor), last.get(a.tensor)):
                        if before is not None and before != key:
                            visit(before)
            if isinstance(key, Scope):
                self.loop(units[key], times)
            else:
                self.op(*units[key][0])

        for key in units:
            visit(key)

    def op(self, node: Node, op: Op) -> None:
        if not op.writes:  # an output, or a carry's next value
            return
        self.p.heading(node)
        if op.function is functions.UNSTACK:
            turn, length = self.turns[-1]
            x = self.p.read(node, op.reads[0])
            made = lower.pick(self.p, x, length - 1 - turn if _reverse(op) else turn)
        else:
            made = RULES[op.kind](self.p, node, op)
        self.p.keep(node, op.writes[0], made)

    def loop(self, ops: Sequence[PlacedOp], times: int) -> None:
        """Write out all iterations of a loop. Each sets the values of its body again."""
        depth = len(self.turns)
        inside = next(op for _, op in ops if len(op.loops) == depth + 1)
        length = concrete_size(inside.times, inside.name) // times
        if length > _MOST_TRIPS:
            raise PaseError(
                f"a Mesh-TensorFlow program would have {length} iterations of it, but at most {_MOST_TRIPS} are "
                f"written out",
                where=f"the loop at {inside.source or inside.eqn}",
            )
        own = [(node, op) for node, op in ops if len(op.loops) == depth + 1]
        ends = [(node, op) for node, op in own if op.kind == "carry" and not op.writes]
        stacks = [(node, op) for node, op in own if op.name == "stack" and op.kind == "view"]
        apart = {id(op) for _, op in (*ends, *stacks)}
        body = [(node, op) for node, op in ops if id(op) not in apart]
        rows: list[list[MeshTfValue]] = [[] for _ in stacks]
        for turn in range(length):
            self.turns.append((turn, length))
            self.run(body, times * length)
            self.turns.pop()
            for made, (node, op) in zip(rows, stacks, strict=True):
                made.append(self.p.read(node, op.reads[0]))
            after = [self.p.read(node, op.reads[0]) for node, op in ends]
            for (node, op), value in zip(ends, after, strict=True):
                self.p.keep(node, self.begins[op.eqn], value)
        for made, (node, op) in zip(rows, stacks, strict=True):
            made = made[::-1] if _reverse(op) else made
            whole = lower.concat(self.p, [replace(x, dims=((), *x.dims)) for x in made], 0)
            self.p.keep(node, op.writes[0], whole)


def _reverse(op: Op) -> bool:
    """Whether the loop goes through the rows that the op takes or makes from the last one to the first one."""
    return isinstance(op.parameters, StackRow) and op.parameters.reverse
