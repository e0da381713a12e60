"""Finds new state that a function computes but does not return: the next values of Linen's and Haiku's collections, of
Keras's variables, and of Flax NNX Variables.

JAX drops such values silently: batch statistics never change, or each step draws the same random numbers. The program
is traced once more with a name on each new value. The names that remain after removing dead code were returned.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pase.frontends.jax.state import watched
from pase.frontends.jax.versions import closed, jaxprs_inside, without_dead_code
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.frontends.jax.types import ClosedJaxpr, Jaxpr
    from pase.ops import GraphBuilder

__all__ = ["StateWrites", "say_dropped", "state_writes"]

_NAME = "pase: new state "
_REPORTED_ONLY = frozenset({"intermediates", "perturbations"})
"""Linen's collections of values that are only reported and not passed on."""


@dataclass(kw_only=True)
class StateWrites:
    """The new values of state that were computed while a function was traced. naming: whether each gets a name."""

    naming: bool
    found: dict[int, str] = field(default_factory=dict)
    """Number of the name -> the state that the value belongs to, in words."""
    variables: dict[int, tuple[Tree, int]] = field(default_factory=dict)
    """id -> (an NNX Variable, the number of its last value)."""
    fresh: dict[int, Tree] = field(default_factory=dict)
    """id -> an NNX Variable that the function itself creates."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def new(self, of: str, before: Tree, after: Tree) -> Tree:
        """The new value with a name. Leaves that are identical to those of ``before`` were not written."""
        import jax

        old = {id(x) for x in jax.tree.leaves(before)}
        return jax.tree.map(lambda x: x if id(x) in old else self._named(of, x), after)

    def _named(self, of: str, x: Tree) -> Tree:
        import jax
        from jax.ad_checkpoint import checkpoint_name

        if not isinstance(x, jax.core.Tracer):
            return x
        number = self._noted(of)
        return checkpoint_name(x, f"{_NAME}{number}") if self.naming else x

    def _noted(self, of: str) -> int:
        number = next(self.numbers)
        self.found[number] = of
        return number

    def written(self, variable: Tree) -> None:
        """Records that a value was assigned to an NNX Variable."""
        import jax

        if id(variable) in self.fresh:
            return
        value, of = variable.get_raw_value(), f"Variables of Flax NNX ({type(variable).__name__})"
        if isinstance(value, jax.core.Tracer):
            object.__setattr__(variable, "_raw_value", self._named(of, value))
        else:
            self._noted(of)  # it depends on no argument, so each step computes the same
        if (earlier := self.variables.get(id(variable))) is not None:
            del self.found[earlier[1]]
        self.variables[id(variable)] = variable, max(self.found)

    def dropped(self, program: ClosedJaxpr, out: Sequence[Tree]) -> tuple[str, ...]:
        """The state, in words, of which no value reaches the program's results.

        out: the results as the function returned them. If a model is called several times, the function may return the
        state of only one of the calls.
        """
        kept = set(_names(without_dead_code(program).jaxpr))
        returned = {id(x) for x in out}
        constant = {n for v, n in self.variables.values() if id(v.get_raw_value()) in returned}
        handed_on = {of for n, of in self.found.items() if n in kept | constant}
        return tuple(dict.fromkeys(of for of in self.found.values() if of not in handed_on))


def _names(jaxpr: Jaxpr) -> Iterator[int]:
    for eqn in jaxpr.eqns:
        name = str(eqn.params.get("name", "")) if eqn.primitive.name == "name" else ""
        if name.startswith(_NAME):
            yield int(name.removeprefix(_NAME))
        for inner in jaxprs_inside(eqn):
            yield from _names(without_dead_code(closed(inner)).jaxpr)


@contextmanager
def state_writes(*, naming: bool) -> Iterator[StateWrites]:
    """A context that records the new state that functions compute on this thread."""
    writes = StateWrites(naming=naming)
    with ExitStack() as patches:

        def after(owner: type, method: str, then: Callable[..., Tree]) -> None:
            patches.enter_context(watched(owner, method, after=then))

        if (linen := sys.modules.get("flax.linen")) is not None:
            after(linen.Module, "apply", lambda out, *args, **kw: _of_linen(writes, out, *args, **kw))
        if (nnx := sys.modules.get("flax.nnx")) is not None:
            after(nnx.Variable, "__init__", lambda out, v, *_, **kw: writes.fresh.update({id(v): v}))
            after(nnx.Variable, "set_value", lambda out, v, *_, **kw: writes.written(v))
        if (keras := sys.modules.get("keras")) is not None and keras.backend.backend() == "jax":
            after(keras.Layer, "stateless_call", lambda out, *args, **kw: _of_keras(writes, out, *args, **kw))
        if (haiku := sys.modules.get("haiku._src.base")) is not None:
            after(haiku.HaikuContext, "collect_state", lambda out, context: _of_haiku(writes, out, context))
        yield writes


def _of_linen(
    writes: StateWrites,
    out: Tree,
    module: Tree,
    variables: Tree,
    *args: Tree,
    mutable: Tree = False,
    **kw: Tree,
) -> Tree:
    """The result of ``Module.apply``, with names on the next values of the collections that were passed to it."""
    if mutable is False:
        return out
    value, new = out
    own = [k for k in new if k in variables and k not in _REPORTED_ONLY]
    named = {
        k: writes.new(f"the collection '{k}' of {type(module).__name__} (Flax Linen)", variables[k], new[k])
        for k in own
    }
    return value, new | named if isinstance(new, dict) else new.copy(named)


def _of_keras(
    writes: StateWrites, out: Tree, model: Tree, trained: Tree, rest: Tree, *args: Tree, **kw: Tree
) -> Tree:
    """The result of ``stateless_call``: (outputs, the next non-trainable variables, …), with names on the variables."""
    value, new, *more = out
    return value, writes.new(f"the non-trainable variables of '{model.name}' (Keras)", rest, new), *more


def _of_haiku(writes: StateWrites, out: Tree, context: Tree) -> Tree:
    """The next state of a function that ``transform_with_state`` made, with names on its values."""
    return writes.new("the state of a transformed function (Haiku)", context.collect_initial_state(), out)


def say_dropped(b: GraphBuilder, dropped: Sequence[str]) -> None:
    """Warns, and adds a remark, for each kind of state whose next value the function drops."""
    for what in dropped:
        text = (
            f"{b.name} computes new values of {what} but does not return them, so that every step begins with the old "
            f"values, as in plain JAX. {_INSTEAD_NNX if 'NNX' in what else _INSTEAD}"
        )
        b.remark("state", text)
        warnings.warn(text, stacklevel=4)


_INSTEAD = (
    "Take the state as an argument, return its next value beside the loss, loss(params, batch, state) -> (loss, "
    "state), and compile with carry={1: 1}"
)
_INSTEAD_NNX = (
    "Pass the module itself, pase.compile(loss, model, …), whose Variables are passed and returned automatically; or "
    "return nnx.state(model, …) beside the loss and name it in carry="
)
