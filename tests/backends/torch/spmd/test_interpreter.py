"""Transfers that a walk keeps: each is made once, and has a history whichever op reads it first."""

from __future__ import annotations

import pytest

from pase.backends.torch.spmd.interpreter import Keeping, KeptTransfers

pytestmark = pytest.mark.torch


def test_a_transfer_is_made_once() -> None:
    import torch

    made: list[int] = []
    kept = KeptTransfers(watched=True)

    def make() -> torch.Tensor:
        made.append(len(made))
        return torch.ones(2)

    assert kept.of(3, make) is kept.of(3, make) and made == [0]


@pytest.mark.parametrize("watched", [True, False])
def test_a_transfer_that_is_first_read_without_gradients_has_the_walks_history(watched: bool) -> None:
    import torch

    w = torch.ones(2, requires_grad=True)
    kept = KeptTransfers(watched=watched)
    with torch.no_grad():
        kept.of(0, lambda: 3 * w)
    assert kept.of(0, lambda: 5 * w).requires_grad == watched
    if watched:
        kept.of(0, lambda: 5 * w).sum().backward()
        assert w.grad is not None and w.grad.tolist() == [3, 3]


def test_a_nested_body_begins_with_what_came_before_the_walk() -> None:
    import torch

    kept = KeptTransfers(watched=False)
    before, later = torch.zeros(1), torch.ones(1)
    kept.receive({0: before})
    kept.of(1, lambda: later)
    inner = kept.inner()
    assert inner.of(0, lambda: later) is before
    assert inner.of(1, lambda: before) is before and kept.of(1, lambda: before) is later


def test_an_op_that_fails_is_not_kept_for_the_next_one() -> None:
    keeping = Keeping()
    with pytest.raises(ZeroDivisionError), keeping.of(True):
        assert keeping.now
        _ = 1 / 0
    assert not keeping.now
