"""Operands of a call go by the names in the op's schema, and results have the sizes that PyTorch found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pase.errors import PaseError
from pase.frontends.torch.values import TorchScope, arguments, dtype_of, specs_of

pytestmark = pytest.mark.torch


def test_operands_are_named_whether_they_are_passed_by_place_or_by_name() -> None:
    import torch

    op = torch.ops.aten.sum.dim_IntList
    wanted = {"self": "x", "dim": [1], "keepdim": True, "dtype": None}
    assert arguments(op, ("x", [1], True), {}) == wanted
    assert arguments(op, ("x",), {"keepdim": True, "dim": [1]}) == wanted
    assert arguments(torch.ops.aten.add.Tensor, ("x", "y"), {}) == {"self": "x", "other": "y", "alpha": 1}


def test_results_without_a_tensor_have_no_size() -> None:
    import torch

    val = (torch.zeros(2, 3, dtype=torch.bfloat16), None, torch.zeros((), dtype=torch.int64))
    assert specs_of(val, "here") == [((2, 3), "bfloat16"), None, ((), "int64")]
    assert specs_of(val[0], "here") == [((2, 3), "bfloat16")]
    assert dtype_of(torch.float32) == dtype_of("float32") == "float32"


def test_a_size_that_depends_on_data_is_refused_where_it_is_made() -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        found = mode.from_tensor(torch.zeros(4)).nonzero()
    with pytest.raises(PaseError, match="depends on the data") as e:
        specs_of(found, "the op at model.py:3")
    assert e.value.where == "the op at model.py:3" and "torch.where" in e.value.fix


def test_nodes_inside_of_bodies_have_places_after_the_op_that_holds_them() -> None:
    nodes: list[Any] = [SimpleNamespace(name=name) for name in "abcde"]
    innermost = TorchScope(nodes=nodes[4:], values={})
    inner = TorchScope(nodes=nodes[2:4], values={}, inner={"1.1": innermost})
    scope = TorchScope(nodes=nodes[:2], values={}, inner={"1": inner})
    assert [(n.name, place) for n, place in scope.every()] == [
        *(("a", "0"), ("b", "1"), ("c", "1.0"), ("d", "1.1")),
        ("e", "1.1.0"),
    ]
    assert list(scope.scopes()) == [scope, inner, innermost]
