"""Gathered parameters have no memory between forward and backward: which arrays, when, and how many ops it takes."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from bench.audit.torch_dispatch import dispatched
from bench.cases.torch_ranks import alone_among, on_ranks
from pase.backends.torch.spmd.freed import FreedParameters
from pase.backends.torch.spmd.gathered_again import AgainMark, GatheredTaker
from tests.backends.torch.spmd.test_gathered_again import RANKS, under
from tests.backends.torch.steps import whole

pytestmark = pytest.mark.torch


def arrays(of: FreedParameters) -> list[Any]:
    return [x for brought, _ in of._at.values() for x in brought.arrays]


@pytest.mark.parametrize("model", ["tower", "bert"])
def test_arrays_are_empty_between_forward_and_backward(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After backward they are no longer held. A second backward of the same step finds them filled."""
    import torch

    c, run = under(model)
    found: dict[int, FreedParameters] = {}  # by thread, which is a rank
    forward = FreedParameters.forward

    def told(self: FreedParameters) -> Any:
        found[threading.get_ident()] = self
        return forward(self)

    def on_rank(rank: int) -> Any:
        module = copy.deepcopy(c.module)
        loss = run.parallelize(module)(*c.batch)
        mine = found[threading.get_ident()]
        empty = [x.untyped_storage().nbytes() for x in arrays(mine)]
        loss.backward(retain_graph=True)
        left = len(arrays(mine))
        loss.backward()
        return empty, left, {k: whole(p.grad) for k, p in module.named_parameters() if p.grad is not None}

    monkeypatch.setattr(FreedParameters, "forward", told)
    twice = {k: 2 * g for k, g in c.gradients.items()}
    for empty, left, gradients in on_ranks(RANKS, on_rank):
        assert len(empty) > 3 and not any(empty) and not left
        torch.testing.assert_close(gradients, twice, rtol=1e-12, atol=1e-12)


def test_a_step_dispatches_only_its_messages_more() -> None:
    """No tensor of the step is looked at: a message is joined, sent, waited for and taken apart, an op for each."""
    c, run = under("tower")
    with alone_among(RANKS, rank=0):
        counts = []
        for again in (False, True):
            step = replace(run, gathers_again=again).parallelize(copy.deepcopy(c.module))
            step.backward(*c.batch)
            counts.append(dispatched(partial(step.backward, *c.batch)))
        more = counts[1] - counts[0]
    of = Counter({name: n for name, n in more.items() if "all_gather_into_tensor" in name}).total()
    assert of > 3 and more["aten._chunk_cat.default"] == more["_c10d_functional.wait_tensor.default"] == of
    assert more.total() <= 5 * of and not any("detach" in name for name in more)


def test_a_view_that_the_recording_did_not_know_keeps_the_array() -> None:
    """What reads it is not known. Backward fills it as it is."""
    import torch

    mine = FreedParameters(taker=GatheredTaker())
    value = torch.arange(6.0).reshape(2, 3).requires_grad_()
    for place in (0, 1):
        mark = AgainMark(taker=mine.taker, factor=False, place=place)
        made = value * 2
        mine.add(made, value, lambda x: x * 2, mark)
        read = made.reshape(3, 2) if place else made.exp()
        mine.read((place,), read)
        mine.free((place,))
        kept = made.untyped_storage().nbytes()
        assert bool(kept) == bool(place)
        if place:
            read.square().sum().backward()
            assert value.grad is not None and value.grad.equal(8 * value.detach())


def test_what_is_read_to_gather_is_filled_before() -> None:
    """A gather of what another one has brought."""
    import torch

    sizes: list[int] = []
    mine = FreedParameters(taker=GatheredTaker(resized=lambda x: sizes.append(x.untyped_storage().nbytes())))
    value = torch.randn(3, dtype=torch.float64)
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    first = value.repeat(2)
    mine.add(first, value, lambda x: x.repeat(2), AgainMark(taker=mine.taker, factor=False, place=0))
    second = first.repeat(2)
    mark = AgainMark(taker=mine.taker, factor=False, place=1, needs=(0,))
    mine.add(second, first, lambda x: x.repeat(2), mark)
    made = weight.repeat(4) * second
    mine.read((1,), made)
    mine.free((0, 1))
    assert sizes == [0, 0]
    made.sum().backward()
    assert sizes == [0, 0, 48, 96]
    torch.testing.assert_close(weight.grad, 4 * value)
