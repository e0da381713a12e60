"""State that a step writes: assignments become writes in place, and buffers that follow the data are found."""

from __future__ import annotations

from typing import Any

import pytest

from pase.errors import PaseError
from pase.frontends.torch.export.buffers import assignments_in_place, data_written

pytestmark = pytest.mark.torch


def module() -> Any:
    import torch
    from torch import nn

    m = nn.Linear(2, 2)
    m.register_buffer("seen", torch.zeros(2))
    m.register_buffer("later", None)
    return m


def test_an_assignment_is_a_write_into_the_tensor_that_was_there() -> None:
    import torch

    m = module()
    seen, weight = m.seen, m.weight
    with assignments_in_place(m):
        m.seen = m.seen + 1
        m.weight.data = torch.full((2, 2), 5.0)
    assert m.seen is seen and seen.tolist() == [1, 1]
    assert m.weight is weight and weight.tolist() == [[5, 5], [5, 5]]


def test_what_cannot_be_written_into_the_old_tensor_is_refused() -> None:
    """PyTorch's own assignment of ``data`` is there again afterwards."""
    import torch

    data = torch.Tensor.data

    def changed(change: Any) -> str:
        m = module()
        with pytest.raises(PaseError) as e, assignments_in_place(m):
            change(m)
        assert torch.Tensor.data is data
        return e.value.what

    assert "'seen', torch.float32 [2]" in changed(lambda m: setattr(m, "seen", torch.zeros(3)))
    assert "float64 [2]" in changed(lambda m: setattr(m, "seen", m.seen.double()))
    assert "'later', which is None" in changed(lambda m: setattr(m, "later", torch.zeros(2)))

    tied = module()
    tied.register_buffer("again", tied.seen)
    with pytest.raises(PaseError, match="under other paths too"), assignments_in_place(tied):
        tied.seen = torch.ones(2)


def test_a_buffer_that_follows_another_ones_data_depends_on_data() -> None:
    """A counter is written from itself alone. A mean follows the batch, and its trace follows the mean."""
    import torch

    g = torch.fx.Graph()
    x, count, mean, trace = (g.placeholder(name) for name in ("x", "count", "mean", "trace"))
    new_count = g.call_function(torch.add, (count, 1))
    new_mean = g.call_function(torch.add, (mean, x))
    new_trace = g.call_function(torch.add, (trace, mean))
    g.output((new_count, new_mean, new_trace))
    written = {new_count.name: "count", new_mean.name: "mean", new_trace.name: "trace"}
    buffers = {name: name for name in ("count", "mean", "trace")}
    assert data_written(g, written, buffers, ["x"]) == {new_mean.name, new_trace.name}
    assert data_written(g, written, buffers, []) == frozenset()
