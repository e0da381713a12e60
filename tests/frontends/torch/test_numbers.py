"""The numbers among an op's operands: the overloads of an op name them differently, and none is ignored."""

from __future__ import annotations

import pytest

from pase.frontends.torch.numbers import NumberUnknown, numbers_of
from pase.frontends.torch.values import arguments

pytestmark = pytest.mark.torch


@pytest.fixture
def x():
    import torch

    return torch.zeros(6, 4)


def numbers(op, *args, **kwargs):
    given = arguments(op, args, kwargs)
    shapes = {name: tuple(v.shape) for name, v in given.items() if hasattr(v, "shape")}
    return list(numbers_of(op._schema.name.removeprefix("aten::"), given, shapes))


@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_a_variance_divides_as_each_of_its_signatures_says(name, x):
    import torch

    op = getattr(torch.ops.aten, name)
    assert numbers(op.dim, x, [0]) == [6, 5]
    assert numbers(op.dim, x, [0], False) == [6, 6]
    assert numbers(op.default, x, False) == [24, 24]
    assert numbers(op.correction, x, [0]) == [6, 5]
    assert numbers(op.correction, x, [0], correction=0) == [6, 6]
    assert numbers(op.correction, x, [1], correction=2) == [4, 2]


def test_a_frozen_batch_norm_needs_its_epsilon_alone(x):
    import torch

    op = torch.ops.aten.batch_norm.default
    assert numbers(op, x, None, None, x[0], x[0], False, 0.1, 1e-5, False) == [1e-5]
    assert numbers(op, x, None, None, None, None, True, 0.5, 1e-5, False)[:3] == [6, 6, 1e-5]


def test_a_number_that_no_rule_reads_is_refused(x):
    given = {"self": x, "dim": [0], "keepdim": False, "weighting": 0.5}
    with pytest.raises(NumberUnknown, match="'weighting'"):
        numbers_of("mean", given, {"self": (6, 4)})
