"""The versions of JAX that pase reads, and all that differs between their jaxprs.

Whatever looks into a jaxpr asks here, so that a new version of JAX is one file's work:
run the tests with it, mend what differs below, and add it to ``KNOWN`` and to the bounds in ``pyproject.toml``.

- Up to 0.10 a ClosedJaxpr holds an open Jaxpr and its constants; from 0.11 on there is one class for both.
- Up to 0.10 a scan says how many of its operands are constants and carried (num_consts, num_carry); from 0.11 on
  ``ft_in`` holds the operands' three groups.
- ``jax.nn.dot_product_attention`` calls one of two functions of its own module, by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from pase.errors import PaseError

__all__ = [
    "KNOWN",
    "attention_by",
    "check",
    "evaluate",
    "is_dropped",
    "is_literal",
    "opened",
    "scan_groups",
    "source_line",
]

KNOWN = ((0, 10), (0, 11), (0, 12))
"""Minor versions that the tests were run with, oldest first."""


@cache
def check(version: str | None = None) -> None:
    """PaseError where the installed JAX (or ``version``) is older than what is known; one warning where it is newer.

    >>> check("0.12.1")
    >>> check("0.4.30")
    Traceback (most recent call last):
    ...
    pase.errors.PaseError: JAX 0.4.30 is too old: pase reads 0.10 to 0.12. Upgrade it: pip install -U 'pase[jax]'
    """
    if version is None:
        import jax

        version = jax.__version__
    major, minor = (int(part) for part in version.split(".")[:2])
    oldest, newest = (f"{a}.{b}" for a, b in (KNOWN[0], KNOWN[-1]))
    if (major, minor) < KNOWN[0]:
        raise PaseError(
            f"JAX {version} is too old: pase reads {oldest} to {newest}. Upgrade it: pip install -U 'pase[jax]'"
        )
    if (major, minor) > KNOWN[-1]:
        warnings.warn(
            f"JAX {version} is newer than what pase was tested with ({oldest} to {newest}): it is read like {newest}. "
            f"If that fails, install an older one: pip install 'jax<{KNOWN[-1][0]}.{KNOWN[-1][1] + 1}'",
            stacklevel=2,
        )


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr with constvars, invars, eqns and outvars; the values of its constvars) of an open or a closed jaxpr."""
    from jax.extend.core import ClosedJaxpr

    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


def scan_groups(eqn: Any) -> tuple[int, int]:
    """(constants, carried values): a scan's operands are these, in this order, and then what it slices."""
    p = eqn.params
    if "ft_in" in p:
        consts, carry, _ = p["ft_in"].unpack()
        return len(consts), len(carry)
    return p["num_consts"], p["num_carry"]


def is_literal(var: Any) -> bool:
    """A number written into the equation, not a variable."""
    from jax.extend.core import Literal

    return isinstance(var, Literal)


def is_dropped(var: Any) -> bool:
    """A result that nothing reads."""
    return type(var).__name__ == "DropVar"


def source_line(eqn: Any) -> str:
    """The user's line, ``file:line:column (function)``; "" where JAX has lost it, as in a cached inner jaxpr."""
    from jax.extend import source_info_util

    try:
        return source_info_util.summarize(eqn.source_info)
    except AttributeError:
        return ""


Attention = Callable[..., Any]


@contextmanager
def attention_by(stand_in: Callable[[Attention, Attention], Attention], file: str) -> Iterator[None]:
    """JAX's two implementations of attention, each exchanged for ``stand_in(it, that of XLA)`` for a while.

    file: whose lines are not the user's. A version without these functions, which are JAX's own, is left as it is.
    """
    from jax._src import source_info_util
    from jax._src.nn import functions

    source_info_util.register_exclusion(file)
    namespace = vars(functions)
    xla = "_dot_product_attention_xla"
    kept = {n: namespace[n] for n in (xla, "cudnn_dot_product_attention") if n in namespace}
    if xla in kept:
        namespace.update({name: stand_in(f, kept[xla]) for name, f in kept.items()})
    try:
        yield
    finally:
        namespace.update(kept)


def evaluate(eqn: Any, ins: Sequence[Any], info: Any) -> list[Any]:
    """One equation on values (or tracers), None for results that nothing reads; info: the debug info of its jaxpr."""
    from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

    args = {v: x for v, x in zip(eqn.invars, ins, strict=True) if not is_literal(v)}
    kept = [v for v in eqn.outvars if not is_dropped(v)]
    alone = Jaxpr((), list(args), kept, [eqn], eqn.effects, info)
    outs = iter(jaxpr_as_fun(ClosedJaxpr(alone, ()))(*args.values()))
    return [None if is_dropped(v) else next(outs) for v in eqn.outvars]
