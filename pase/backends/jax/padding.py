"""Arguments of a plan with padded dims: zeros are added behind the end of what the user has, and cut off again."""

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
    """(params, *batch), or the first of them, with zeros where padding is missing. shapes: of all leaves, padded."""
    import jax

    leaves, tree = jax.tree.flatten(arrays(args))
    paths = (*traced.param_paths, *traced.input_paths)
    made = [
        widened(x, wide) if np.shape(x) == _own(traced, path, wide) else x
        for x, path, wide in zip(leaves, paths, shapes, strict=False)
    ]
    return combine(jax.tree.unflatten(tree, made), args)  # type: ignore[no-any-return]


def without_padding(traced: TracedJax, params: Tree) -> Tree:
    """A tree like the parameters without the padding."""
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
    """A leaf's shape as the user has it; None if nothing of it is padded. Of a batch in micro-batches the first dim,
    which is then not padded, is longer than in the trace."""
    own = traced.unpadded.get(path)
    if own is None:
        return None
    return tuple(n if traced.padding.get(n) == w else w for n, w in zip(own, wide, strict=True))


def widened(x: Tree, shape: Sequence[int]) -> Tree:
    """An array with zeros behind the end of its dims, as far as this shape."""
    import jax

    ends = [(0, wide - n) for n, wide in zip(np.shape(x), shape, strict=True)]
    return jax.numpy.pad(x, ends) if isinstance(x, jax.Array) else np.pad(x, ends)
