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


def test_values_are_read_before_buffers_are_written() -> None:
    """Also if they are views of old values, in either order, and if a tensor is written into itself."""
    import torch

    def views(m: Any) -> None:
        m.seen, m.code = m.code.view(1, 2).view(2), m.seen.view(1, 2).view(2)

    def tensors(m: Any) -> None:
        m.seen, m.code = m.code, m.seen

    for swap in (views, tensors):
        m = module()
        m.register_buffer("code", torch.ones(2))
        with assignments_in_place(m):
            swap(m)
        assert m.seen.tolist() == [1, 1] and m.code.tolist() == [0, 0]
    m = module()
    m.seen = torch.arange(4.0).view(2, 2)
    m.weight.data = torch.arange(4.0).view(2, 2)
    with assignments_in_place(m):
        m.seen, m.weight.data = m.seen.T, m.weight.data.T
    assert m.seen.tolist() == m.weight.tolist() == [[0, 2], [1, 3]]


def test_two_names_of_one_tensor_after_the_step_are_refused() -> None:
    """In the next step, what the module writes to one changes the other too."""
    import torch

    def changed(change: Any) -> str:
        m = module()
        m.register_buffer("code", torch.ones(2))
        m.register_parameter("other", torch.nn.Parameter(torch.ones(2, 2)))
        with pytest.raises(PaseError) as e, assignments_in_place(m):
            change(m)
        return str(e.value)

    def both(m: Any) -> None:
        m.seen = m.code = torch.zeros(2)

    assert "'seen' and 'code' are one tensor" in changed(both)
    assert "'seen' and 'code' are one tensor" in changed(
        lambda m: setattr(m, "seen", m.code.view(1, 2).view(2))
    )
    assert "'weight' and 'other' are one" in changed(lambda m: setattr(m.weight, "data", m.other.data))
    assert "'weight' and 'other' are one" in changed(lambda m: setattr(m.weight, "data", m.other.detach().T))


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
