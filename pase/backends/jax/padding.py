"""Adds the plan's padding to arguments (zeros at the end of padded dims) and removes it from results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pase.frontends.jax.frontend import TracedJax
from pase.frontends.jax.leaves import arrays, combine
from pase.pytree import Tree

__all__ = ["widened", "with_padding", "without_padding"]


def with_padding(
    traced: TracedJax, args: tuple[Tree, ...], shapes: Sequence[tuple[int, ...]]
) -> tuple[Tree, ...]:
    """(params, *batch), or the first of them, with zeros added to each leaf that is not padded yet.

    shapes: the padded shapes of all leaves.
    """
    import jax

    leaves, tree = jax.tree.flatten(arrays(args))
    paths = (*traced.param_paths, *traced.input_paths)
    made = [
        widened(x, wide) if np.shape(x) == _own(traced, path, wide) else x
        for x, path, wide in zip(leaves, paths, shapes, strict=False)
    ]
    return combine(jax.tree.unflatten(tree, made), args)  # type: ignore[no-any-return]


def without_padding(traced: TracedJax, params: Tree) -> Tree:
    """A tree of the parameters' structure without the padding."""
    import jax

    if not traced.padding:
        return params
    leaves, tree = jax.tree.flatten(arrays(params), is_leaf=lambda x: x is None)
    made = [
        x if x is None or path not in traced.unpadded else x[tuple(map(slice, traced.unpadded[path]))]
        for x, path in zip(leaves, traced.param_paths, strict=True)
    ]
    return combine(jax.tree.unflatten(tree, made), params)


def _own(traced: TracedJax, path: str, wide: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of a leaf as the user has it, or None if none of its dims is padded.

    With micro-batches, the first dim of a batch leaf is longer than in the trace. It is not padded then.
    """
    own = traced.unpadded.get(path)
    if own is None:
        return None
    return tuple(n if traced.padding.get(n) == w else w for n, w in zip(own, wide, strict=True))


def widened(x: Tree, shape: Sequence[int]) -> Tree:
    """An array with zeros added at the end of its dims, up to the given shape."""
    import jax

    ends = [(0, wide - n) for n, wide in zip(np.shape(x), shape, strict=True)]
    return jax.numpy.pad(x, ends) if isinstance(x, jax.Array) else np.pad(x, ends)
