"""The op that gives a value the derivative of another one."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch


def test_its_derivative_is_the_others_where_that_is_infinite_too() -> None:
    import torch

    from pase.frontends.torch.passed import passed_op

    value = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    other = torch.tensor([0.5, float("inf"), -float("inf")], requires_grad=True)
    made = passed_op()(value, other)
    made.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert made.tolist() == [1.0, 2.0, 3.0] and made.data_ptr() != value.data_ptr()
    assert value.grad is None and other.grad is not None and other.grad.tolist() == [1.0, 2.0, 3.0]


def test_it_runs_under_vmap_and_is_compiled() -> None:
    import torch

    from pase.frontends.torch.passed import passed_op

    op, x, y = passed_op(), torch.randn(3, 4), torch.randn(4, 3)
    made = torch.vmap(op, in_dims=(0, 1))(x, y)
    assert made.equal(x) and torch.vmap(op, in_dims=(None, 0))(x[0], x).equal(x[:1].expand(3, 4))
    compiled = torch.compile(lambda x, y: op(x, y) * 2, fullgraph=True)
    assert compiled(x, x).equal(2 * x)
