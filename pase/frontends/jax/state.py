"""State that a function writes while it is traced. The function must return it; otherwise tracing raises an error.

Equinox and Flax have mutable objects. Tracing gives a function copies of them, so that what it writes is lost unless it
returns them. Keras assigns to variables that are not arguments.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING
from unittest.mock import patch

from pase.errors import PaseError
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef

__all__ = ["WrittenState", "watched", "written_state"]


@dataclass(kw_only=True)
class WrittenState:
    """What a function writes while it is traced. called: the function's name."""

    called: str
    equinox: bool = False
    """Whether an ``equinox.nn.State`` was written."""
    variables: list[tuple[str, Tree, Tree]] = field(default_factory=list)
    """(path, Variable, its value before) of the Flax NNX Variables among the arguments, as in an ``nnx.State``."""
    states: dict[int, PyTreeDef] = field(default_factory=dict)
    """Argument that is an Equinox State -> its treedef, which is no longer available after it was written."""

    def given(self, args: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """Returns the arguments unchanged, and records them so that later writes into them are found."""
        import jax

        self.states = {k: jax.tree.structure(x) for k, x in enumerate(args) if _is_state(x)}
        leaves = jax.tree_util.tree_flatten_with_path(args, is_leaf=_is_variable)[0]
        self.variables = [
            (jax.tree_util.keystr(path[1:], simple=True, separator="."), x, x.get_raw_value())
            for path, x in leaves
            if _is_variable(x)
        ]
        return args

    def carried(self, out: Tree, stored: int) -> dict[int, Tree]:
        """Batch argument -> where ``out`` has its next value, for arguments that are Equinox States and are returned.

        stored: the number of arguments before the batch. Raises PaseError if something was written but not returned.
        """
        import jax

        kept = {id(x) for x in jax.tree.leaves(out)}
        now = ((path, old, x.get_raw_value()) for path, x, old in self.variables)
        if lost := [path for path, old, new in now if new is not old and id(new) not in kept]:
            raise PaseError(
                f"it writes Variables of an nnx.State that is passed to it, but does not return them, so that each "
                f"step would begin with the old values: {', '.join(lost[:3])}{', …' if len(lost) > 3 else ''}",
                where=self.called,
                fix="pass the module itself, pase.compile(loss, model, …), whose Variables are passed and returned "
                "automatically; or return nnx.state(model, …) beside the loss and name it in carry=; or, if they may "
                "be lost, merge a copy: nnx.merge(…, copy=True)",
            )
        found = jax.tree_util.tree_flatten_with_path(out, is_leaf=_is_state)[0]
        back = [(_place(path), jax.tree.structure(x)) for path, x in found if _is_state(x)]
        if self.equinox and not back:
            raise PaseError(
                "it writes an equinox.nn.State but does not return it, so that each step would begin with the old "
                "state",
                where=self.called,
                fix="write it as loss(model, state, …) -> (loss, state), or use eqx.nn.inference_mode(model)",
            )
        same = {k: [at for at, form in back if form == mine] for k, mine in self.states.items()}
        return {k - stored: at[0] for k, at in same.items() if len(at) == 1 and k >= stored}


def _place(path: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(getattr(k, "key", getattr(k, "idx", getattr(k, "name", None))) for k in path)


def _is_state(x: object) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(x, equinox.nn.State)


def _is_variable(x: object) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Variable)


@contextmanager
def written_state(called: str) -> Iterator[WrittenState]:
    """A context that records what a traced function writes. Raises PaseError if it assigns to Keras's variables."""
    found = WrittenState(called=called)

    def note(*_: object) -> None:
        found.equinox = True

    with ExitStack() as patches:
        if (equinox := sys.modules.get("equinox")) is not None:
            patches.enter_context(watched(equinox.nn.State, "set", before=note))
        if (keras := sys.modules.get("keras")) is not None and keras.backend.backend() == "jax":
            patches.enter_context(
                watched(keras.Variable, "_direct_assign", before=partial(_refuse_keras, called))
            )
        yield found


def watched(
    cls: type,
    name: str,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., Tree] | None = None,
) -> AbstractContextManager[object]:
    """A context in which calls of a method on this thread are observed.

    before: called with the method's arguments before each call.
    after: called with the result and the arguments after each call. What it returns replaces the result, unless None.
    """
    theirs, thread = getattr(cls, name), threading.get_ident()

    @wraps(theirs)
    def method(*args: Tree, **kwargs: Tree) -> Tree:
        if threading.get_ident() != thread:
            return theirs(*args, **kwargs)
        if before is not None:
            before(*args)
        out = theirs(*args, **kwargs)
        if after is None or (made := after(out, *args, **kwargs)) is None:
            return out
        return made

    return patch.object(cls, name, method)


def _refuse_keras(called: str, variable: Tree, new: Tree) -> None:
    import jax

    if isinstance(new, jax.core.Tracer):
        raise PaseError(
            f"it assigns to Keras's variable '{getattr(variable, 'path', variable)}', whose value would be lost after "
            f"the step",
            where=called,
            fix="call model.stateless_call(trainable, non_trainable, …), take the non-trainable variables as an "
            "argument, return their next values beside the loss, and name both in carry=",
        )
