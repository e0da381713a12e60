"""Modules that read and write at known places of a dim, for tests of indices outside of it. PyTorch is imported only
inside of the functions."""

from __future__ import annotations

from functools import cache
from typing import Any

BATCH, SIZE = 16, 8


@cache
def step_class() -> Any:
    """A module of a product of which a call reads or writes at known places."""
    import torch

    class Step(torch.nn.Module):
        def __init__(self, call: Any, places: list[int]) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))
            self.call = call
            self.register_buffer("places", torch.tensor(places))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.weight
            made = self.call(y, self.places)
            return (made * made).mean() + (y * y).mean()

    return Step


@cache
def embedded_class() -> Any:
    """A module of tokens and their positions, as most models of language have them."""
    import torch

    class Embedded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(32, SIZE)
            self.positions = torch.nn.ModuleList([torch.nn.Embedding(SIZE, SIZE)])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            at = torch.arange(ids.shape[1]).expand(ids.shape)
            return (self.tokens(ids) + self.positions[0](at)).square().mean()

    return Embedded


@cache
def calls() -> dict[str, Any]:
    """Name -> a call of what is computed and of the places."""
    import torch
    from torch.nn import functional as F

    rows = torch.zeros(2, SIZE)
    return {
        "index": lambda y, k: y[:, k],
        "indices": lambda y, k: y[torch.zeros_like(k), k],
        "index behind a mask": lambda y, k: torch.where(y > 0, y, 0.0)[:, k],
        "index_select": lambda y, k: y.index_select(1, k),
        "gather": lambda y, k: y.gather(1, k.expand(BATCH, -1)),
        "take_along_dim": lambda y, k: torch.take_along_dim(y, k[None].expand(BATCH, -1), 1),
        "take": lambda y, k: y[0].take(k),
        "embedding": lambda y, k: F.embedding(k, y[:SIZE]),
        "embedding_bag": lambda y, k: F.embedding_bag(k[None], y[:SIZE], mode="sum"),
        "index_put": lambda y, k: y.t().index_put((k,), torch.zeros(2, BATCH)),
        "index_add": lambda y, k: y[:SIZE].index_add(0, k, rows),
        "index_copy": lambda y, k: y[:SIZE].index_copy(0, k, rows),
        "index_fill": lambda y, k: y[:SIZE].index_fill(0, k, 1.0),
        "scatter": lambda y, k: y[:SIZE].scatter(0, k[:, None].expand(2, SIZE), rows),
        "scatter of a number": lambda y, k: y[:SIZE].scatter(0, k[:, None].expand(2, SIZE), 2.0),
        "scatter_add": lambda y, k: y[:SIZE].scatter_add(0, k[:, None].expand(2, SIZE), rows),
        "scatter_reduce": lambda y, k: y[:SIZE].scatter_reduce(0, k[:, None].expand(2, SIZE), rows, "amax"),
        "one_hot": lambda y, k: F.one_hot(k, SIZE) * y[0],
        "cross_entropy": lambda y, k: F.cross_entropy(y[:2], k),
        "cross_entropy of pixels": lambda y, k: F.cross_entropy(
            y.view(2, SIZE, SIZE), k[:, None].expand(2, SIZE)
        ),
        "nll_loss": lambda y, k: F.nll_loss(y[:2].log_softmax(1), k),
        "ignored labels": lambda y, k: F.cross_entropy(y[:2], k, ignore_index=-1),
        "arithmetic": lambda y, k: y[:, (k * 2 + 1 - k).clamp(max=99) - 1],
        "remainder": lambda y, k: y[:, k % SIZE],
        "padded": lambda y, k: y[:, F.pad(k, (1, 0), value=3)],
    }


@cache
def unknown() -> dict[str, Any]:
    """The same for places that may be right when it runs."""
    import torch

    return {
        "drawn": lambda y, k: y[:, [0, 1]][:, torch.randint(0, 2, (3,))],
        "of data": lambda y, k: y[:, k + y[0, 0].long()],
        "in a branch that may never run": lambda y, k: torch.cond(
            y.sum() > 1e9, lambda y: y[:, torch.full((SIZE,), 9)], lambda y: y * 2, (y,)
        ),
    }
