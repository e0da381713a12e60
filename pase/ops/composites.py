"""Layers that frameworks have as one op, in the loop nests that JAX's own versions become: alike in name and price.

Each takes a builder and tensors and returns tensors. FLOPs a point follow the tables of the frontends' rules: one
for simple arithmetic, four for a division or root, ten for a transcendental function.
"""

from __future__ import annotations

from collections.abc import Sequence

from pase.ir import Tensor
from pase.ops import nests
from pase.ops.builder import GraphBuilder

__all__ = [
    "attend",
    "cross_entropy",
    "log_softmax",
    "mean",
    "normalize",
    "rms_normalize",
    "scale_and_shift",
    "softmax",
]


def _ew(b: GraphBuilder, name: str, inputs: Sequence[Tensor], flops: float = 1.0) -> Tensor:
    return nests.elementwise(b, name, inputs, [inputs[0].dtype], flops=flops)[0]


def _reduced(
    b: GraphBuilder, name: str, x: Tensor, axes: Sequence[int], differentiable: bool = True
) -> Tensor:
    return nests.reduce(b, name, [x], axes, [x.dtype], keepdims=True, differentiable=differentiable)[0]


def mean(b: GraphBuilder, x: Tensor, axes: Sequence[int]) -> Tensor:
    """The mean over some dims, which stay with one element."""
    return _ew(b, "div", [_reduced(b, "reduce_sum", x, axes)], 4.0)


def softmax(b: GraphBuilder, x: Tensor, axes: Sequence[int]) -> Tensor:
    top = _reduced(b, "reduce_max", x, axes, differentiable=False)
    e = _ew(b, "exp", [_ew(b, "sub", [x, top])], 10.0)
    return _ew(b, "div", [e, _reduced(b, "reduce_sum", e, axes)], 4.0)


def log_softmax(b: GraphBuilder, x: Tensor, axes: Sequence[int]) -> Tensor:
    top = _reduced(b, "reduce_max", x, axes, differentiable=False)
    shifted = _ew(b, "sub", [x, top])
    total = _reduced(b, "reduce_sum", _ew(b, "exp", [shifted], 10.0), axes)
    return _ew(b, "sub", [shifted, _ew(b, "log", [total], 10.0)])


def normalize(b: GraphBuilder, x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(x to mean 0 and variance 1 over these dims, the mean, one over the deviation)."""
    m = mean(b, x, axes)
    y = _ew(b, "sub", [x, m])
    variance = mean(b, _ew(b, "mul", [y]), axes)
    inverse = _ew(b, "rsqrt", [_ew(b, "add", [variance])], 4.0)
    return _ew(b, "mul", [y, inverse]), m, inverse


def rms_normalize(b: GraphBuilder, x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(x to mean square 1 over these dims, one over the root mean square)."""
    square = mean(b, _ew(b, "mul", [x]), axes)
    inverse = _ew(b, "rsqrt", [_ew(b, "add", [square])], 4.0)
    return _ew(b, "mul", [x, inverse]), inverse


def scale_and_shift(b: GraphBuilder, x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """Tensors that broadcast against x."""
    if scale is not None:
        x = _ew(b, "mul", [x, scale])
    return x if shift is None else _ew(b, "add", [x, shift])


def cross_entropy(b: GraphBuilder, log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """-log p[label] for log p [..., classes] and integer labels [...]; labels of a split class dim are summed."""
    from pase.ops import indexed

    x = log_probabilities
    rank = len(x.shape) - 1
    ids = nests.reshape(b, labels, (*labels.shape, 1))
    picked = indexed.gather(
        b, "gather", x, ids, labels.shape, offset_dims=(), collapsed=(rank,), indexed=(rank,),
        slice_sizes=[1] * (rank + 1), x_batch=tuple(range(rank)), ids_batch=tuple(range(rank)),
    )  # fmt: skip
    return _ew(b, "neg", [picked])


def attend(
    b: GraphBuilder, q: Tensor, k: Tensor, v: Tensor, bias: Sequence[Tensor] = (), *, extra_flops: float = 0.0
) -> Tensor:
    """softmax(q kᵀ + bias) v for q [b h s d], k [b g t d], v [b g t e], h a multiple of g; bias as [b h s t].

    extra_flops: a point of the scores, for a soft cap and the like.
    """
    heads, groups = q.shape[1], k.shape[1]
    grouped = heads != groups
    if grouped:  # several query heads a key head: they are a dim of their own
        assert isinstance(heads, int) and isinstance(groups, int)
        q = nests.reshape(b, q, (q.shape[0], groups, heads // groups, *q.shape[2:]))
    last = len(q.shape) - 1
    scores = nests.contract(b, q, k, ([last], [3]), ((0, 1), (0, 1)))
    scores = _ew(b, "mul", [scores], 1.0 + extra_flops)
    full = (q.shape[0], heads, q.shape[-2], k.shape[2])
    for t in bias:
        if grouped:
            lead = [1] * (4 - len(t.shape)) + list(t.shape)
            split = [groups, heads // groups] if lead[1] != 1 else [1, 1]  # type: ignore[operator]
            t = nests.reshape(b, t, (lead[0], *split, *lead[2:]))
        scores = _ew(b, "add", [scores, t])
    weights = softmax(b, scores, [len(scores.shape) - 1])
    out = nests.contract(b, weights, v, ([len(weights.shape) - 1], [2]), ((0, 1), (0, 1)))
    return nests.reshape(b, out, (*full[:3], v.shape[-1])) if grouped else out
