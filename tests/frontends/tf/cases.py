"""Test cases for the rules of TensorFlow ops: (spec of the input, function from the input to results)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from pase.frontends.tf.frontend import trace
from pase.ir import Node

__all__ = ["CASES", "IDS", "IMAGES", "VOLUMES", "W", "X", "nodes_of"]

raw = tf.raw_ops
X = tf.TensorSpec((4, 6, 8), name="x")
IMAGES = tf.TensorSpec((2, 8, 8, 4), name="x")
VOLUMES = tf.TensorSpec((2, 6, 8, 8, 4), name="x")
IDS = tf.TensorSpec((4, 6), "int32", name="x")
W = tf.Variable(np.linspace(0.0, 1.0, 64, dtype="float32").reshape(8, 8), name="w")


def weight(*shape: int) -> Any:
    return tf.reshape(
        tf.tile(tf.reshape(W, (-1,)), [int(np.ceil(np.prod(shape) / 64))])[: int(np.prod(shape))], shape
    )


CASES: dict[str, tuple[tf.TensorSpec, Callable[[Any], Any]]] = {
    "slices": (
        X,
        lambda x: [x[1], x[:, 2:5], x[..., ::2], x[:, None], x[::-1], x[-1, ..., 3], x[:, 1 : 1 + 3, -4:]],
    ),
    "joins": (
        X,
        lambda x: [tf.concat([x, x], 1), tf.stack([x, x], 1), *tf.unstack(x, axis=1)[:2], tf.repeat(x, 2, 0)],
    ),
    "splits": (
        X,
        lambda x: [*tf.split(x, 3, 1), *tf.split(x, [2, -1], 2), tf.slice(x, [1, 0, 2], [2, -1, 3])],
    ),
    "reshapes": (X, lambda x: [tf.reshape(x, (24, -1)), tf.transpose(x, [2, 0, 1]), tf.squeeze(x[:1], 0)]),
    "spreads": (
        X,
        lambda x: [
            tf.broadcast_to(x[:1], (4, 6, 8)),
            tf.tile(x, [1, 2, 1]),
            tf.pad(x, [[0, 0], [1, 2], [0, 0]]),
        ],
    ),
    "turns": (
        X,
        lambda x: [tf.reverse(x, [1]), tf.roll(x, 1, 0), tf.pad(x, [[0, 0], [1, 1], [0, 0]], "REFLECT")],
    ),
    "reductions": (
        X,
        lambda x: [tf.reduce_sum(x), tf.reduce_mean(x, 1), tf.reduce_max(x, [0, 2], True), tf.norm(x)],
    ),
    "more reductions": (
        X,
        lambda x: [tf.reduce_prod(x, 0), tf.reduce_logsumexp(x, -1), tf.math.reduce_std(x, 1)],
    ),
    "sorted": (
        X,
        lambda x: [
            tf.math.top_k(x, 3)[0],
            tf.cumsum(x, 1),
            tf.sort(x, 2),
            tf.math.cumulative_logsumexp(x, 0),
        ],
    ),
    "products": (
        X,
        lambda x: [x @ W, tf.tensordot(x, W, 1), tf.linalg.matvec(W, x), tf.matmul(x, x, transpose_b=True)],
    ),
    "broadcast products": (
        X,
        lambda x: [tf.matmul(x[:1], x[:, None, 0, :, None]), tf.matmul(W, x, transpose_b=True)],
    ),
    "einsums": (
        X,
        lambda x: [
            tf.einsum("...d,de->...e", x, W),
            tf.einsum("abc->ca", x),
            tf.einsum("abc,abd->acd", x, x),
            tf.einsum("abc,dc->adb", x, W),
            tf.einsum("abc,bc->a", x, weight(6, 8)),
        ],
    ),
    "activations": (
        X,
        lambda x: [
            f(x)
            for f in (
                tf.nn.relu,
                tf.nn.relu6,
                tf.nn.elu,
                tf.nn.selu,
                tf.nn.gelu,
                tf.nn.silu,
                tf.nn.softplus,
                tf.nn.softsign,
                tf.nn.tanh,
                tf.nn.sigmoid,
                tf.nn.softmax,
                tf.nn.log_softmax,
                tf.nn.leaky_relu,
                tf.nn.l2_normalize,
            )
        ],
    ),
    "arithmetic": (
        X,
        lambda x: [
            x**2,
            x / 3,
            x // 2,
            x % 2,
            tf.atan2(x, x),
            tf.where(x > 0, x, 0.0),
            tf.clip_by_value(x, 0, 1),
            tf.add_n([x, x, x]),
            tf.math.squared_difference(x, 1.0),
            tf.math.lgamma(x),
            tf.math.erf(x),
        ],
    ),
    "casts": (
        X,
        lambda x: [
            tf.cast(tf.cast(x, "bfloat16"), "float32"),
            tf.cast(x > 0, "float32"),
            tf.abs(tf.complex(x, x)),
            tf.cast(tf.bitcast(x, "int32"), "float32"),
        ],
    ),
    "layer norm": (
        X,
        lambda x: [tf.nn.batch_normalization(x, *tf.nn.moments(x, [-1], keepdims=True), 0.0, 1.0, 1e-3)],
    ),
    "losses": (
        X,
        lambda x: [
            tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(x), x),
            tf.nn.sigmoid_cross_entropy_with_logits(x, x),
            tf.nn.l2_loss(x),
        ],
    ),
    "lookups": (
        IDS,
        lambda x: [
            tf.gather(W, x),
            tf.nn.embedding_lookup(W, x),
            tf.one_hot(x, 5) @ weight(5, 3),
            tf.gather_nd(W, tf.stack([x, x], -1)),
            tf.gather(W, [1, 2]),
            tf.gather(W, 3, axis=1),
        ],
    ),
    "batched lookups": (
        X,
        lambda x: [
            tf.gather(x, tf.argmax(x, 1), axis=1, batch_dims=1),
            tf.gather(x, tf.cast(x[:, 0] > 0, "int32"), axis=2, batch_dims=1),
        ],
    ),
    "scatters": (
        X,
        lambda x: [
            tf.tensor_scatter_nd_add(x, [[0], [2]], x[:2]),
            tf.scatter_nd([[1], [3]], x[:2], (5, 6, 8)),
            tf.math.unsorted_segment_sum(x, tf.argmax(x[:, 0], -1), 3),
        ],
    ),
    "convolutions": (
        IMAGES,
        lambda x: [
            tf.nn.conv2d(x, weight(3, 3, 4, 6), 2, "SAME"),
            tf.nn.conv2d(x, weight(3, 3, 4, 6), 1, "VALID", dilations=2),
            tf.nn.conv2d(x, weight(3, 3, 2, 6), 1, [[0, 0], [1, 2], [0, 1], [0, 0]]),
            tf.nn.depthwise_conv2d(x, weight(3, 3, 4, 2), [1, 2, 2, 1], "SAME"),
            tf.nn.conv2d_transpose(x, weight(3, 3, 5, 4), (2, 16, 16, 5), 2),
            tf.nn.separable_conv2d(x, weight(3, 3, 4, 1), weight(1, 1, 4, 6), [1, 1, 1, 1], "SAME"),
        ],
    ),
    "pools": (
        IMAGES,
        lambda x: [
            tf.nn.max_pool2d(x, 3, 2, "SAME"),
            tf.nn.avg_pool2d(x, 2, 2, "VALID"),
            tf.nn.local_response_normalization(x),
            tf.nn.max_pool2d(x, 3, 2, [[0, 0], [1, 1], [1, 1], [0, 0]]),
        ],
    ),
    "volumes": (
        VOLUMES,
        lambda x: [
            tf.nn.conv3d(x, weight(3, 3, 3, 4, 6), [1, 1, 2, 2, 1], "SAME"),
            tf.nn.max_pool3d(x, 2, 2, "VALID"),
            tf.nn.avg_pool3d(x, 2, 1, "SAME"),
        ],
    ),
    "images": (
        IMAGES,
        lambda x: [
            tf.image.resize(x, (5, 7)),
            tf.image.resize(x, (16, 16), "nearest"),
            tf.nn.space_to_depth(x, 2),
            tf.nn.depth_to_space(x, 2),
            tf.image.flip_left_right(x),
            tf.image.resize(x, (4, 4), "bicubic"),
        ],
    ),
    "batch norm": (
        IMAGES,
        lambda x: [
            *raw.FusedBatchNormV3(
                x=x, scale=W[0, :4], offset=W[1, :4], mean=W[2, :4], variance=W[3, :4], is_training=False
            )[:1],
            *raw.FusedBatchNormV3(x=x, scale=W[0, :4], offset=W[1, :4], mean=[], variance=[])[:3],
        ],
    ),
    "matrices": (
        X,
        lambda x: [
            tf.linalg.inv(x @ weight(4, 8, 6)),
            tf.linalg.band_part(x, 1, 0),
            tf.linalg.diag(x),
            tf.linalg.diag_part(x),
            *tf.linalg.qr(x),
            tf.linalg.det(W),
            tf.linalg.solve(W, weight(8, 2)),
        ],
    ),
    "spectra": (
        X,
        lambda x: [tf.abs(tf.signal.rfft(x)), tf.math.real(tf.signal.fft(tf.cast(x, "complex64")))],
    ),
    "random": (
        X,
        lambda x: [
            tf.nn.dropout(x, 0.5),
            x + tf.random.normal((8,)),
            tf.random.stateless_uniform((4, 6, 8), (1, 2)) * x,
        ],
    ),
    "shapes": (
        X,
        lambda x: [
            tf.reshape(x, tf.concat([tf.shape(x)[:1], [-1]], 0)),
            tf.ones_like(x) * x,
            tf.zeros(tf.shape(x)) + x,
            tf.range(tf.size(x[0, 0]), dtype="float32") * x,
            tf.linspace(0.0, 1.0, 8) * x,
        ],
    ),
    "effects": (X, lambda x: _effects(x)),
    "cudnn": (X, lambda x: [*_cudnn(x, "lstm")[:3], *_cudnn(x, "gru")[:2]]),
    "loops": (
        X,
        lambda x: [
            tf.map_fn(lambda r: r @ W, x),
            tf.scan(lambda a, r: a + r @ W, x),
            tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a @ W), (0, x))[1],
            tf.vectorized_map(lambda r: r @ W, x),
        ],
    ),
}


def _cudnn(x: Any, mode: str) -> Any:
    state = tf.zeros((1, 6, 8))
    size = {"lstm": 4, "gru": 3}[mode] * (8 * 8 + 8 * 8 + 2 * 8)
    return raw.CudnnRNNV3(
        input=x, input_h=state, input_c=state, params=weight(size), sequence_lengths=[4] * 6, rnn_mode=mode
    )


def _effects(x: Any) -> list[Any]:
    tf.print(tf.shape(x))
    tf.debugging.assert_greater(x, -1e9)
    return [
        tf.identity(x) * 1.0,
        tf.debugging.check_numerics(x, "finite"),
        tf.stop_gradient(x) + tf.ensure_shape(x, (4, 6, 8)),
    ]


def nodes_of(f: Callable[[Any], Any], spec: tf.TensorSpec) -> list[Node]:
    """The nodes of a function, without its inputs and results."""
    loss = tf.function(lambda x: tf.reduce_sum(tf.cast(f(x), "float32")) + tf.reduce_sum(W), autograph=False)
    return [
        n
        for n in trace(loss, spec).graph.nodes
        if n.ops[0].kind not in ("parameter", "input", "constant", "output")
    ]
