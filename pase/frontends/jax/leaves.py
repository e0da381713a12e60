"""The leaves of a user's pytrees: arrays, static leaves, and which arrays are trained.

Equinox modules have functions, flags and numbers among their leaves; these are static, as in ``equinox.filter_jit``.
Integers, keys and booleans are arrays that are passed along but not differentiated. ``None`` replaces a leaf that was
removed, so that trees keep their structure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from pase.pytree import Tree

__all__ = ["arrays", "combine", "loss_and_aux", "static", "trained", "untrained", "value_and_grad"]


def _is_module(x: object) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(x, equinox.Module)


def _is_array(x: object) -> bool:
    import jax

    return hasattr(x, "shape") and hasattr(x, "dtype") and x.dtype != jax.dtypes.float0


def _where(keep: Callable[[Tree], bool], tree: Tree) -> Tree:
    import jax

    return jax.tree.map(lambda x: x if keep(x) else None, tree)


def _is_float0(x: object) -> bool:
    import jax

    return getattr(x, "dtype", None) == jax.dtypes.float0


def _parted(tree: Tree, wanted: bool) -> Tree:
    """The arrays of a tree, or the other leaves. Numbers outside modules count as arrays."""
    import jax

    def part(x: Tree) -> Tree:
        if _is_module(x):
            return _where(lambda leaf: _is_array(leaf) == wanted, x)
        return x if wanted != _is_float0(x) else None

    return jax.tree.map(part, tree, is_leaf=_is_module)


def arrays(tree: Tree) -> Tree:
    """The tree without its static leaves."""
    return _parted(tree, True)


def static(tree: Tree) -> Tree:
    """The tree's static leaves only."""
    return _parted(tree, False)


def trained(tree: Tree) -> Tree:
    """The floating-point leaves of a tree of arrays, or of their shapes."""
    return _where(_is_trained, tree)


def untrained(tree: Tree) -> Tree:
    """The leaves that ``trained`` leaves out."""
    return _where(lambda x: not _is_trained(x), tree)


def _is_trained(x: object) -> bool:
    import jax

    dtype = x.dtype if hasattr(x, "dtype") else jax.numpy.result_type(x)
    return bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


def combine(*trees: Tree) -> Tree:
    """Merges trees of one structure. Each has leaves where the others have None.

    >>> combine({"a": 1, "b": None}, {"a": None, "b": 2})
    {'a': 1, 'b': 2}
    """
    import jax

    def first(*leaves: Tree) -> Tree:
        return next((x for x in leaves if x is not None), None)

    return jax.tree.map(first, *trees, is_leaf=lambda x: x is None)


def loss_and_aux(out: Tree) -> tuple[Tree, Tree]:
    """A loss function's result as (loss, aux). The loss is the first leaf; aux is None if there are no more leaves.

    >>> loss_and_aux(1.0), loss_and_aux((1.0, {"a": 2})), loss_and_aux((1.0, 2, 3))
    ((1.0, None), (1.0, {'a': 2}), (1.0, (2, 3)))
    """
    import jax

    if not isinstance(out, tuple):
        leaves = jax.tree.leaves(out)
        return leaves[0] if leaves else None, out if len(leaves) > 1 else None
    loss, *aux = out or (None,)
    if not jax.tree_util.all_leaves([loss]):
        leaves = jax.tree.leaves(out)
        return leaves[0] if leaves else None, out
    return loss, (aux[0] if len(aux) == 1 else tuple(aux)) if aux else None


def value_and_grad(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """Returns f(params, *batch) -> ((loss, aux), gradients of the trained leaves of params). fn: the user's
    function."""
    import jax

    def graded(params: Tree, *batch: Tree) -> Tree:
        kept, mine, rest = static((params, *batch)), trained(arrays(params)), untrained(arrays(params))
        given = arrays(batch)

        def loss(mine: Tree) -> Tree:
            return loss_and_aux(fn(*combine((combine(mine, rest), *given), kept)))

        return jax.value_and_grad(loss, has_aux=True)(mine)

    return graded
