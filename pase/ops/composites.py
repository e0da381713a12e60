"""Layers that frameworks have as one op, built from the loop nests of JAX's versions, with equal names and costs.

Each function takes a builder and tensors, and returns tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pase.ir import Tensor
from pase.ir.functions import (
    ADD,
    DIV,
    EXP,
    LOG,
    MUL,
    NEG,
    REDUCE_MAX,
    RSQRT,
    SQUARE,
    STOP_GRADIENT,
    SUB,
    SUM,
    Function,
)
from pase.ir.literals import Number
from pase.ir.sizes import product
from pase.ops import indexed, nests
from pase.ops.builder import GraphBuilder

__all__ = [
    "Normalized",
    "apply",
    "count",
    "cross_entropy",
    "cross_entropy_of_logits",
    "log_softmax",
    "mean",
    "normalize",
    "rescale",
    "rms_normalize",
    "scale_and_shift",
    "shifted",
    "softmax",
]


def apply(
    b: GraphBuilder, function: Function, *inputs: Tensor | Number | None, flops: float | None = None
) -> Tensor:
    """The function of these tensors, which broadcast, and numbers (``nests.elementwise``). The result has the first
    tensor's dtype."""
    dtype = next(t.dtype for t in inputs if isinstance(t, Tensor))
    return nests.elementwise(b, function, inputs, [dtype], flops=flops)[0]


def _reduced(
    b: GraphBuilder, function: Function, x: Tensor, axes: Sequence[int], dtype: str | None = None
) -> Tensor:
    return nests.reduce(b, function, [x], axes, [dtype or x.dtype], keepdims=True)[0]


def shifted(b: GraphBuilder, x: Tensor, axes: Sequence[int]) -> Tensor:
    """x minus its maximum over these dims. No gradient flows through the maximum."""
    return apply(b, SUB, x, apply(b, STOP_GRADIENT, _reduced(b, REDUCE_MAX, x, axes)))


def mean(b: GraphBuilder, x: Tensor, axes: Sequence[int], dtype: str | None = None) -> Tensor:
    """The mean over some dims, which are kept with size one. dtype: the result's, if it is not that of x."""
    return apply(b, DIV, _reduced(b, SUM, x, axes, dtype), count(x, axes))


def count(x: Tensor, axes: Sequence[int]) -> int | None:
    """The number of elements over these dims; None if a size is symbolic."""
    n = product(x.shape[i] for i in axes)
    return n if isinstance(n, int) else None


def softmax(b: GraphBuilder, x: Tensor, axes: Sequence[int]) -> Tensor:
    e = apply(b, EXP, shifted(b, x, axes))
    return apply(b, DIV, e, _reduced(b, SUM, e, axes))


def log_softmax(b: GraphBuilder, x: Tensor, axes: Sequence[int]) -> Tensor:
    below = shifted(b, x, axes)
    total = _reduced(b, SUM, apply(b, EXP, below), axes)
    return apply(b, SUB, below, apply(b, LOG, total))


class Normalized(NamedTuple):
    """A tensor with mean 0 and variance 1 over some dims, with its former mean and variance and the inverse of its
    standard deviation. In these three, the reduced dims have size one."""

    value: Tensor
    mean: Tensor
    variance: Tensor
    inverse: Tensor


def normalize(
    b: GraphBuilder, x: Tensor, axes: Sequence[int], epsilon: float | None, dtype: str | None = None
) -> Normalized:
    """Normalizes x to mean 0 and variance 1 over these dims. epsilon: is added to the variance. dtype: that of the
    statistics, if it is not that of x."""
    m = mean(b, x, axes, dtype)
    y = apply(b, SUB, x, m)
    variance = mean(b, apply(b, SQUARE, y), axes, dtype)
    inverse = apply(b, RSQRT, apply(b, ADD, variance, epsilon))
    return Normalized(apply(b, MUL, y, inverse), m, variance, inverse)


def rescale(b: GraphBuilder, x: Tensor, mean: Tensor, variance: Tensor, epsilon: float | None) -> Tensor:
    """Normalizes x with a known mean and variance, as batch norm does in inference. They broadcast against x."""
    return apply(b, MUL, apply(b, SUB, x, mean), apply(b, RSQRT, apply(b, ADD, variance, epsilon)))


def rms_normalize(
    b: GraphBuilder, x: Tensor, axes: Sequence[int], epsilon: float | None
) -> tuple[Tensor, Tensor]:
    """Returns x scaled to mean square 1 over these dims, and the inverse of its root mean square."""
    square = mean(b, apply(b, SQUARE, x), axes)
    inverse = apply(b, RSQRT, apply(b, ADD, square, epsilon))
    return apply(b, MUL, x, inverse), inverse


def scale_and_shift(b: GraphBuilder, x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """x times scale plus shift; both broadcast against x and may be missing."""
    if scale is not None:
        x = apply(b, MUL, x, scale)
    return x if shift is None else apply(b, ADD, x, shift)


def cross_entropy(b: GraphBuilder, log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """-log p[label] for log p [..., classes] and integer labels [...]. If the class dim is split, shards are summed."""
    return apply(b, NEG, _picked(b, log_probabilities, labels))


def cross_entropy_of_logits(b: GraphBuilder, logits: Tensor, labels: Tensor) -> Tensor:
    """log Σ exp(logits) - logits[label] for logits [..., classes] and integer labels [...]."""
    lead, axes = logits.shape[:-1], [len(logits.shape) - 1]
    top = apply(b, STOP_GRADIENT, _reduced(b, REDUCE_MAX, logits, axes))
    total = _reduced(b, SUM, apply(b, EXP, apply(b, SUB, logits, top)), axes)
    log = apply(b, ADD, nests.reshape(b, apply(b, LOG, total), lead), nests.reshape(b, top, lead))
    return apply(b, SUB, log, _picked(b, logits, labels))


def _picked(b: GraphBuilder, x: Tensor, labels: Tensor) -> Tensor:
    """x[..., label] for integer labels."""
    rank = len(x.shape) - 1
    ids = nests.reshape(b, labels, (*labels.shape, 1))
    return indexed.gather(
        b,
        "gather",
        x,
        ids,
        labels.shape,
        indexed.IndexedDims(
            window=(),
            dropped=(rank,),
            indexed=(rank,),
            x_batch=tuple(range(rank)),
            ids_batch=tuple(range(rank)),
        ),
    )
