"""Calls with a custom derivative rule (``jax.custom_vjp``): their forward and backward are those of the rule.

The rule's forward is lowered unchanged, without a gradient. Its backward follows as ops of the backward phase. They
read the residuals that forward returned, and their results are the operands' gradients. A backend keeps the call whole,
so all these ops have the place of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.jax.types import Eqn
from pase.frontends.jax.versions import is_dropped, opened, pulled_back, tangents_of, values_around
from pase.ir.types import is_floating
from pase.ops import rules

if TYPE_CHECKING:
    from jax import Array

    from pase.frontends.jax.frontend import _JaxLowering

__all__ = ["check_jvp_rule", "has_custom_rule", "lower_with_rule"]

_CALLS = frozenset({"custom_vjp_call", "custom_vjp_call_jaxpr"})


def has_custom_rule(lower: _JaxLowering, eqn: Eqn) -> bool:
    """Whether the call has a rule whose backward will run. A call inside the forward of another such rule has none."""
    if eqn.primitive.name not in _CALLS or lower.inside or lower.b.frozen:
        return False
    made = any(is_floating(str(v.aval.dtype)) for v in eqn.outvars if not is_dropped(v))
    return made and any((t := lower.read(v)) is not None and t.needs_grad for v in eqn.invars)


def lower_with_rule(lower: _JaxLowering, eqn: Eqn, prefix: str) -> None:
    """Lowers a call and gives its results the gradients of its rule."""
    b, at, source = lower.b, lower.b.eqn, lower.b.source
    operands = [lower.of(v) for v in eqn.invars]
    trained = [t for t in operands if t.needs_grad]
    ahead, back, smooth = pulled_back(eqn, [t.needs_grad for t in operands])
    (forward, values), (backward, of_backward) = opened(ahead), opened(back)
    _check_values(lower, [*values, *of_backward])
    inner, rule = lower.inner(), lower.inner()
    inner.inside = rule.inside = at.path
    with b.without_gradient():
        inner.constants(forward, values)
        inner.write(forward.invars, operands)
        inner.eqns(forward.eqns, prefix)
    made = [inner.of(v) for v in forward.outvars]
    results, kept = made[: len(smooth)], made[len(smooth) :]
    b.eqn, b.source = at, source
    seams = [rules.cotangent(b, t) if on else (t, None) for t, on in zip(results, smooth, strict=True)]
    lower.write([v for v in eqn.outvars if not is_dropped(v)], [value for value, _ in seams])
    lower.env.update({v: None for v in eqn.outvars if is_dropped(v)})
    with b.in_backward():
        with b.without_gradient():
            rule.constants(backward, of_backward)
            rule.write(backward.invars, [*kept, *(g for _, g in seams if g is not None)])
            rule.eqns(backward.eqns, prefix)
        b.eqn, b.source = at, source
        for operand, v in zip(trained, backward.outvars, strict=True):
            rules.hand_back(b, operand, rule.of(v))


def check_jvp_rule(lower: _JaxLowering, eqn: Eqn) -> None:
    """Raises PaseError for a ``jax.custom_jvp`` whose rule will run and reads a value of the function around it."""
    around = values_around(eqn)
    wrt = [
        i >= around and (t := lower.read(v)) is not None and t.needs_grad for i, v in enumerate(eqn.invars)
    ]
    if around and any(wrt) and not lower.b.frozen:
        _check_values(lower, opened(tangents_of(eqn, wrt))[1])


def _check_values(lower: _JaxLowering, values: Sequence[Array]) -> None:
    """Raises PaseError if a derivative rule reads a value that existed only while JAX traced the function around it."""
    import jax

    if lost := [x for x in values if isinstance(x, jax.core.Tracer)]:
        raise PaseError(
            f"its derivative rule reads a value of the function around it, {lost[0].dtype}{list(lost[0].shape)}, which "
            f"JAX does not keep in a traced program",
            where=str(lower.b.source or lower.b.name),
            fix="pass the value as an argument, with a gradient of zeros if it has none (jax.closure_convert finds "
            "such values)",
        )
