"""Small values that a graph determines without data: TensorFlow itself is the oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

from pase.errors import PaseError
from pase.frontends.tf.graph import TfNode
from pase.frontends.tf.known import constant, evaluate, numpy_dtype

A = np.array([[7, -7, 3], [-2, 5, -9]], "int32")
B = np.array([[2, 2, -2], [4, -3, 4]], "int32")
F = np.array([[0.5, 2.0], [3.25, 9.0]], "float32")


def known(op: str, *arrays: Any, **attributes: Any) -> list[np.ndarray] | None:
    attr: Any = {k: v if not isinstance(v, int) else SimpleNamespace(i=v) for k, v in attributes.items()}
    return evaluate(TfNode(name="n", op=op, inputs=(), attr=attr), [np.asarray(a) for a in arrays])


@pytest.mark.parametrize(
    ("op", "operands"),
    [
        *(
            (op, dict(x=A, y=B))
            for op in ("FloorDiv", "FloorMod", "TruncateDiv", "TruncateMod", "Div", "Mod")
        ),
        *((op, dict(x=A, y=B)) for op in ("AddV2", "Sub", "Mul", "Maximum", "Minimum", "Less", "NotEqual")),
        *((op, dict(x=F)) for op in ("Rsqrt", "Exp", "Ceil", "Floor", "Rint", "Sqrt", "Reciprocal")),
        ("Range", dict(start=np.int32(9), limit=np.int32(1), delta=np.int32(-3))),
        ("Fill", dict(dims=np.array([2, 3], "int32"), value=np.int32(7))),
        ("Tile", dict(input=A, multiples=np.array([2, 1], "int32"))),
        ("BroadcastTo", dict(input=A[:1], shape=np.array([4, 3], "int32"))),
        ("ExpandDims", dict(input=A, axis=np.int32(-1))),
        ("Reshape", dict(tensor=A, shape=np.array([-1, 2], "int32"))),
        ("Transpose", dict(x=A, perm=np.array([1, 0], "int32"))),
        ("ReverseV2", dict(tensor=A, axis=np.array([1], "int32"))),
        ("Slice", dict(input=A, begin=np.array([0, 1], "int32"), size=np.array([1, -1], "int32"))),
        ("MatrixBandPart", dict(input=A, num_lower=np.int64(0), num_upper=np.int64(-1))),
        ("ListDiff", dict(x=A[0], y=B[0])),
        *(("InvertPermutation", dict(x=np.array([2, 0, 1], dtype))) for dtype in ("int32", "int64")),
        *((op, dict(input=A, axis=np.array([1], "int32"))) for op in ("Sum", "Prod", "Max", "Min", "Mean")),
    ],
)
def test_a_value_is_tensorflows(op: str, operands: dict[str, Any]) -> None:
    """Its type, too."""
    made = known(op, *operands.values())
    theirs = getattr(tf.raw_ops, op)(**{k: tf.constant(v) for k, v in operands.items()})
    wanted = [x.numpy() for x in (theirs if isinstance(theirs, (list, tuple)) else [theirs])]
    assert made is not None and len(made) == len(wanted)
    for mine, numpy in zip(made, wanted, strict=True):
        assert mine.dtype == numpy.dtype and np.allclose(mine, numpy, rtol=1e-6)


def test_what_is_too_large_or_wrong_is_left_to_the_ops_rule() -> None:
    huge = np.array([2**20, 2**20])
    assert known("Fill", huge, 0) is None
    assert known("Range", np.int64(0), np.int64(2**40), np.int64(1)) is None
    assert known("Tile", A, huge) is None
    assert known("FloorDiv", A, np.zeros_like(A)) is None
    assert known("Reshape", A, np.array([5])) is None
    assert known("Split", np.int32(0), A, num_split=4) is None
    assert known("SomeOtherOp", A) is None


def test_a_constant_has_its_declared_shape() -> None:
    node = TfNode(name="c", op="Const", inputs=(), attr={})
    proto: Any = tf.make_tensor_proto(A)
    found = constant(node, proto, (2, 3))
    assert found is not None and np.array_equal(found, A)
    with pytest.raises(PaseError, match=r"shape \(2, 3\), but its declared shape is \(6,\)") as e:
        constant(node, proto, (6,))
    assert e.value.where == "TensorFlow op 'Const' at c"
    text: Any = tf.make_tensor_proto("text")
    assert constant(node, text, ()) is None


def test_dtypes_that_numpy_lacks_are_tensorflows() -> None:
    assert numpy_dtype("int8") == np.int8
    assert numpy_dtype("bfloat16") == tf.bfloat16.as_numpy_dtype
