"""The residuals of ``jax.linearize`` on one device: what JAX keeps of a program's forward for its backward.

``jax.ad_checkpoint.print_saved_residuals`` lists the same ones. Bytes are those of distinct values, without parameters
and inputs; without casts, views and stacks of parameters (the account counts these as weights); and without values that
depend on neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

__all__ = ["Residuals", "residuals"]

_CALLS = ("pjit", "jit", "custom_jvp_call", "custom_vjp_call", "closed_call", "core_call")
_MOVES = "broadcast_in_dim reshape transpose squeeze expand_dims convert_element_type copy rev slice iota stop_gradient"
_VIEWS = frozenset("reshape transpose squeeze expand_dims".split())  # noqa: SIM905
_OF_WEIGHTS = _VIEWS | {"convert_element_type", "concatenate", "broadcast_in_dim", "copy", "slice", "rev"}
"""Primitives whose result still counts as a parameter: it is the parameter in another form."""
_LIGHT = "add sub neg mul max min abs sign select_n integer_pow square clamp eq ne lt le gt ge and or not xor is_finite"
_CHEAP = frozenset(f"{_MOVES} {_LIGHT} name reduce_precision add_any copy_p floor round real imag".split())
"""Primitives that XLA recomputes in each fusion that reads them (``InstructionFusion::IsExpensive`` is false)."""


_SUMS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_and reduce_or exp log tanh logistic erf rsqrt sqrt div".split()  # noqa: SIM905
)
"""Primitives that are computed once, in a fusion with the producers of their operands."""


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """listed: bytes of the values that JAX lists. fused: bytes that a compiler keeps for them if it recomputes cheap
    functions of one large value in their readers. in_loops: the part of both that loops stack or branches return, which
    cannot be fused. of_weights: the part of fused that depends only on parameters."""

    listed: int
    fused: int
    in_loops: int
    of_weights: int


def residuals(loss: Callable[..., Any], params: Any, *batch: Any) -> Residuals:
    """Returns the residuals of loss(params, *batch) for gradients of params. Nothing runs, so shapes suffice."""
    leaves, tree = jax.tree.flatten(params)
    arrays = {
        i: x for i, x in enumerate(leaves) if hasattr(x, "dtype")
    }  # the others are functions of a module

    def whole(p: Mapping[int, Any]) -> Any:
        return jax.tree.unflatten(tree, [p.get(i, x) for i, x in enumerate(leaves)])

    linear = jax.make_jaxpr(lambda p, *b: jax.linearize(lambda p: loss(whole(p), *b), p))(arrays, *batch)
    traced, results = (
        linear.jaxpr,
        len(jax.tree.leaves(jax.eval_shape(lambda p, *b: loss(whole(p), *b), arrays, *batch))),
    )
    made: dict[Any, Any] = {}
    same = dict(_flat(traced, made))
    weights = set(traced.invars[: len(arrays)])
    data, batched = set(traced.invars), set(traced.invars) - weights
    for v, eqn in made.items():  # in the order in which they are computed
        operands = [w for o in eqn.invars if not _literal(w := _found(o, same))]
        if operands and eqn.primitive.name in _OF_WEIGHTS and weights.issuperset(operands):
            weights.add(v)
        if not data.isdisjoint(operands):
            data.add(v)
        if not batched.isdisjoint(operands):
            batched.add(v)
    constants = set(traced.constvars) | (made.keys() - data)
    given = {*traced.invars, *weights, *constants}
    products = (eqn for eqn in made.values() if eqn.primitive.name not in _CHEAP | _SUMS)
    program = _Linearized(
        made=made,
        same=same,
        given=frozenset(given),
        heavy=_viewed(
            (w for e in products for o in e.invars if not _literal(w := _found(o, same))), made, same
        ),
        forward=_above(traced.outvars[:results], made, same),
    )
    values = (_found(v, same) for v in traced.outvars[results:])
    listed = {w for w in values if not _literal(w) and w not in given and w in made}
    fused = {w for v in listed for w in program.roots(v)}
    stacked = {v for v in fused if made[v].primitive.name in ("scan", "while", "cond")}
    return Residuals(
        listed=_bytes(listed),
        fused=_bytes(fused),
        in_loops=_bytes(stacked),
        of_weights=_bytes(fused - batched),
    )


def _viewed(values: Iterable[Any], made: Mapping[Any, Any], same: Mapping[Any, Any]) -> frozenset[Any]:
    """Returns the values of which these are views."""

    def of(v: Any) -> Any:
        while v in made and made[v].primitive.name in _VIEWS:
            v = _found(made[v].invars[0], same)
        return v

    return frozenset(map(of, values))


def _literal(v: Any) -> bool:
    return hasattr(v, "val")


def _bytes(values: set[Any]) -> int:
    return sum(v.aval.size * v.aval.dtype.itemsize for v in values)


def _flat(jaxpr: Any, made: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Fills made (value -> its equation) with the equations of a jaxpr and of the calls in it. Yields (value, the same
    value outside or inside) for the operands and results of calls."""
    for eqn in jaxpr.eqns:
        inner = next((p for k, p in eqn.params.items() if k in ("jaxpr", "call_jaxpr")), None)
        if eqn.primitive.name in _CALLS and inner is not None:
            body = _fresh(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()))
            yield from zip(body.invars, eqn.invars, strict=True)
            yield from _flat(body, made)
            yield from zip(eqn.outvars, body.outvars, strict=True)
            continue
        made.update((v, eqn) for v in eqn.outvars)


