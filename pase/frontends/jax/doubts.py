"""Where a JAX program's gradient may intentionally differ from the slope of its loss: stopped gradients, derivative
rules that the user wrote, choices, and values that are rounded to integers.

For each parameter, such ops between the parameter and the loss are found statically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pase.frontends.jax.frontend import INLINED, TracedJax
from pase.frontends.jax.types import Eqn, Jaxpr, Var
from pase.frontends.jax.versions import (
    is_literal,
    jaxprs_inside,
    opened,
    scan_groups,
    source_line,
    without_dead_code,
)

__all__ = ["doubts"]

_RULES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"})
_ROUNDED = frozenset({"floor", "ceil", "round", "sign", "argmax", "argmin", "rem", "nextafter"})
_CHOSEN_BY_ORDER = frozenset({"sort", "top_k", "approx_top_k"})
_COMPARED = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def doubts(traced: TracedJax) -> dict[str, str]:
    """Path of a parameter -> the first such op between it and the loss, and its line."""
    outs = traced.jaxpr.jaxpr.outvars
    # An accuracy that is only reported does not matter.
    needed, _ = opened(without_dead_code(traced.jaxpr, [k == 0 for k in range(len(outs))]))
    n = len(traced.param_paths)
    found = _Dependence()
    found.through(needed, [1 << i if i < n else 0 for i in range(len(needed.invars))])
    out: dict[str, str] = {}
    for mask, text in found.events:
        for i, path in enumerate(traced.param_paths):
            if mask >> i & 1:
                out.setdefault(path, text)
    return out


@dataclass(kw_only=True)
class _Dependence:
    """Which parameters each value depends on, as bits, and the ops of this kind that such values enter."""

    events: dict[tuple[int, str], None] = field(default_factory=dict)

    def through(self, jaxpr: Jaxpr, ins: Sequence[int]) -> list[int]:
        """The parameters that each result depends on. ins: those that each operand depends on."""
        known: dict[Var, int] = dict(zip(jaxpr.invars, ins, strict=True))

        def of(v: Var) -> int:
            return 0 if is_literal(v) else known.get(v, 0)

        for eqn in jaxpr.eqns:
            masks = [of(v) for v in eqn.invars]
            all_of = _union(masks)
            if all_of and (what := _doubtful(eqn)) is not None:
                self.events[all_of, what] = None
            outs = self._called(eqn, masks) if all_of else [0] * len(eqn.outvars)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [of(v) for v in jaxpr.outvars]

    def _called(self, eqn: Eqn, masks: Sequence[int]) -> list[int]:
        name, all_of = eqn.primitive.name, _union(masks)
        everything = [all_of] * len(eqn.outvars)
        if name in INLINED and name not in _RULES:
            return self.through(opened(eqn.params[INLINED[name]])[0], masks)
        if name == "scan":
            return self._turned(opened(eqn.params["jaxpr"])[0], masks, *scan_groups(eqn))
        if name == "cond":
            branches = [self.through(opened(b)[0], masks[1:]) for b in eqn.params["branches"]]
            return [_union(m) | masks[0] for m in zip(*branches, strict=True)]
        if name not in _RULES:
            for inner in jaxprs_inside(eqn):
                self.through(inner, [all_of] * len(inner.invars))
        return everything

    def _turned(self, body: Jaxpr, masks: Sequence[int], consts: int, carry: int) -> list[int]:
        """The parameters of a loop's results. A carry may depend on more parameters in each iteration."""
        ins = list(masks)
        while True:
            outs = self.through(body, ins)
            grown = [a | b for a, b in zip(ins[consts : consts + carry], outs[:carry], strict=True)]
            if grown == ins[consts : consts + carry]:
                return outs
            ins[consts : consts + carry] = grown


def _union(masks: Sequence[int]) -> int:
    out = 0
    for m in masks:
        out |= m
    return out


def _doubtful(eqn: Eqn) -> str | None:
    """How an op changes the slope, and its line; None if its gradient is the slope of its result."""
    import jax.numpy as jnp

    name = eqn.primitive.name
    if name == "stop_gradient":
        what = "a stopped gradient"
    elif name in _RULES:
        what = "a derivative rule"
    elif name in _ROUNDED or (name == "convert_element_type" and _to_integers(eqn)):
        what = f"a rounded value ({name})"
    elif name in _CHOSEN_BY_ORDER or (
        name in _COMPARED and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.inexact)
    ):
        what = f"a choice ({name})"
    elif name in ("cond", "while"):
        what = "a choice of what runs"
    else:
        return None
    if name in _RULES | {"stop_gradient"} and _by_jax(eqn):
        return (
            None  # softmax subtracts a stopped maximum, which cancels; the rules of JAX's functions are exact
        )
    return f"{what} at {source_line(eqn)}"


def _to_integers(eqn: Eqn) -> bool:
    import jax.numpy as jnp

    was, now = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return bool(jnp.issubdtype(was, jnp.inexact) and not jnp.issubdtype(now, jnp.inexact))


def _by_jax(eqn: Eqn) -> bool:
    """Whether the op is written in one of JAX's own functions (softmax, relu) rather than by the user."""
    import jax

    if eqn.primitive.name == "stop_gradient":
        frames = [] if eqn.source_info.traceback is None else list(eqn.source_info.traceback.frames)
        called = next((k for k, f in enumerate(frames) if f.function_name == "stop_gradient"), len(frames))
        where = frames[called + 1].file_name if called + 1 < len(frames) else ""
    else:
        inner = next(jaxprs_inside(eqn), None)
        written = (
            ""
            if inner is None
            else str(getattr(inner, "debug_info", None) and inner.debug_info.func_src_info)
        )
        where = written.rpartition(" at ")[2]
    return where.startswith(str(Path(jax.__file__).parent))
