"""What a rule sees of a node: operands by number, axes in range, and reshapes that only merge dims."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pase.errors import PaseError
from pase.frontends.common.values import Value, known
from pase.frontends.tf.graph import TfNode
from pase.frontends.tf.values import Absent, TfCall, value_of
from pase.ops import GraphBuilder


def call(*ins: Any) -> TfCall:
    node = TfNode(name="n", op="Op", inputs=tuple(f"i{k}:0" for k in range(len(ins))), attr={})
    return TfCall(builder=GraphBuilder("g"), node=node, ins=ins)


def static(numbers: Any) -> Value:
    return known(np.array(numbers))


def test_axes_count_from_the_end_and_stay_in_range() -> None:
    c = call(static([1, -1]), static(-3), static([0.5]))
    assert c.axes_at(0, 3) == [1, 2] and c.axis_at(1, 3) == 0
    for wrong in (lambda: c.axis_at(1, 2), lambda: c.axis(3, 3)):
        with pytest.raises(PaseError, match="out of range for a tensor of"):
            wrong()
    with pytest.raises(PaseError, match="must be integers"):
        c.numbers(2, "axes")
    with pytest.raises(PaseError, match="has 2 numbers, but must be one"):
        c.number(0, "axis")


def test_operands_that_are_missing_or_no_tensors_are_refused() -> None:
    c = call(Absent("a string"))
    with pytest.raises(PaseError, match="it has 1 operands, but needs operand 1") as e:
        c.x(1)
    assert e.value.where == "TensorFlow op 'Op' at n"
    with pytest.raises(PaseError, match="not a tensor"):
        c.shape_of(0)


def test_numbers_that_are_computed_from_data_are_refused() -> None:
    c = call(value_of(GraphBuilder("g").input("x", (2,), "int32")))
    assert c.known(0) is None
    with pytest.raises(PaseError, match="gives the shape, is computed from data") as e:
        c.numbers(0, "shape")
    assert "constant" in e.value.fix
