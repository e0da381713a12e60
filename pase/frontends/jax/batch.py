"""Checks that a JAX step in micro-batches computes the loss of the whole batch.

It compares the numbers in the program of the whole batch with those in the program of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pase.errors import PaseError
from pase.frontends.jax.blocks import batch_size, split_inputs
from pase.frontends.jax.frontend import INLINED, KEPT_WHOLE, TracedJax, inner_jaxpr
from pase.frontends.jax.rules import RULES, Elementwise
from pase.frontends.jax.types import Aval, Eqn, Jaxpr, Var
from pase.frontends.jax.versions import is_literal, opened, scan_groups
from pase.frontends.registry import NotInParts
from pase.ir import Graph, Op, Place
from pase.ir.batch_sums import ExamplesMeet, batch_sums

if TYPE_CHECKING:
    from jax import Array
    from jax.tree_util import PyTreeDef

    _Opened = tuple[Jaxpr, Sequence[Array]]  # a program and the values of its constants

__all__ = ["check_mean", "examples_meet"]

_MOVED = frozenset(
    (
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "expand_dims",
        "neg",
        "reduce_max",
        "reduce_min",
        "reshape",
        "rev",
        "squeeze",
        "transpose",
    )
)
"""Primitives whose result is multiplied by a number if their operand is."""
_CUSTOM_RULE = frozenset({"custom_vjp_call", "custom_vjp_call_jaxpr"})


def examples_meet(traced: TracedJax, graph: Graph) -> str | None:
    """Where the examples of a batch meet, so that micro-batches would give other numbers. None if they do not meet.

    graph: the simplified graph. The numbers in the program are checked by ``check_mean``.
    """
    try:
        sums = batch_sums(graph, _cut(traced), None, state_of_whole=False)
    except ExamplesMeet as e:
        return str(e)
    return _total_of_loss(graph, sums.totals)


def check_mean(whole: TracedJax, part: TracedJax, graph: Graph, k: int) -> None:
    """Raises NotInParts if the mean of the losses of k micro-batches is not the loss of the batch.

    part: the model traced on one micro-batch. graph: its simplified graph.
    """
    _check_handed_on(whole, k)
    try:
        both = _BothPrograms(whole=whole, part=part, k=k)
        sums = batch_sums(graph, _cut(whole), both, state_of_whole=False)
    except ExamplesMeet as e:
        raise NotInParts(
            f"a step in {k} micro-batches would give other numbers: examples of the batch meet in {e}"
        ) from None
    if (read := _total_of_loss(graph, sums.totals)) is not None:
        raise NotInParts(
            f"a step in {k} micro-batches would give other numbers: the loss of '{whole.graph.name}' depends on "
            f"{read}, a sum over the batch, of which a micro-batch has only its own part",
            fix="compute this sum outside the function and pass it as an argument",
        )
    power = next(iter(sums.outputs.values()), 1)
    if power != 1:
        grows = (
            "a sum over the batch" if power == 0 else f"proportional to the batch's size ** {power - 1:+d}"
        )
        raise NotInParts(
            f"a step in {k} micro-batches would give other numbers: the loss of '{whole.graph.name}' is {grows}, but "
            f"a JAX step takes the mean of its micro-batches' losses",
            fix="divide it by the batch's size (jnp.mean)",
        )


def _check_handed_on(whole: TracedJax, k: int) -> None:
    """Raises NotInParts if an argument without a batch dim is also returned beside the loss, but not named in
    ``carry``.

    Such an argument is state, for example batch statistics. Each micro-batch would then start from the state before the
    step rather than from that of the micro-batch before it.
    """
    if whole.mode != "train" or whole.out_tree is None:
        return
    avals, first, split = whole.jaxpr.in_avals, len(whole.param_paths), split_inputs(whole)
    returned = list(_subtrees(whole.out_tree, whole.jaxpr.out_avals, 0))
    for number, form in enumerate(whole.in_tree.children()[1:]):
        leaves = range(first, first + form.num_leaves)
        first += form.num_leaves
        cut = [split[i - len(whole.param_paths)] for i in leaves]
        if form.num_nodes == 1 or all(cut) or any(i in whole.held for i in leaves):
            continue
        mine = [(avals[i].shape, avals[i].dtype) for i in leaves]
        if (form, mine) in returned:
            raise NotInParts(
                f"a step in {k} micro-batches would give other numbers: argument {number} of the batch comes back "
                f"beside the loss, and each micro-batch would begin with the step's",
                fix=f"declare it as state with carry={{{number}: place}}, for example "
                f"carry={{{number}: (1, 'batch_stats')}}",
            )


def _subtrees(
    form: PyTreeDef, avals: Sequence[Aval], at: int
) -> Iterator[tuple[PyTreeDef, list[tuple[object, object]]]]:
    """Yields every subtree of a result: its treedef, and the shape and dtype of its leaves."""
    yield form, [(a.shape, a.dtype) for a in avals[at : at + form.num_leaves]]
    for child in form.children():
        yield from _subtrees(child, avals, at)
        at += child.num_leaves


def _total_of_loss(graph: Graph, totals: Collection[str]) -> str | None:
    """The op and line of a sum over the batch that depends on no parameter and that the loss depends on, or None."""
    makers = {a.tensor: op for n in graph.nodes for op in n.ops for a in op.writes}
    left, seen = list(graph.outputs[:1]), set(graph.outputs[:1])
    while left:
        t = left.pop()
        op = makers.get(t)
        if op is not None and t in totals:
            return f"{op.name} at {op.source or 'an unknown line'}"
        new = {a.tensor for a in op.reads} - seen if op is not None else set()
        seen |= new
        left += new
    return None


def _cut(traced: TracedJax) -> frozenset[str]:
    """The paths of the inputs that have the batch's dim."""
    n = len(traced.param_paths)
    try:
        size = batch_size(traced)
    except PaseError:
        return frozenset()  # there is no batch; dividing it raises the error
    avals = traced.jaxpr.in_avals[n:]
    shapes = {tuple(a.shape) for a, on in zip(avals, split_inputs(traced), strict=True) if on}
    inputs = (t for t in traced.graph.tensors.values() if t.role == "input")
    return frozenset(t.path for t in inputs if t.shape[:1] == (size,) and tuple(t.shape) in shapes)


