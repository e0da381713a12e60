"""What a program is for (training, inference, or a complete train step), and what it passes to its next call."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pase.errors import PaseError
from pase.frontends.jax import attention
from pase.frontends.jax import leaves as jax_leaves
from pase.frontends.jax.dropped import state_writes
from pase.frontends.jax.modules import ModuleFunction
from pase.frontends.jax.state import written_state
from pase.frontends.jax.types import ClosedJaxpr
from pase.frontends.signature import argument_names
from pase.pytree import Tree

__all__ = [
    "Carry",
    "JaxProgram",
    "Mode",
    "check_order",
    "name_of",
    "program_of",
    "threaded",
]

Mode = Literal["train", "inference", "step"]
"""train: ``fn(params, *batch)`` returns a loss or (loss, aux); its gradient and the update are priced with it.
inference: ``fn(params, *inputs)`` returns anything; nothing is trained.
step: ``fn(params, opt_state, *batch) -> (params, opt_state, …)`` is a whole train step, including gradient and
update. Instead of the first two there may be one state that has both, such as Flax's ``TrainState`` or the state of a
split NNX model and optimizer: ``fn(state, *batch) -> (state, …)``, or ``-> state``."""

Carry = Mapping[int, Tree]
"""Batch argument (0 is the first after the parameters, or in a step, after the optimizer state) -> where the function
returns its next value: an index, a key, or a tuple of them."""


def _next_values(mode: Mode, args: tuple[Tree, ...], out: Tree) -> dict[int, tuple[int, ...]]:
    """Argument of a step -> where the step returns its next value; nothing for another program. Raises PaseError if it
    is no step. args, out: pytrees that contain only arrays."""
    if mode != "step":
        return {}
    if (at := _next_state(args, out)) is not None:
        return {0: at}
    if _is_state(args[0]):
        raise PaseError(
            f"it takes a {type(args[0]).__name__}, but does not return its next value",
            where="mode='step'",
            fix="write it as step(state, *batch) -> (state, …), or -> state",
        )
    if not isinstance(out, tuple) or len(args) < 2 or len(out) < 2:
        raise PaseError(
            "the function is no train step",
            where="mode='step'",
            fix="write it as step(params, opt_state, *batch) -> (params, opt_state, …), or with one state that has "
            "both: step(state, *batch) -> (state, …)",
        )
    return {0: (0,), 1: (1,)}


def _is_state(x: Tree) -> bool:
    """Whether it has parameters and optimizer state in one, as Flax's TrainState."""
    return hasattr(x, "params") and hasattr(x, "opt_state")


def _next_state(args: tuple[Tree, ...], out: Tree) -> tuple[int, ...] | None:
    """Where a step returns the next value of its first argument, if that is its whole state; else None.

    A state that is not known by its attributes is whole if it is all that the step returns, or if only scalars follow
    it (a loss, metrics) where the next value of the second argument would be.
    """
    import jax

    first, *rest = out if isinstance(out, tuple) and out else (None,)
    if _is_state(args[0]):
        return () if _is_state(out) else (0,) if _is_state(first) else None
    if _form(out) == _form(args[0]) and not (rest and len(args) > 1 and _form(rest[0]) == _form(args[1])):
        return ()
    if first is None or _form(first) != _form(args[0]):
        return None
    if not rest or len(args) < 2:
        return (0,)
    told = all(x.shape == () for x in jax.tree.leaves(rest[0]))
    return (0,) if told and any(x.shape for x in jax.tree.leaves(args[1])) else None


