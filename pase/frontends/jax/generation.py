"""Prefill and decode as one model: two programs that share parameters and the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pase.errors import PaseError
from pase.frontends.jax.types import ClosedJaxpr
from pase.frontends.jax.versions import opened
from pase.frontends.signature import argument_names
from pase.pytree import Tree

__all__ = ["Generation", "programs_of"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Text generation: ``prefill(params, *prompt) -> (token, cache)``, followed by ``tokens`` calls of
    ``decode(params, token, cache)``, which returns the same.

    token and cache may be any pytrees, with the same shapes each time. Parameters are stored once for both programs. So
    is the cache between them, in the layout that its next reader needs. The priced step is one prefill and ``tokens``
    decoding steps.
    """

    prefill: Callable[..., Tree]
    decode: Callable[..., Tree]
    tokens: int

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or self.tokens < 1:
            raise PaseError(
                f"it is the number of decoding steps per prefill, and cannot be {self.tokens!r}",
                where="tokens",
                fix="pass a positive whole number",
            )

    def argument_names(self, count: int) -> tuple[str, ...]:
        return (*argument_names(self.prefill, count - 2), "token", "cache")

    def state(self, params: Tree, prompt: Sequence[Tree]) -> tuple[Tree, Tree]:
        """The shapes of (token, cache) that prefill returns."""
        import jax

        made = jax.eval_shape(lambda *args: self.prefill(*args), params, *prompt)
        if not isinstance(made, tuple) or len(made) != 2:
            raise PaseError(
                f"it returns {type(made).__name__}",
                where="prefill",
                fix="return (token, cache), a tuple of two",
            )
        return made

    def __call__(self, params: Tree, *given: Tree) -> tuple[Tree, Tree]:
        """Prefill's result for the prompt, and decode's result for (token, cache). given: (*prompt, token, cache)."""
        import jax

        *prompt, token, cache = given

        def prefill(*args: Tree) -> Tree:
            return self.prefill(*args)

        def decode(*args: Tree) -> Tree:
            return self.decode(*args)

        return jax.jit(prefill)(params, *prompt), jax.jit(decode)(params, token, cache)

    @property
    def __name__(self) -> str:
        return f"{getattr(self.decode, '__name__', 'decode')}"


def programs_of(fn: Tree, jaxpr: ClosedJaxpr) -> Mapping[str, int]:
    """Path of each program's equations -> how often it runs. Empty if the model is one program."""
    if not isinstance(fn, Generation):
        return {}
    eqns = opened(jaxpr)[0].eqns
    if [e.params.get("name") for e in eqns] != ["prefill", "decode"]:
        raise PaseError(
            "prefill or decode computes nothing from its arguments",
            where="pase.Generation",
            fix="make each depend on its arguments",
        )
    return {"0.": 1, "1.": fn.tokens}
