"""Lists of tensors: TensorFlow's own results are the oracle for their shapes, and indices out of range are refused."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

from pase.errors import PaseError
from pase.frontends.tf.frontend import trace
from pase.ir import simplify, verify

W = tf.Variable(tf.ones((4, 6)), name="w")
X = tf.TensorSpec((4, 6), name="x")
raw = tf.raw_ops


def reserved(length: int) -> Any:
    return raw.TensorListReserve(element_shape=[4, 6], num_elements=length, element_dtype=tf.float32)


def stack(items: Any, length: int = -1) -> Any:
    return raw.TensorListStack(
        input_handle=items, element_shape=[4, 6], element_dtype=tf.float32, num_elements=length
    )


def set_at(items: Any, index: int, x: Any) -> Any:
    return raw.TensorListSetItem(input_handle=items, index=index, item=x)


def pushed(x: Any, count: int) -> Any:
    items = raw.EmptyTensorList(element_shape=[4, 6], max_num_elements=-1, element_dtype=tf.float32)
    for _ in range(count):
        items = raw.TensorListPushBack(input_handle=items, tensor=x)
    return items


def concat(items: Any) -> Any:
    return raw.TensorListConcatV2(
        input_handle=items, element_shape=[4, 6], leading_dims=[], element_dtype=tf.float32
    )[0]


def get(items: Any, index: int) -> Any:
    return raw.TensorListGetItem(
        input_handle=items, index=index, element_shape=[4, 6], element_dtype=tf.float32
    )


def result(made: Any) -> tuple[Any, Any]:
    """(the graph of a function of x, the result that TensorFlow's own shape inference or run gives)."""

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        return made(x @ tf.transpose(W) @ W)

    return trace(step, X).graph, step(tf.ones((4, 6)))


@pytest.mark.parametrize(
    "made",
    [
        lambda x: stack(set_at(set_at(reserved(3), 0, x), 2, 2 * x)),
        lambda x: stack(pushed(x, 2)),
        lambda x: concat(pushed(x, 3)),
        lambda x: get(set_at(reserved(2), 1, x), 1),
        lambda x: get(raw.TensorListFromTensor(tensor=tf.stack([x, x]), element_shape=[4, 6]), 1),
        lambda x: x * tf.cast(raw.TensorListLength(input_handle=pushed(x, 3)), tf.float32),
        lambda x: stack(
            raw.TensorListFromTensor(
                tensor=raw.TensorListGather(
                    input_handle=pushed(x, 3),
                    indices=[2, 0],
                    element_shape=[4, 6],
                    element_dtype=tf.float32,
                ),
                element_shape=[4, 6],
            )
        ),
    ],
)
def test_a_result_has_tensorflows_shape(made: Any) -> None:
    graph, theirs = result(made)
    assert graph.tensors[graph.outputs[0]].shape == tuple(theirs.shape)
    verify(simplify(graph))


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda x: stack(set_at(reserved(3), 3, x)), "sets element 3 of a list of 3"),
        (
            lambda x: get(raw.TensorListFromTensor(tensor=tf.stack([x, x]), element_shape=[4, 6]), 9),
            "reads element 9 of a list of 2",
        ),
    ],
)
def test_an_element_out_of_range_is_refused(made: Any, what: str) -> None:
    step = tf.function(lambda x: made(x @ tf.transpose(W) @ W), autograph=False)
    with pytest.raises(PaseError, match=what):
        trace(step, X)