def _form(tree: Tree) -> tuple[Tree, list[Tree]]:
    import jax

    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def threaded(
    following: Mapping[int, tuple[int, ...]],
    carry: Carry | None,
    args: tuple[Tree, ...],
    out: Tree,
    partly: bool = False,
) -> dict[int, int]:
    """Input leaf -> the output leaf that is its next value. args, out: pytrees that contain only arrays.

    following: the part of it that a step has by itself, as from ``_next_values``.
    partly: whether None in place of a next value means that the leaf has none, as with ``ModuleFunction``.

    Raises PaseError if an argument and its next value differ in structure, shape or dtype.
    """
    import jax

    stored = len(following) or 1
    pairs = {stored + k: at if isinstance(at, tuple) else (at,) for k, at in (carry or {}).items()}
    pairs |= following
    first = [0]
    for arg in args:
        first.append(first[-1] + len(jax.tree.leaves(arg)))
    numbered = jax.tree.unflatten(jax.tree.structure(out), list(range(len(jax.tree.leaves(out)))))
    leaves = jax.tree.leaves(out)
    found: dict[int, int] = {}

    def mismatch(k: int, what: str, like: str) -> PaseError:
        """like: what argument and next value must have in common."""
        counts = (
            ""
            if k in following
            else "; if carry={…} names it: it counts arguments after the parameters, from 0"
        )
        return PaseError(what, where=f"argument {k}", fix=f"return a next value of the same {like}{counts}")

    for k, at in pairs.items():
        if not 0 <= k < len(args):
            raise PaseError(
                f"it names batch argument {k - stored}, but there are {len(args) - stored}",
                where="carry",
                fix="count the arguments after the parameters from 0 (in a step, those after the optimizer state)",
            )
        inside = numbered
        try:
            for key in at:
                inside = inside[key]
        except (KeyError, IndexError, TypeError) as e:
            raise PaseError(
                f"the function returns nothing at {at}",
                where="carry",
                fix="give the index, the key, or the tuple of them at which the function returns the next value",
            ) from e
        absent = (lambda x: x is None) if partly else None
        given, new = jax.tree.leaves(args[k]), jax.tree.leaves(inside, is_leaf=absent)
        form: Tree = jax.tree.structure(args[k])
        if form != jax.tree.structure(inside, is_leaf=absent):
            raise mismatch(
                k,
                f"it has the structure {form}, but its next value, which the function returns at {at}, has "
                f"{jax.tree.structure(inside)}",
                "structure",
            )
        for i, (x, j) in enumerate(zip(given, new, strict=True)):
            if j is None:
                continue
            y = leaves[j]
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                raise mismatch(
                    k,
                    f"it has a leaf {x.dtype}{list(x.shape)}, but its next value, which the function returns at {at}, "
                    f"is {y.dtype}{list(y.shape)}",
                    "shape and dtype",
                )
            found[first[k] + i] = j
    return found


def name_of(fn: Tree) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


@dataclass(frozen=True, kw_only=True)
class JaxProgram:
    """A function's jaxpr, and the static leaves of its arguments and results."""

    jaxpr: ClosedJaxpr
    kept: Tree
    """The arguments' static leaves."""
    out_tree: Tree
    """The treedef of what it returns; for a loss, of (loss, aux)."""
    kept_out: Tree
    """The static leaves of what it returns."""
    stored: int
    """How many of the first arguments are what a call passes to the next one, or does not change: parameters, and in a
    step also the optimizer state, which may be one argument with the parameters."""
    carried: dict[int, int]
    """Input leaf -> the output leaf that is its next value."""
    dropped: tuple[str, ...] = ()
    """The state whose next value the function computes but does not return, in words."""


