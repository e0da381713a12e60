"""Compares the structures of two pytrees and says which leaves are missing, and which are not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pase.errors import PaseError

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef

__all__ = ["check_arguments", "check_structure"]

_SHOWN = 4


def check_structure(given: PyTreeDef, wanted: PyTreeDef, *, where: str, fix: str) -> None:
    """Raise PaseError if an argument has another structure than the one that the plan was compiled for."""
    if given == wanted:
        return
    here, there = _paths(given), _paths(wanted)
    lacks = [p for p in there if p not in here]
    more = [p for p in here if p not in there]
    said = [f"it lacks {_listed(lacks)}"] if lacks else []
    said += [f"it has {_listed(more)}, which the plan was not compiled for"] if more else []
    array_for_tree = "" in (*lacks, *more)  # the path of an array alone
    if not said or array_for_tree:  # without any leaf to name, the containers around the leaves differ
        said = [f"it is {given}, but the plan was compiled for {wanted}"]
    raise PaseError("; ".join(said), where=where, fix=fix)


def check_arguments(given: PyTreeDef, wanted: PyTreeDef, *, first: bool = False) -> None:
    """Raise PaseError if (params, *batch) have another structure than was compiled. first: whether the first of them
    are enough."""
    fix = "pass (params, *batch) with the structure that was compiled, or compile again"
    mine, theirs = given.children(), wanted.children()
    if len(mine) > len(theirs) or (len(mine) < len(theirs) and not first):
        raise PaseError(
            f"there are {len(mine)} arguments, but the plan was compiled for {len(theirs)}", fix=fix
        )
    for i, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        check_structure(one, other, where=f"argument {i} ({'of the batch' if i else 'params'})", fix=fix)


def _paths(tree: PyTreeDef) -> dict[str, None]:
    import jax

    found, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    return {jax.tree_util.keystr(keys, simple=True, separator="."): None for keys, _ in found}


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(f"'{p}'" for p in paths[:_SHOWN]) + more
