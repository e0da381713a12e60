"""The walk over the user's jaxpr that both lowerings share: equation by equation, as the frontend walked it.

A lowering says what stands for a value, and how single equations, loops and branches run. Calls are entered, and blocks
that backward recomputes are put into ``jax.checkpoint``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

from pase.backends.jax.ops.draws import Examples
from pase.backends.jax.ops.jaxprs import KEPT, REMATERIALISED, boundary
from pase.backends.jax.ops.totals import Totals
from pase.frontends.jax.control import by_platform, on_every_platform
from pase.frontends.jax.frontend import TracedJax, inlined, inner_jaxpr
from pase.frontends.jax.types import Eqn, Jaxpr, Var
from pase.frontends.jax.versions import is_literal, literal_array
from pase.ir import Place
from pase.ir.blocks import Block
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array

    from pase.frontends.jax.versions import DebugInfo

__all__ = ["JaxprWalk"]

V = TypeVar("V")
"""What stands for a value."""
S = TypeVar("S")
"""What is remembered in the body of a loop, a branch or a recomputed region."""


@dataclass(frozen=True, kw_only=True)
class JaxprWalk(ABC, Generic[V, S]):
    """One walk over the jaxpr. It runs under a JAX trace.

    blocks: the equations that backward recomputes. kept: the equations in these blocks whose results are residuals.
    examples: those of the micro-batch, if random numbers are drawn for them. totals: the sums over the whole batch, if
    the micro-batch reads any.
    """

    traced: TracedJax
    blocks: Sequence[Block]
    kept: frozenset[Place]
    examples: Examples | None = None
    totals: Totals | None = None

    @abstractmethod
    def constant(self, array: Array) -> V: ...

    @abstractmethod
    def changed(self, value: V, change: Callable[[Array], Array]) -> V:
        """The value with another array."""

    @abstractmethod
    def packed(self, values: Sequence[V]) -> list[Tree]:
        """The values as a pytree of arrays."""

    @abstractmethod
    def unpacked(self, values: Sequence[V], arrays: Sequence[Tree]) -> list[V]:
        """The values with other arrays. arrays: as ``packed`` returns them."""

    @abstractmethod
    def inside(self, path: str) -> S:
        """What is remembered in a body, when it is entered. path: of its equations."""

    def entered(self, values: Sequence[V], state: S) -> None:
        """Called with the values that are passed into a body."""

    @abstractmethod
    def located(self, eqn: Eqn, at: Place) -> AbstractContextManager[None]:
        """A context in which an equation runs, which names it in errors."""

    @abstractmethod
    def single(self, eqn: Eqn, ins: Sequence[V], at: Place, state: S) -> Sequence[V]:
        """Run an equation without loops, branches or calls that are entered."""

    @abstractmethod
    def scan(self, eqn: Eqn, ins: Sequence[V], at: Place, state: S) -> Sequence[V]: ...

    @abstractmethod
    def loop(self, eqn: Eqn, ins: Sequence[V], at: Place, state: S) -> Sequence[V]:
        """Run a while loop."""

    @abstractmethod
    def branches(self, eqn: Eqn, ins: Sequence[V], at: Place, state: S) -> Sequence[V]:
        """Run a conditional."""

    @property
    def only_finds(self) -> bool:
        """Whether this walk only finds the micro-batch's own sums, so that nothing has to be recomputed."""
        return self.totals is not None and self.totals.finds

    @cached_property
    def info(self) -> DebugInfo:
        return self.traced.jaxpr.jaxpr.debug_info._replace(arg_names=None, result_paths=None)

    def run(self, jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[V], prefix: str, state: S) -> list[V]:
        """Run the equations of a jaxpr. prefix: of their places. state: of the body that contains them."""
        env: dict[Var, V] = {v: self.constant(c) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        env.update(zip(jaxpr.invars, args, strict=True))
        self.entered(args, state)
        self.span(jaxpr, env, 0, len(jaxpr.eqns), prefix, state)
        return [self.value(v, env) for v in jaxpr.outvars]

    def value(self, key: Tree, env: Mapping[Tree, V]) -> V:
        """The value of a variable or literal."""
        return self.constant(literal_array(key)) if is_literal(key) else env[key]

    def span(self, jaxpr: Jaxpr, env: dict[Var, V], start: int, stop: int, prefix: str, state: S) -> None:
        """Run the equations ``start`` … ``stop - 1``, and add their results to env (variable -> value)."""
        i = start
        while i < stop:
            block = next((b for b in self.blocks if b.prefix == prefix and b.start == i), None)
            if block is None or self.only_finds:
                self._one(jaxpr, i, env, prefix, state)
                i += 1
            else:
                self._recompute(jaxpr, block, env)
                i = block.stop

    def _one(self, jaxpr: Jaxpr, i: int, env: dict[Var, V], prefix: str, state: S) -> None:
        """Run one equation, and add its results to env."""
        from jax.ad_checkpoint import checkpoint_name

        eqn, at = jaxpr.eqns[i], Place(f"{prefix}{i}")
        with self.located(eqn, at):
            outs = self._equation(eqn, [self.value(v, env) for v in eqn.invars], at, state)
        if at in self.kept:
            outs = [self.changed(v, lambda x: checkpoint_name(x, KEPT)) for v in outs]
        env.update(zip(eqn.outvars, outs, strict=True))

    def _equation(self, eqn: Eqn, ins: Sequence[V], at: Place, state: S) -> Sequence[V]:
        if inlined(eqn):
            return self.call(eqn, ins, f"{at.path}.", state)
        if (taken := on_every_platform(eqn)) is not None:
            return self.run(*taken, ins[1:], f"{at.path}.", state)
        if eqn.primitive.name == "scan":
            return self.scan(eqn, ins, at, state)
        if eqn.primitive.name == "while":
            return self.loop(eqn, ins, at, state)
        if eqn.primitive.name == "cond" and not by_platform(eqn):
            return self.branches(eqn, ins, at, state)
        return self.single(eqn, ins, at, state)

    def _recompute(self, jaxpr: Jaxpr, block: Block, env: dict[Var, V]) -> None:
        """Run a block that backward recomputes, and add its results to env."""
        import jax

        reads, makes = boundary(jaxpr, block)
        given, made = [env[v] for v in reads], list[V]()

        def body(*arrays: Tree) -> list[Tree]:
            inside, arrived = self.inside(block.region.path), self.unpacked(given, arrays)
            mine = env | dict(zip(reads, arrived, strict=True))
            self.entered(arrived, inside)
            for j in range(block.start, block.stop):
                self._one(jaxpr, j, mine, block.prefix, inside)
            made[:] = [mine[v] for v in makes]
            return self.packed(made)

        # If the block is the whole body of a loop, XLA has nothing that it could merge the recomputation with.
        alone = block.stop - block.start == len(jaxpr.eqns) and block.prefix != ""
        keeps = jax.checkpoint_policies.save_only_these_names(KEPT) if block.recompute == "light" else None
        arrays = jax.checkpoint(body, prevent_cse=not alone, policy=keeps)(*self.packed(given))
        env.update(zip(makes, self.unpacked(made, arrays), strict=True))

    def call(self, eqn: Eqn, ins: Sequence[V], prefix: str, state: S) -> Sequence[V]:
        """Run the equations of a call. Those of a recomputed region of the user's are recomputed."""
        import jax

        jaxpr, consts = inner_jaxpr(eqn)
        if self.only_finds or eqn.primitive.name not in REMATERIALISED:
            return self.run(jaxpr, consts, ins, prefix, state)
        made: list[V] = []

        def body(*arrays: Tree) -> list[Tree]:
            made[:] = self.run(jaxpr, consts, self.unpacked(ins, arrays), prefix, self.inside(prefix))
            return self.packed(made)

        p = eqn.params
        arrays = jax.checkpoint(body, prevent_cse=p["prevent_cse"], policy=p["policy"])(*self.packed(ins))
        return self.unpacked(made, arrays)
