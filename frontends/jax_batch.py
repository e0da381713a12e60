"""What the micro-batches of a JAX step make of its loss: the numbers of the program of the whole batch beside those of
a micro-batch's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pase.frontends.from_jax import INLINED, KEPT_WHOLE, TracedJax, inner_jaxpr
from pase.frontends.jax_blocks import batch_size, split_inputs
from pase.frontends.jax_types import Eqn, Jaxpr, Var
from pase.frontends.jax_versions import is_literal, opened, scan_groups
from pase.frontends.registry import NotInParts
from pase.ir import Graph, Op
from pase.ir.batch_sums import ExamplesMeet, batch_sums

__all__ = ["check_mean"]

_MOVED = frozenset(
    {"broadcast_in_dim", "convert_element_type", "reshape", "neg", "copy", "squeeze", "transpose"}
)
"""What gives a number's multiple if it reads a multiple."""
_OWN_RULE = frozenset({"custom_vjp_call", "custom_vjp_call_jaxpr"})


def check_mean(whole: TracedJax, part: TracedJax, graph: Graph, k: int) -> None:
    """Raises NotInParts if the mean of the losses of k micro-batches is not the loss of the batch.

    part: the model on one of them; graph: its simplified graph.
    """
    try:
        sums = batch_sums(graph, _cut(whole), _BothPrograms(whole=whole, part=part, k=k).power)
    except ExamplesMeet as e:
        raise NotInParts(
            f"a step in {k} micro-batches would give other numbers: examples of the batch meet in {e}"
        ) from None
    power = next(iter(sums.outputs.values()), 1)
    if power != 1:
        grows = (
            "a sum over the batch" if power == 0 else f"proportional to the batch's size ** {power - 1:+d}"
        )
        raise NotInParts(
            f"a step in {k} micro-batches would give other numbers: the loss of '{whole.graph.name}' is {grows}, and "
            f"a JAX step takes the mean of its micro-batches' losses: divide it by the batch's size (jnp.mean)"
        )


def _cut(traced: TracedJax) -> frozenset[str]:
    """Paths of the inputs that have the batch's dim."""
    size, n = batch_size(traced), len(traced.param_paths)
    avals = traced.jaxpr.in_avals[n:]
    shapes = {tuple(a.shape) for a, on in zip(avals, split_inputs(traced), strict=True) if on}
    inputs = (t for t in traced.graph.tensors.values() if t.role == "input")
    return frozenset(t.path for t in inputs if t.shape[:1] == (size,) and tuple(t.shape) in shapes)