@dataclass(frozen=True, kw_only=True)
class _BothPrograms:
    """For each number in the program of the whole batch: by which power of k it is larger than the number in the
    program of a micro-batch. None if the ratio is no power of k."""

    whole: TracedJax
    part: TracedJax
    k: int
    found: dict[str, list[tuple[str, int | None]]] = field(default_factory=dict)
    """Path of an op -> (primitive, power) of its equation, or of all equations of a call that is one op."""
    zeros: set[Var] = field(default_factory=set)
    """The variables of the micro-batch's program that are zero everywhere."""
    from_zero: set[Place] = field(default_factory=set)
    """The loop carries that are zero before the first iteration."""

    def begins_at_zero(self, op: Op) -> bool:
        """Whether a loop's carry is zero before the first iteration, as ``batch_sums`` asks."""
        return op.eqn in self._walked.from_zero

    def power(self, op: Op) -> int | None:
        """The power of an op's number, as ``batch_sums`` asks."""
        here = self._walked.found.get(op.eqn.path, [])
        if len(here) <= 1 or not any(p != 0 for _, p in here):
            return here[0][1] if len(here) == 1 else 0
        # A call with its own derivative rule: compare its equations of this kind in order.
        alike = [o for o in self._ops.get(op.eqn.path, []) if o.function.name == op.function.name]
        powers = [p for name, p in here if name == op.function.name]
        mine = next((i for i, o in enumerate(alike) if o.writes[0].tensor == op.writes[0].tensor), None)
        if not any(p != 0 for p in powers):
            return 0
        return powers[mine] if mine is not None and len(alike) == len(powers) else None

    @cached_property
    def _walked(self) -> _BothPrograms:
        """This object, after both programs have been walked."""
        self._walk(opened(self.whole.jaxpr), opened(self.part.jaxpr), {}, "", "")
        return self

    @cached_property
    def _ops(self) -> Mapping[str, list[Op]]:
        out: dict[str, list[Op]] = {}
        for n in self.part.graph.nodes:
            for op in n.ops:
                if op.reads and not op.backward:
                    out.setdefault(op.eqn.path, []).append(op)
        return out

    def _walk(
        self, whole: _Opened, part: _Opened, known: dict[Var, int | None], prefix: str, inside: str
    ) -> Sequence[int | str | None]:
        """Walks both programs, and returns the powers of their results.

        known: power of each variable of the micro-batch's program that depends on no data. The walk adds to it.
        """
        (big, of_whole), (small, of_part) = whole, part
        self.zeros.update(v for v, x in zip(small.constvars, of_part, strict=True) if not np.any(_values(x)))
        self._alike("constants", len(of_whole), len(of_part))
        known.update(
            (v, self._ratio(a, b)) for v, a, b in zip(small.constvars, of_whole, of_part, strict=True)
        )
        self._alike("equations", len(big.eqns), len(small.eqns))
        pairs = dict(zip([*big.constvars, *big.invars], [*small.constvars, *small.invars], strict=True))
        for i, (one, other) in enumerate(zip(big.eqns, small.eqns, strict=True)):
            self._same(one, other)
            self._note_zeros(other, f"{prefix}{i}")
            numbers = self._numbers(one.invars, other.invars, pairs, known)
            pairs.update(zip(one.outvars, other.outvars, strict=True))
            if not self._inner(one, other, numbers, known, f"{prefix}{i}.", inside):
                self._leaf(one, other, numbers, known, inside or f"{prefix}{i}")
        return self._numbers(big.outvars, small.outvars, pairs, known)

    def _is_zero(self, v: Var) -> bool:
        return not np.any(_values(v.val)) if is_literal(v) else v in self.zeros

    def _note_zeros(self, eqn: Eqn, path: str) -> None:
        """Records which results of an equation are zero, and which initial values of the programs inside it."""
        name, ins = eqn.primitive.name, eqn.invars
        if name in _MOVED and self._is_zero(ins[0]):
            self.zeros.update(eqn.outvars)
        elif name in INLINED:
            inner, _ = inner_jaxpr(eqn)
            self.zeros.update(v for v, given in zip(inner.invars, ins, strict=True) if self._is_zero(given))
        elif name in ("scan", "while"):
            first = scan_groups(eqn)[0] if name == "scan" else _consts(eqn)
            last = first + scan_groups(eqn)[1] if name == "scan" else len(ins)
            at = Place(path)
            zero = (k for k, v in enumerate(ins[first:last]) if self._is_zero(v))
            self.from_zero.update(at.its("carry", k) for k in zero)

    def _same(self, big: Eqn, small: Eqn) -> None:
        """Raises NotInParts if two equations differ in more than shapes and in how often a loop without carries
        runs."""
        name = small.primitive.name
        self._alike("operations", big.primitive.name, name)
        self._alike(f"operands of {name}", len(big.invars), len(small.invars))
        looped = name == "scan" and scan_groups(small)[1] == 0
        for key, value in small.params.items():
            if isinstance(value, int | float | str) and not (looped and key == "length"):
                self._alike(f"values of {key} of {name}", big.params.get(key), value)

    def _numbers(
        self,
        big: Sequence[Var],
        small: Sequence[Var],
        pairs: Mapping[Var, Var],
        known: Mapping[Var, int | None],
    ) -> list[int | str | None]:
        """The powers of the variables that are read. Raises NotInParts if the programs read different variables."""
        out: list[int | str | None] = []
        for a, b in zip(big, small, strict=True):
            if is_literal(a) and is_literal(b):
                out.append(self._ratio(a.val, b.val))
                continue
            if is_literal(a) or is_literal(b) or pairs[a] is not b:
                self._alike("variables", a, b)
            out.append(known.get(b, "data"))
        return out

    def _alike(self, what: str, whole: object, part: object) -> None:
        if whole is part or (not hasattr(whole, "aval") and whole == part):
            return
        raise NotInParts(
            f"a step in {self.k} micro-batches would give other numbers: the programs of "
            f"'{self.whole.graph.name}' on the batch and on a micro-batch have other {what}, {whole} and {part}",
            fix="write the model so that its code does not depend on the batch's size",
        )

    def _leaf(
        self, big: Eqn, eqn: Eqn, numbers: Sequence[int | str | None], known: dict[Var, int | None], at: str
    ) -> None:
        name = eqn.primitive.name
        told = [p for p in numbers if not isinstance(p, str)]
        if len(told) == len(numbers):  # it computes a number from numbers
            made = self._made(big, eqn, told)
            known.update((v, made) for v in eqn.outvars)
        elif name in ("mul", "div") and told:
            first = name == "div" and numbers[0] != "data" and numbers[0] != 0  # a number divided by data
            self.found.setdefault(at, []).append((name, None if first else told[0]))
        else:
            self.found.setdefault(at, []).append((name, None if any(p != 0 for p in told) else 0))

    def _inner(
        self,
        big: Eqn,
        small: Eqn,
        numbers: Sequence[int | str | None],
        known: dict[Var, int | None],
        prefix: str,
        inside: str,
    ) -> bool:
        """Walks the programs that an equation calls. Returns False if it calls none."""
        name = small.primitive.name
        pairs: list[tuple[_Opened, _Opened, Sequence[int | str | None], str]] = []
        if name in INLINED:
            pairs = [(inner_jaxpr(big), inner_jaxpr(small), numbers, prefix)]
            if (name in KEPT_WHOLE or name in _CUSTOM_RULE) and not inside:
                inside = prefix[:-1]
        elif name == "scan":
            few, _ = scan_groups(small)
            told = [*numbers[:few], *("data" if p in ("data", 0) else None for p in numbers[few:])]
            pairs = [(opened(big.params["jaxpr"]), opened(small.params["jaxpr"]), told, prefix)]
        elif name == "while":
            count = small.params["cond_nconsts"], _consts(small)
            carry = ["data" if p in ("data", 0) else None for p in numbers[count[1] :]]
            given = {"cond": numbers[: count[0]], "body": numbers[count[0] : count[1]]}
            for part, consts in given.items():
                one, other = (opened(e.params[f"{part}_jaxpr"]) for e in (big, small))
                pairs.append((one, other, [*consts, *carry], f"{prefix}{part[0]}."))
        elif name == "cond":
            several = zip(big.params["branches"], small.params["branches"], strict=True)
            pairs = [(opened(a), opened(b), numbers[1:], f"{prefix}{j}.") for j, (a, b) in enumerate(several)]
        else:
            return False
        if "data" not in numbers:  # its results are not followed, but are equal if all numbers and shapes are
            same = all(p == 0 for p in numbers) and _shapes(big) == _shapes(small)
            known.update(
                (v, 0 if same and name in ("scan", "cond", "while") else None) for v in small.outvars
            )
        for one, other, bound, where in pairs:
            own = {v: p for v, p in zip(other[0].invars, bound, strict=True) if not isinstance(p, str)}
            made = self._walk(one, other, own, where, inside)
            if name in INLINED:
                known.update(
                    (v, p) for v, p in zip(small.outvars, made, strict=True) if not isinstance(p, str)
                )
                ends = zip(small.outvars, other[0].outvars, strict=True)
                self.zeros.update(v for v, returned in ends if self._is_zero(returned))
        return True

    def _made(self, big: Eqn, small: Eqn, told: Sequence[int | None]) -> int | None:
        """The power of a result that is computed from numbers alone. Along a dim of the batch's size, such a result
        must be the same everywhere."""
        name = small.primitive.name
        powers = [p for p in told if p is not None]
        if len(powers) < len(told):
            return None
        if name == "mul":
            return sum(powers)
        if name == "div":
            return powers[0] - powers[1]
        if name == "dot_general":
            return self._more(big, small, big.params["dimension_numbers"][0][0], sum(powers))
        if name == "reduce_sum":
            return self._more(big, small, big.params["axes"], powers[0])
        if name in _MOVED:
            return powers[0]
        if any(powers):
            return None
        if name == "slice":
            return 0 if _sliced_alike(big, small) else None
        alone = isinstance(RULES.get(name), Elementwise) or name in ("reduce_and", "reduce_or")
        if alone or _shapes(big) == _shapes(small):
            return 0
        along = [_along(e) for e in (big, small)]
        return 0 if along[0] is not None and along[0] == along[1] else None

    def _more(self, big: Eqn, small: Eqn, dims: Sequence[int], power: int) -> int | None:
        """The power of a sum over these dims of the first operand, whose own power is ``power``."""
        a, b = (math.prod(int(e.invars[0].aval.shape[d]) for d in dims) for e in (big, small))
        return power if a == b else power + 1 if a == b * self.k else None

    def _ratio(self, big: object, small: object) -> int | None:
        a, b = _values(big), _values(small)
        if a.ndim != b.ndim:
            return None
        # Along a dim of the batch's size, a constant must be the same everywhere. Otherwise it would distinguish
        # examples by their positions.
        once = tuple(slice(None) if n == m else slice(0, 1) for n, m in zip(a.shape, b.shape, strict=True))
        if not all(np.array_equal(v, np.broadcast_to(v[once], v.shape), equal_nan=True) for v in (a, b)):
            return None
        a, b = a[once], b[once]
        if np.array_equal(a, b, equal_nan=True):  # jnp.var contains a NaN for the case of no elements
            return 0
        powers = (p for p in (1, -1, 2, -2) if np.allclose(a, b * float(self.k) ** p, rtol=1e-6, atol=0))
        return next(powers, None) if a.dtype.kind != "b" else None


