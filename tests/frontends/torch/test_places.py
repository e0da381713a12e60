"""A known index outside of its dim is refused as PyTorch refuses it when it runs, and no other is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from pase.errors import PaseError
from pase.frontends.registry import trace
from tests.frontends.torch import places as modules

pytestmark = pytest.mark.torch


def raises(run: Callable[[], object], *errors: type[Exception]) -> Exception | None:
    try:
        run()
    except errors as e:
        return e
    return None


@pytest.mark.some(2)
@pytest.mark.parametrize("places", [[0, 7], [8, 1], [2, -1]], ids=str)
def test_an_index_outside_of_its_dim_is_refused_as_eager_pytorch_refuses_it(places: list[int]) -> None:
    import torch

    for name, call in modules.calls().items():
        step, x = modules.step_class()(call, places), torch.randn(modules.BATCH, modules.SIZE)
        eager = raises(partial(step, x), RuntimeError, IndexError)
        refused = raises(partial(trace, step, x), PaseError)
        assert (refused is None) == (eager is None), (name, eager, refused)
        if refused is not None:
            assert isinstance(refused, PaseError)
            assert "is not in a dim of 8 elements" in refused.what, name
            assert str(modules.__file__) in refused.where, name


@pytest.mark.parametrize("more", [0, 1])
def test_a_sequence_longer_than_its_table_of_positions_is_refused_with_the_layer(more: int) -> None:
    import torch

    length = modules.SIZE + more
    ids = torch.zeros(4, length, dtype=torch.long)
    refused = raises(lambda: trace(modules.embedded_class()(), ids), PaseError)
    if more == 0:
        assert refused is None
    else:
        assert isinstance(refused, PaseError)
        assert "'positions.0'" in refused.where
        assert "index 8 is not in a dim of 8" in refused.what


def test_what_may_be_right_when_it_runs_is_not_refused() -> None:
    import torch

    for call in modules.unknown().values():
        trace(modules.step_class()(call, [0, 9]), torch.randn(modules.BATCH, modules.SIZE))
