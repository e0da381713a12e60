"""Refuses parameters that lie in one another's memory, which an export takes for parameters of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from pase.errors import PaseError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["check_aliases"]


def check_aliases(module: Module, name: str) -> None:
    """Raises PaseError if an update of a trained parameter changes another parameter or a buffer.

    PyTorch does so without notice if ``nn.Parameter(other.weight)`` or ``Embedding.from_pretrained(other.weight)`` is
    meant to tie the two. On several ranks each would be an array of its own.
    """
    for (one, first), (other, second) in _overlapping(module):
        if first.requires_grad or second.requires_grad:
            raise PaseError(
                f"'{one}' and '{other}' are two tensors in the same memory, so that an update of one changes the other",
                where=name,
                fix=f"make them one parameter (module.{other} = module.{one}), or copy one of them (clone())",
            )


def _overlapping(module: Module) -> Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Pairs of tensors of a module that have elements in common. Only dense tensors are compared: parts of a matrix
    that take turns in memory, such as columns, may overlap in range and have nothing in common."""
    import torch

    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    every = dict[int, tuple[str, torch.Tensor]]()
    for path, t in chain(module.named_parameters(), module.named_buffers()):
        if type(t) in plain and t.layout == torch.strided and t.numel() and _is_dense(t):
            every.setdefault(id(t), (path, t))
    by_storage = defaultdict[int, list[tuple[str, torch.Tensor]]](list)
    for path, t in every.values():
        by_storage[t.untyped_storage()._cdata].append((path, t))
    for held in by_storage.values():
        # Ranges are sorted by their begin: each is compared with the one before it that ends last.
        held.sort(key=lambda pair: _begin(pair[1]))
        last = held[0]
        for here in held[1:]:
            if _begin(here[1]) < _end(last[1]):
                yield last, here
            last = max(last, here, key=lambda pair: _end(pair[1]))


def _is_dense(t: Tensor) -> bool:
    """Whether the elements lie in memory without gaps, in whatever order."""
    return sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) + 1 == t.numel()


def _begin(t: Tensor) -> int:
    return int(t.storage_offset()) * t.element_size()


def _end(t: Tensor) -> int:
    return _begin(t) + t.numel() * t.element_size()