@dataclass(frozen=True, kw_only=True)
class _BothPrograms:
    """The numbers in the program of the whole batch beside those of a micro-batch's: by which power of k they are
    larger; None: by no power of it."""

    whole: TracedJax
    part: TracedJax
    k: int
    found: dict[str, list[tuple[str, int | None]]] = field(default_factory=dict)
    """Path of an op -> primitive and power of each equation there: one, or all of a call that is an op."""

    def power(self, op: Op) -> int | None:
        """For ``batch_sums``."""
        here = self._equations.get(op.eqn.path, [])
        if len(here) <= 1 or not any(p != 0 for _, p in here):
            return here[0][1] if len(here) == 1 else 0
        # A call with a rule of its own: its equations of this kind, in their order.
        alike = [o for o in self._ops.get(op.eqn.path, []) if o.function.name == op.function.name]
        powers = [p for name, p in here if name == op.function.name]
        mine = next((i for i, o in enumerate(alike) if o.writes[0].tensor == op.writes[0].tensor), None)
        if not any(p != 0 for p in powers):
            return 0
        return powers[mine] if mine is not None and len(alike) == len(powers) else None

    @cached_property
    def _equations(self) -> Mapping[str, Sequence[tuple[str, int | None]]]:
        whole, part = self.whole.jaxpr.jaxpr, self.part.jaxpr.jaxpr
        self._walk(whole.eqns, part.eqns, {v: 0 for v in part.constvars}, "", "")
        return self.found

    @cached_property
    def _ops(self) -> Mapping[str, list[Op]]:
        out: dict[str, list[Op]] = {}
        for n in self.part.graph.nodes:
            for op in n.ops:
                if op.reads and not op.backward:
                    out.setdefault(op.eqn.path, []).append(op)
        return out

    def _walk(
        self,
        whole: Sequence[Eqn],
        part: Sequence[Eqn],
        known: dict[Var, int | None],
        prefix: str,
        inside: str,
    ) -> None:
        """known: the part's variables that depend on no data, with their powers; it is added to."""
        for i, (big, small) in enumerate(zip(whole, part, strict=False)):
            at = inside or f"{prefix}{i}"
            name = small.primitive.name
            if big.primitive.name != name:
                self.found.setdefault(at, []).append((name, None))
                continue
            numbers: list[int | str | None] = [
                self._ratio(a.val, b.val) if is_literal(b) and is_literal(a) else known.get(b, "data")
                for a, b in zip(big.invars, small.invars, strict=True)
            ]
            if not self._inner(big, small, numbers, known, f"{prefix}{i}.", inside):
                self._leaf(small, numbers, known, at)

    def _leaf(
        self, eqn: Eqn, numbers: Sequence[int | str | None], known: dict[Var, int | None], at: str
    ) -> None:
        name = eqn.primitive.name
        told = [p for p in numbers if not isinstance(p, str)]
        if len(told) == len(numbers):  # a number itself
            made = _made(name, told)
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
        """Walk what an equation calls; False if it calls nothing."""
        name = small.primitive.name
        pairs: list[tuple[Jaxpr, Jaxpr, Sequence[int | str | None], str]]
        if name in INLINED:
            pairs = [(inner_jaxpr(big)[0], inner_jaxpr(small)[0], numbers, prefix)]
            if (name in KEPT_WHOLE or name in _OWN_RULE) and not inside:
                inside = prefix[:-1]
        elif name == "scan":
            few, _ = scan_groups(small)
            told = [*numbers[:few], *["data"] * (len(numbers) - few)]
            pairs = [(opened(big.params["jaxpr"])[0], opened(small.params["jaxpr"])[0], told, prefix)]
        elif name == "cond":
            several = zip(big.params["branches"], small.params["branches"], strict=True)
            pairs = [
                (opened(a)[0], opened(b)[0], numbers[1:], f"{prefix}{j}.") for j, (a, b) in enumerate(several)
            ]
        else:
            return False
        for one, other, bound, where in pairs:
            own: dict[Var, int | None] = {v: 0 for v in other.constvars}
            own.update((v, p) for v, p in zip(other.invars, bound, strict=True) if not isinstance(p, str))
            self._walk(one.eqns, other.eqns, own, where, inside)
            if name in INLINED:
                known.update(
                    (v, own[r]) for v, r in zip(small.outvars, other.outvars, strict=True) if r in own
                )
        return True

    def _ratio(self, big: object, small: object) -> int | None:
        a, b = np.asarray(big), np.asarray(small)
        if a.shape != b.shape or not np.issubdtype(a.dtype, np.number):
            return 0
        if np.array_equal(a, b, equal_nan=True):  # jnp.var holds a NaN, for no elements
            return 0
        powers = (p for p in (1, -1, 2, -2) if a.ndim == 0 and math.isclose(a, b * self.k**p, rel_tol=1e-6))
        return next(powers, None)


def _made(name: str, told: Sequence[int | None]) -> int | None:
    """The power of what is made of numbers alone."""
    if all(p == 0 for p in told):
        return 0
    if any(p is None for p in told):
        return None
    powers = [p for p in told if p is not None]
    if name == "mul":
        return sum(powers)
    if name == "div":
        return powers[0] - powers[1]
    return powers[0] if name in _MOVED else None
