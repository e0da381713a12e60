"""Compares the batch of a step with the example that the plan was compiled with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["leaves_as_compiled"]


def leaves_as_compiled(batch: Sequence[Tree], example: Sequence[Tree]) -> list[Tensor]:
    """The leaves of a batch, in the order of the example's leaves, whatever the order of the keys of a dict.

    Raises PaseError if the batch has other leaves than the example, tensors of another dtype, or another value at a
    leaf that is not a tensor. (The exported step contains that value.)
    """
    import torch
    from torch.utils._pytree import keystr, tree_flatten_with_path

    given, wanted = (
        {keystr(path): x for path, x in tree_flatten_with_path(_several(tree))[0]}
        for tree in (batch, example)
    )
    if unlike := [*(wanted.keys() - given.keys()), *(given.keys() - wanted.keys())]:
        has = "lacks" if unlike[0] in wanted else "has"
        raise PaseError(
            f"the plan was compiled for a batch of {len(wanted)} tensors, but got {len(given)}: it {has} "
            f"batch{min(unlike)}",
            where="batch",
            fix="pass a batch with the structure of the example batch",
        )
    for path, then in wanted.items():
        now = given[path]
        if not isinstance(then, torch.Tensor):
            same = type(now) is type(then) and (now is then or bool(now == then))
        else:
            same = isinstance(now, torch.Tensor) and now.dtype == then.dtype
        if not same:
            raise PaseError(
                f"it is {_what(now)}, but the plan was compiled for {_what(then)}",
                where=f"batch{path}",
                fix="convert it"
                if isinstance(then, torch.Tensor)
                else "compile for this value, or pass a tensor if it changes from step to step",
            )
    return [given[path] for path in wanted]


def _several(batch: Sequence[Tree]) -> tuple[Tree, ...]:
    """The arguments of a batch, whether they were passed one by one or as one tuple."""
    while len(batch) == 1 and isinstance(batch[0], (tuple, list)):
        (batch,) = batch
    return tuple(batch)


def _what(x: object) -> str:
    import torch

    return f"a tensor of {x.dtype}" if isinstance(x, torch.Tensor) else repr(x)[:80]