def _fresh(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Returns the jaxpr with new variables, because a jaxpr that is called twice computes its values twice."""
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    return jax.make_jaxpr(lambda *a: jax.core.eval_jaxpr(jaxpr, consts, *a))(*shapes).jaxpr


@dataclass(frozen=True, kw_only=True)
class _Linearized:
    """A linearized program without calls. made: value -> its equation. same: values that equal other values. given:
    parameters and inputs. heavy: operands of products and the like, which are in memory themselves. forward: the values
    that the loss depends on; all others are computed in backward, even if they are expensive."""

    made: Mapping[Any, Any]
    same: Mapping[Any, Any]
    given: frozenset[Any]
    heavy: frozenset[Any]
    forward: frozenset[Any]

    def roots(self, v: Any) -> frozenset[Any]:
        """Returns what is kept for v: the one large value from which it is cheap to compute, or v itself. A value that
        only backward computes is computed from all of its operands."""
        if _literal(v) or v in self.given or v not in self.made:
            return frozenset()
        eqn, ahead = self.made[v], v in self.forward
        name = eqn.primitive.name
        if v in self.heavy or (name not in _CHEAP and (ahead or name not in _SUMS)):
            return frozenset([v])
        operands = [w for o in eqn.invars if not _literal(w := _found(o, self.same))]
        large = [w for w in operands if (w in self.made or w in self.given) and w.aval.size == v.aval.size]
        narrower = any(w.aval.dtype.itemsize > v.aval.dtype.itemsize for w in large)
        cast = name == "convert_element_type" and narrower
        found = frozenset().union(*map(self.roots, large))
        return frozenset([v]) if cast or (len(found) > 1 and ahead) else found


def _found(v: Any, same: Mapping[Any, Any]) -> Any:
    while not _literal(v) and v in same:
        v = same[v]
    return v


def _above(values: Iterable[Any], made: Mapping[Any, Any], same: Mapping[Any, Any]) -> frozenset[Any]:
    """Returns these values and all values from which they are computed."""
    seen: set[Any] = set()
    left = list(values)
    while left:
        v = _found(left.pop(), same)
        if not _literal(v) and v not in seen and v in made:
            seen.add(v)
            left += made[v].invars
    return frozenset(seen)