def program_of(
    fn: Callable[..., Tree], args: tuple[Tree, ...], as_shapes: Tree, mode: Mode, carry: Carry | None
) -> JaxProgram:
    """Traces the function. Raises PaseError if JAX cannot trace it or if it returns no loss. The user's own exceptions
    propagate, with a note of what was traced."""
    import jax

    kept, called = jax_leaves.static(args), name_of(fn)
    static_out: list[Tree] = []
    stored: list[int] = []
    threads: dict[Tree, Tree] = {}

    def run(*arrays: Tree) -> Tree:
        with written_state(called) as state:
            out = fn(*state.given(jax_leaves.combine(arrays, kept)))
        only_arrays = jax_leaves.arrays(out)
        following = _next_values(mode, arrays, only_arrays)
        stored.append(len(following) or 1)
        named = {**state.carried(out, stored[-1]), **(carry or {})}
        found = threaded(following, named, arrays, only_arrays, isinstance(fn, ModuleFunction))
        out = jax_leaves.loss_and_aux(out) if mode == "train" else out
        # Leaves before those of the result: the loss, if the function returns it inside a dict.
        before = len(jax.tree.leaves(jax_leaves.arrays(out))) - len(jax.tree.leaves(only_arrays))
        threads.update({i: j + before for i, j in found.items()})
        static_out.append(jax_leaves.static(out))
        return jax_leaves.arrays(out)

    returned: list[Tree] = []

    def again(*arrays: Tree) -> Tree:
        returned.append(run(*arrays))
        return returned[-1]

    try:
        with attention.named(), state_writes(naming=False) as writes:
            closed, shapes = jax.make_jaxpr(run, return_shape=True)(*as_shapes)
        dropped: tuple[str, ...] = ()
        if writes.found and not isinstance(
            fn, ModuleFunction
        ):  # all Variables of a ModuleFunction are returned
            with attention.named(), state_writes(naming=True) as writes:
                dropped = writes.dropped(jax.make_jaxpr(again)(*as_shapes), jax.tree.leaves(returned))
    except (TypeError, ValueError, NotImplementedError) as e:
        if isinstance(e, PaseError):
            raise
        raise PaseError(f"JAX cannot trace {called} on these shapes: {e}", where=_users_line(e)) from e
    except Exception as e:
        if "cudnn" in str(e).lower():
            raise PaseError(
                f"it calls a kernel of cuDNN itself, which JAX traces only if it finds a GPU ({e})",
                where=called,
                fix="ask for it by jax.nn.dot_product_attention(..., implementation='cudnn'), which is read anywhere",
            ) from e
        line = _users_line(e)
        e.add_note(
            f"raised while pase traced {called} on the shapes of its arguments{line and f', in {line}'}"
        )
        raise
    if mode == "train":
        _check_loss(called, closed.out_avals, as_shapes, shapes, carry)
    return JaxProgram(
        jaxpr=closed,
        kept=kept,
        out_tree=jax.tree.structure(shapes),
        kept_out=static_out[-1],
        stored=stored[-1],
        carried=threads,
        dropped=dropped,
    )


def _users_line(e: BaseException) -> str:
    """The innermost line of the user's own files in which an exception was raised, "" if there is none."""
    packages = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    packages.append(Path(__file__).parents[2])
    for f in reversed(traceback.extract_tb(e.__traceback__)):
        if not f.filename.startswith("<") and not any(p in Path(f.filename).parents for p in packages):
            return f"{f.filename}:{f.lineno}"
    return ""


def _check_loss(called: str, outs: Sequence[Tree], args: Tree, returned: Tree, carry: Carry | None) -> None:
    """Raises PaseError unless the function returns a loss first, and no parameters besides it except those in
    ``carry``.

    A result with the structure of the parameters may be the next value of a batch argument with that structure, for
    example of statistics with one entry per weight.
    """

    if not outs or outs[0].shape != ():
        got = ", ".join(str(a) for a in outs[:4]) or "nothing"
        raise PaseError(
            f"it returns {got}: pase needs a scalar loss, or a tuple whose first leaf is the scalar loss",
            where=called,
            fix="for a program without a loss, use mode='inference' or mode='step'",
        )
    if "float" not in str(outs[0].dtype):
        raise PaseError(
            f"it returns a {outs[0].dtype} scalar, but a loss must be floating-point",
            where=called,
            fix="cast the loss to a floating-point dtype",
        )

    mine, *batch = map(_form, args)
    parts = returned[1] if isinstance(returned[1], tuple) else (returned[1],)
    again = [_form(part) for part in parts].count(mine) > batch.count(mine)
    if again and len(mine[1]) > 1 and not carry:
        raise PaseError(
            "it returns new parameters beside a scalar: it is a train step and not a loss",
            where=called,
            fix="pass the loss function; or write the step as step(params, opt_state, *batch) -> (params, opt_state, "
            "…) and use mode='step'",
        )


def check_order(fn: Tree, count: int) -> None:
    """Raises PaseError if the names of the arguments show that parameters do not come first. The batch would otherwise
    be trained."""
    names = argument_names(fn, count)
    late = [n for n in names[1:] if n in _PARAMETERS]
    if names[0] in _BATCH and late:
        raise PaseError(
            f"its parameters are in '{late[0]}', but the first argument is what is trained",
            where=f"{name_of(fn)}({', '.join(names)})",
            fix=f"write it as fn({late[0]}, …)",
        )


_PARAMETERS = frozenset({"params", "parameters", "param", "weights", "variables", "theta"})
_BATCH = frozenset(
    {
        "batch",
        "x",
        "xs",
        "data",
        "inputs",
        "input",
        "images",
        "image",
        "tokens",
        "examples",
        "input_ids",
        "ids",
    }
)