def _consts(eqn: Eqn) -> int:
    """The number of a while loop's operands that its condition and its body read unchanged."""
    return int(eqn.params["cond_nconsts"] + eqn.params["body_nconsts"])


def _values(of: object) -> np.ndarray:
    """A constant as an array of one of numpy's own dtypes: keys become words, narrow floats become wide ones."""
    import jax

    dtype = getattr(of, "dtype", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        of = jax.random.key_data(of)  # type: ignore[arg-type]
    array = np.asarray(of)
    return array if array.dtype.kind in "biufc" else array.astype(np.float64)


def _shapes(eqn: Eqn) -> list[tuple[int, ...]]:
    return [tuple(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]


def _sliced_alike(big: Eqn, small: Eqn) -> bool:
    """Whether both slices begin at the same places in the dims of equal size and keep the same fraction. Otherwise they
    would distinguish examples by their positions."""
    (whole, taken), (part, left) = (_shapes(e) for e in (big, small))
    begins = zip(whole, part, *(e.params["start_indices"] for e in (big, small)), strict=True)
    same = all(i == j for m, n, i, j in begins if m == n)
    return same and math.prod(whole) * math.prod(left) == math.prod(taken) * math.prod(part)


def _along(eqn: Eqn) -> list[int] | None:
    """The sizes of the dims that the equation works along, in all operands and results. None if it names no dims."""
    found = next((eqn.params[key] for key in ("axes", "axis", "dimension") if key in eqn.params), None)
    if found is None:
        return None
    dims = [found] if isinstance(found, int) else found
    every = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    return [int(shape[d]) for shape in every for d in dims if d < len(shape)]
