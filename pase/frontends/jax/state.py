"""State that a function writes while it is traced: it is handed on, or it is an error. None of it is lost silently.

Equinox and Flax have objects that a function writes, and tracing gives it copies of them: what is written is lost
unless the function returns it. Keras assigns to variables that are no arguments.
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
    """What a function writes while it is traced. called: its name."""

    called: str
    equinox: bool = False
    """Whether an ``equinox.nn.State`` was written."""
    variables: list[tuple[str, Tree, Tree]] = field(default_factory=list)
    """(path, Variable, value that it was given) of Flax NNX Variables among the arguments, as in an ``nnx.State``."""
    states: dict[int, PyTreeDef] = field(default_factory=dict)
    """Argument that is an Equinox State -> its form, which it does not tell after it was written."""

    def given(self, args: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """The arguments as they are; what is written into them from here on is noticed."""
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
        """Batch argument -> where ``out`` has its next value, for arguments that are Equinox States and come back.

        stored: how many arguments are before the batch. PaseError if something that was written does not come back.
        """
        import jax

        kept = {id(x) for x in jax.tree.leaves(out)}
        now = ((path, old, x.get_raw_value()) for path, x, old in self.variables)
        if lost := [path for path, old, new in now if new is not old and id(new) not in kept]:
            raise PaseError(
                f"{self.called} writes Variables of an nnx.State that it is given and does not return them, so that "
                f"each step would begin with the old ones: {', '.join(lost[:3])}{', …' if len(lost) > 3 else ''}. Give "
                f"the module itself, pase.compile(loss, model, …), whose Variables go in and out by themselves; or "
                f"return nnx.state(model, …) beside the loss and name it in carry=; or, if they shall be lost, merge a "
                f"copy: nnx.merge(…, copy=True)"
            )
        found = jax.tree_util.tree_flatten_with_path(out, is_leaf=_is_state)[0]
        back = [(_place(path), jax.tree.structure(x)) for path, x in found if _is_state(x)]
        if self.equinox and not back:
            raise PaseError(
                f"{self.called} writes an equinox.nn.State and does not return it, so that each step would begin with "
                f"the old one: make it loss(model, state, …) -> (loss, state), or use eqx.nn.inference_mode(model)"
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
    """Notices, within it, what a function that JAX traces writes. PaseError if it assigns to Keras's variables."""
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
    """Within it, this thread's calls of a method call ``before`` with its arguments first, and return what ``after``
    makes of the result and the arguments; of None, the result."""
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
            f"{called} assigns to Keras's variable '{getattr(variable, 'path', variable)}', whose value would be lost "
            f"after the step: call model.stateless_call(trainable, non_trainable, …), take the non-trainable variables "
            f"as an argument, return their next values beside the loss, and name both in carry="
        )
