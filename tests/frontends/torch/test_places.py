"""A known index outside of its dim is refused as PyTorch refuses it when it runs, and no other is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pase.errors import PaseError
from pase.frontends.registry import trace

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
F = torch.nn.functional
BATCH, SIZE = 16, 8


class Step(torch.nn.Module):
    """A product of which a call reads or writes at known places."""

    def __init__(self, call: Callable[..., torch.Tensor], places: list[int]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))
        self.call = call
        self.register_buffer("places", torch.tensor(places))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        made = self.call(y, self.places)
        return (made * made).mean() + (y * y).mean()


ROWS = torch.zeros(2, SIZE)
CALLS: dict[str, Callable[..., torch.Tensor]] = {
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
    "index_add": lambda y, k: y[:SIZE].index_add(0, k, ROWS),
    "index_copy": lambda y, k: y[:SIZE].index_copy(0, k, ROWS),
    "index_fill": lambda y, k: y[:SIZE].index_fill(0, k, 1.0),
    "scatter": lambda y, k: y[:SIZE].scatter(0, k[:, None].expand(2, SIZE), ROWS),
    "scatter of a number": lambda y, k: y[:SIZE].scatter(0, k[:, None].expand(2, SIZE), 2.0),
    "scatter_add": lambda y, k: y[:SIZE].scatter_add(0, k[:, None].expand(2, SIZE), ROWS),
    "scatter_reduce": lambda y, k: y[:SIZE].scatter_reduce(0, k[:, None].expand(2, SIZE), ROWS, "amax"),
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


def raises(run: Callable[[], object], *errors: type[Exception]) -> Exception | None:
    try:
        run()
    except errors as e:
        return e
    return None


@pytest.mark.parametrize("places", [[0, 7], [8, 1], [2, -1]], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_an_index_outside_of_its_dim_is_refused_as_eager_pytorch_refuses_it(
    name: str, places: list[int]
) -> None:
    step, x = Step(CALLS[name], places), torch.randn(BATCH, SIZE)
    eager = raises(lambda: step(x), RuntimeError, IndexError)
    refused = raises(lambda: trace(step, x), PaseError)
    assert (refused is None) == (eager is None), (eager, refused)
    if refused is not None:
        assert isinstance(refused, PaseError)
        assert "is not in a dim of 8 elements" in refused.what
        assert __file__ in refused.where


class Embedded(torch.nn.Module):
    """Tokens and their positions, as most models of language have them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(32, SIZE)
        self.positions = torch.nn.ModuleList([torch.nn.Embedding(SIZE, SIZE)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        at = torch.arange(ids.shape[1]).expand(ids.shape)
        return (self.tokens(ids) + self.positions[0](at)).square().mean()


@pytest.mark.parametrize("length", [SIZE, SIZE + 1])
def test_a_sequence_longer_than_its_table_of_positions_is_refused_with_the_layer(length: int) -> None:
    ids = torch.zeros(4, length, dtype=torch.long)
    refused = raises(lambda: trace(Embedded(), ids), PaseError)
    if length == SIZE:
        assert refused is None
    else:
        assert isinstance(refused, PaseError)
        assert "'positions.0'" in refused.where
        assert "index 8 is not in a dim of 8" in refused.what


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda y, k: y[:, [0, 1]][:, torch.randint(0, 2, (3,))], id="drawn"),
        pytest.param(lambda y, k: y[:, k + y[0, 0].long()], id="of data"),
        pytest.param(
            lambda y, k: torch.cond(
                y.sum() > 1e9, lambda y: y[:, torch.full((SIZE,), 9)], lambda y: y * 2, (y,)
            ),
            id="in a branch that may never run",
        ),
    ],
)
def test_what_may_be_right_when_it_runs_is_not_refused(call: Callable[..., torch.Tensor]) -> None:
    trace(Step(call, [0, 9]), torch.randn(BATCH, SIZE))
