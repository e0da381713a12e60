"""Buffers that a step writes: after several steps they equal those of the unsharded module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pase.backends.torch.buffers import StepBuffers
from tests.backends.torch.trained import agrees
from tests.backends.torch.unwatched_models import BUFFERS, buffers

pytestmark = pytest.mark.torch


@pytest.mark.some(8)
@pytest.mark.parametrize("kind", BUFFERS)
def test_ten_steps_write_the_buffers_of_the_unsharded_ones(kind: str) -> None:
    import torch

    torch.manual_seed(1)
    agrees(buffers(kind), 10)


def test_next_values_may_be_present_values_of_other_buffers() -> None:
    import torch

    held: dict[str, Any] = {"a": torch.zeros(3), "b": torch.ones(3), "steps": torch.tensor(4)}
    step = cast("Any", SimpleNamespace(buffer=held.get))
    StepBuffers(step=step).write_back({"a": held["b"].view(3), "b": held["a"][:], "steps": torch.tensor(5)})
    assert [x.tolist() for x in held.values()] == [[1.0] * 3, [0.0] * 3, 5]
