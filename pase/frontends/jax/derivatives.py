"""Calls with a custom derivative rule (``jax.custom_vjp``): their forward and backward are those of the rule.

The rule's forward is lowered unchanged, without a gradient. Its backward follows as ops of the backward phase. They
read the residuals that forward returned, and their results are the operands' gradients. A backend keeps the call whole,
so all these ops have the place of the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pase.frontends.jax.types import Eqn
from pase.frontends.jax.versions import is_dropped, opened, pulled_back
from pase.ir.types import is_floating
from pase.ops import rules

if TYPE_CHECKING:
    from pase.frontends.jax.frontend import _JaxLowering

__all__ = ["has_custom_rule", "lower_with_rule"]

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
