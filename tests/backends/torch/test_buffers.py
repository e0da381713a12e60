"""Buffers that a step writes: after several steps they equal those of the unsharded module."""

from __future__ import annotations

import pytest

from tests.backends.torch.trained import agrees
from tests.backends.torch.unwatched_models import BUFFERS, buffers

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", BUFFERS)
def test_ten_steps_write_the_buffers_of_the_unsharded_ones(kind: str) -> None:
    import torch

    torch.manual_seed(1)
    agrees(buffers(kind), 10)
