"""Rules for ATen's products, convolutions, pooling, normalization, attention, embedding lookups, dropout and losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase.frontends.common.products import einsum, matmul
from pase.frontends.common.slicing import take
from pase.frontends.common.values import Value
from pase.frontends.torch.rules import activation, lowers
from pase.frontends.torch.values import TorchCall, shared_heads
from pase.ir import functions
from pase.ir.functions import FUNCTIONS
from pase.ops import composites, nests, windows
from pase.ops.attention import attention

__all__: list[str] = []


# Products.


def _times(c: TorchCall, x: Value, w: Value) -> Value:
    """x [... k] times w [n k], transposed as linear layers store it."""
    rank = len(x.shape)
    return c.value(nests.contract(c.b, c.tensor(x), c.tensor(w), ([rank - 1], [len(w.shape) - 1])))


@lowers("linear")
def _linear(c: TorchCall) -> Value:
    x, bias = c.x("input"), c.opt("bias")
    out = _times(c, c.unmerged(x), c.x("weight"))
    if bias is not None:
        out = c.elementwise([out, bias], functions.ADD)
    return c.reshape(out, c.shape_out)


@lowers("matmul", "mm", "bmm", "mv", "dot")
def _matmul(c: TorchCall) -> Value:
    x, y = (v for v in c.values)
    return c.reshape(matmul(c, x, y, c.out()[1]), c.shape_out)


@lowers("addmm", "baddbmm", "addmv")
def _addmm(c: TorchCall) -> Value:
    """A product plus a tensor, each optionally scaled by a number."""
    added, x, y = c.values
    out = matmul(c, x, y, c.out()[1])
    if x.note[:1] == ("view",) and out.note[:1] == ("view",) and len(added.shape) == 1:
        out = out.note[1]  # the product before its rows were merged
    if c.arg("alpha", 1) != 1:
        out = c.elementwise([out, c.arg("alpha")], functions.MUL)
    if (beta := c.arg("beta", 1)) == 1:
        return c.reshape(c.elementwise([out, added], functions.ADD), c.shape_out)
    total = c.elementwise([out, added, beta], functions.ADD_SCALED, flops=2.0, name="add")
    return c.reshape(total, c.shape_out)


@lowers("einsum")
def _einsum(c: TorchCall) -> Value:
    return einsum(c, c.arg("equation"), c.values)


@lowers("_fft_c2c", "_fft_r2c", "_fft_c2r")
def _fft(c: TorchCall) -> Value:
    """The dims before the transformed ones may be split; 5 log2(n) FLOPs per point (Cooley and Tukey's count)."""
    x, (shape, dtype) = c.x(), c.out()
    dims = c.dims("dim", len(x.shape))
    lead = min(dims, default=len(x.shape))
    flops = 5.0 * math.log2(math.prod(x.shape[d] for d in dims)) * math.prod(x.shape[lead:])
    made = nests.batched(
        c.b, "fft", [c.tensor(x)], [(shape, dtype)], lead, flops=flops, function=functions.FFT
    )
    return c.value(made[0])


@lowers("_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped(c: TorchCall) -> Value:
    """Groups of rows, each multiplied by its own weights. The number of rows per group is known only at run time."""
    x, w = c.values[:2]
    ends = c.opt("offs")
    if (len(x.shape), len(w.shape)) != (2, 3) or ends is None:
        raise c.fail(
            f"pase reads only rows [n k] by groups of weights [g k m] with offsets, but got {list(x.shape)} and "
            f"{list(w.shape)}"
        )
    if c.opt("bias") is not None:
        raise c.fail(
            "pase does not read a bias per group",
            fix="add the bias to the result, indexed by the group of each row",
        )
    rows, weights, until = c.tensors(x, w, ends)
    return c.value(nests.grouped_product(c.b, rows, weights, 1, 1, 0, c.out()[1], ends=until))


@lowers("scaled_dot_product_attention")
def _attention(c: TorchCall) -> Value:
    """Attention as one op on queries, keys and values [batch, heads, positions, width]. The scores are not kept."""
    q, k, v = (c.x(n) for n in ("query", "key", "value"))
    once = [shared_heads(t) for t in (k, v)]
    k, v = (h or t for h, t in zip(once, (k, v), strict=True)) if all(once) else (k, v)
    lead = q.shape[:-3]
    if len(q.shape) != 4:  # [positions, width], or several batch dims
        q, k, v = (_four(c, t) for t in (q, k, v))
    extra = []
    if (mask := c.opt("attn_mask")) is not None and mask.note != ("filled",):
        if len(mask.shape) > 4:
            mask = c.reshape(mask, (math.prod(mask.shape[: len(lead)]), *mask.shape[len(lead) :]))
        extra.append(c.tensor(c.reshape(mask, (*[1] * (4 - len(mask.shape)), *mask.shape))))
    causal = bool(c.arg("is_causal", False))
    turned = all(t.note[:1] == ("transposed",) and t.note[2] == _HEADS_FIRST for t in (q, k, v))
    if turned:  # use the operands as the projections made them
        q, k, v = (t.note[1] for t in (q, k, v))
    order = (0, 1, 2, 3) if turned else (0, 2, 1, 3)
    out = c.value(attention(c.b, c.tensor(q), c.tensor(k), c.tensor(v), extra, causal=causal, order=order))
    out = c.transpose(out, _HEADS_FIRST) if turned else out
    return out if out.shape == c.shape_out else c.reshape(out, c.shape_out)


_HEADS_FIRST = [0, 2, 1, 3]
"""The transpose from [batch, positions, heads, width] to [batch, heads, positions, width], which is its own inverse."""


def _four(c: TorchCall, v: Value) -> Value:
    """The value with four dims: batch dims are merged, and missing ones added."""
    full = (*[1] * max(0, 3 - len(v.shape)), *v.shape)
    return c.reshape(v, (math.prod(full[:-3]), *full[-3:]))


# Convolutions and pools. Dims are [batch, channels, space ...].


def _space(c: TorchCall, x: Value, rank: int) -> Value:
    """x with a batch dim, which is added if x is a single example."""
    return x if len(x.shape) == rank else c.reshape(x, (1, *x.shape))


def _a_channel(c: TorchCall, v: Value, rank: int) -> Value:
    """A value per channel, reshaped to broadcast against [n c ...]."""
    return c.reshape(v, (v.elements, *[1] * (rank - 2)))


@lowers(
    "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"
)
def _convolution(c: TorchCall) -> Value:
    w, bias = c.x("weight"), c.opt("bias")
    rank, n, groups = len(w.shape), len(w.shape) - 2, c.arg("groups", 1)
    x = _space(c, c.x("input"), rank)
    shape = c.shape_out if len(c.shape_out) == rank else (1, *c.shape_out)
    strides, dilation = c.ints("stride", n, [1] * n), c.ints("dilation", n, [1] * n)
    dims = tuple(range(2, rank))
    turned = "transpose" in c.op or bool(c.arg("transposed", False))
    pads = _padding(c, [(k - 1) * d for k, d in zip(w.shape[2:], dilation, strict=True)])
    if turned:  # here, padding is the number of elements that are left out at the ends of the result
        pads = [(k - 1) * d - pad for k, d, pad in zip(w.shape[2:], dilation, pads, strict=True)]
    if (
        turned and groups > 1
    ):  # filters [g i, o, ...] become [g o, i, ...], the layout of a convolution's filters
        per = w.shape[0] // groups
        w = c.transpose(c.reshape(w, (groups, per, *w.shape[1:])), [0, 2, 1, *range(3, rank + 1)])
        w = c.reshape(w, (w.shape[0] * w.shape[1], per, *w.shape[3:]))
    with c.b.undetermined(unless=not turned):  # the filters are flipped
        made = windows.conv(
            c.b,
            c.tensor(x),
            c.tensor(w),
            shape,
            c.out()[1],
            windows.ConvDims(
                x=(0, 1, dims), w=(1, 0, dims) if turned and groups == 1 else (0, 1, dims), out=(0, 1, dims)
            ),
            windows.Sliding(
                strides=[1] * n if turned else strides,
                dilation=dilation,
                padding=pads,
                input_dilation=strides if turned else (),
            ),
            groups=groups,
        )
    out = c.value(made)
    if bias is not None:
        out = c.elementwise([out, _a_channel(c, bias, rank)], functions.ADD)
    return c.reshape(out, c.shape_out)


def _padding(c: TorchCall, overlap: Sequence[int]) -> list[int]:
    """The number of padding elements in front of each dim.

    overlap: the overlap of the windows per dim. Padding "same" puts the odd element at the end.
    """
    told = c.arg("padding", 0)
    if isinstance(told, str):
        return [n // 2 if told == "same" else 0 for n in overlap]
    return c.ints("padding", len(overlap), [0] * len(overlap))


_POOLS = {"max_pool": functions.WINDOW_MAX, "avg_pool": functions.WINDOW_SUM}


@lowers(
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
)
def _pool(c: TorchCall) -> Sequence[Value]:
    n = int(c.op[8])
    x = _space(c, c.x(), n + 2)
    kernel = c.ints("kernel_size", n)
    strides, dilation = c.ints("stride", n, kernel), c.ints("dilation", n, [1] * n)
    shape = (*x.shape[:2], *c.shape_out[-n:])
    made = windows.window_reduce(
        c.b,
        _POOLS[c.op[:8]],
        c.tensor(x),
        shape,
        [1, 1, *kernel],
        windows.Sliding(
            strides=[1, 1, *strides],
            padding=[0, 0, *c.ints("padding", n, [0] * n)],
            dilation=[1, 1, *dilation],
        ),
    )
    out = c.value(made)
    if c.op.startswith("avg"):
        out = c.elementwise([out, _pooled(c, kernel)], functions.DIV)
    found = c.reshape(out, c.shape_out)
    return [found, *(c.missing(*s, "the places of the maxima") for s in c.outs[1:] if s is not None)]


def _pooled(c: TorchCall, kernel: Sequence[int]) -> float | None:
    """The number by which a mean over windows divides; None if it is not the same for all windows."""
    if (told := c.arg("divisor_override")) is not None:
        return float(told)
    padded = any(c.ints("padding", 1, [0])) and not c.arg("count_include_pad", True)
    return None if padded or c.arg("ceil_mode", False) else math.prod(kernel)


@lowers(
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
)
def _adaptive(c: TorchCall) -> Sequence[Value]:
    """Pooling to a given number of elements per dim.

    For one element, it is a mean or maximum over the dim; otherwise, windows that may overlap by one element.
    """
    n = int(c.op[c.op.index("pool") + 4])
    x, largest = c.x(), "max" in c.op
    rank, sizes = len(x.shape), c.shape_out[-n:]
    if set(sizes) == {1}:
        function = functions.REDUCE_MAX if largest else functions.SUM
        axes = list(range(rank - n, rank))
        made = nests.reduce(c.b, function, [c.tensor(x)], axes, [x.dtype], keepdims=True)[0]
        count: float | None = math.prod(x.shape[-n:])
    else:
        ways = [-(-s // t) for s, t in zip(x.shape[-n:], sizes, strict=True)]
        equal = all(s % t == 0 for s, t in zip(x.shape[-n:], sizes, strict=True))
        count = math.prod(ways) if equal else None
        steps = [max(s // t, 1) for s, t in zip(x.shape[-n:], sizes, strict=True)]
        front = [1] * (rank - n)
        with c.b.undetermined(unless=equal):
            made = windows.window_reduce(
                c.b,
                _POOLS["max_pool" if largest else "avg_pool"],
                c.tensor(x),
                c.shape_out,
                [*front, *ways],
                windows.Sliding(strides=[*front, *steps], padding=[0] * rank),
            )
    out = c.value(made) if largest else c.elementwise([c.value(made), count], functions.DIV)
    return [out, *(c.missing(*s, "the places of the maxima") for s in c.outs[1:] if s is not None)]


# Normalization.


def _affine(c: TorchCall, x: Value, scale: Value | None, shift: Value | None) -> Value:
    if scale is not None:
        x = c.elementwise([x, scale], functions.MUL)
    return x if shift is None else c.elementwise([x, shift], functions.ADD)


@lowers("layer_norm", "native_layer_norm", "rms_norm")
def _layer_norm(c: TorchCall) -> Sequence[Value]:
    x = c.x("input")
    axes = list(range(len(x.shape) - len(c.arg("normalized_shape")), len(x.shape)))
    if c.op == "rms_norm":
        epsilon = c.arg("eps")
        if epsilon is None:
            epsilon = _smallest(x.dtype)
        y, inverse = (c.value(t) for t in composites.rms_normalize(c.b, c.tensor(x), axes, epsilon))
        return [_affine(c, y, c.opt("weight"), None), inverse]
    found = composites.normalize(c.b, c.tensor(x), axes, c.arg("eps"))
    out = _affine(c, c.value(found.value), c.opt("weight"), c.opt("bias"))
    return [out, c.value(found.mean), c.value(found.inverse)]


def _smallest(dtype: str) -> float:
    """The difference between 1 and the next number of a dtype, which is the default epsilon of an RMS norm."""
    import torch

    return torch.finfo(getattr(torch, dtype)).eps


@lowers("group_norm", "native_group_norm", "instance_norm")
def _group_norm(c: TorchCall) -> Sequence[Value]:
    x = c.x("input")
    rank, channels = len(x.shape), x.shape[1]
    groups = channels if c.op == "instance_norm" else c.arg("num_groups") or c.arg("group")
    cut = c.reshape(x, (x.shape[0], groups, channels // groups, *x.shape[2:]))
    found = composites.normalize(c.b, c.tensor(cut), list(range(2, rank + 1)), c.arg("eps"))
    scale, shift = (None if v is None else _a_channel(c, v, rank) for v in (c.opt("weight"), c.opt("bias")))
    out = _affine(c, c.reshape(c.value(found.value), x.shape), scale, shift)
    two = (x.shape[0], groups)
    return [out, c.reshape(c.value(found.mean), two), c.reshape(c.value(found.inverse), two)]


_NARROW = frozenset({"float16", "bfloat16"})


@lowers(
    "batch_norm",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit",
    "native_batch_norm",
    "_native_batch_norm_legit_no_training",
)
def _batch_norm(c: TorchCall) -> Sequence[Value]:
    """Normalizes by the batch's statistics in training, and updates the running ones; otherwise by the running ones.

    PyTorch adds up statistics of narrow numbers in float32.
    """
    x = c.x("input")
    rank = len(x.shape)
    scale, shift, mean, variance = (
        None if v is None else _a_channel(c, v, rank)
        for v in (c.opt(n) for n in ("weight", "bias", "running_mean", "running_var"))
    )
    if c.arg("training", False) or mean is None or variance is None:
        others, sums = [i for i in range(rank) if i != 1], "float32" if x.dtype in _NARROW else None
        found = composites.normalize(c.b, c.tensor(x), others, c.arg("eps"), sums)
        out, own = c.value(found.value), [c.value(found.mean), c.value(found.inverse)]
        count, m = x.elements // x.shape[1], c.arg("momentum", 0.1)
        pairs = [(mean, found.mean, m), (variance, found.variance, m * count / max(count - 1, 1))]
        pairs = pairs if len(c.outs) > 3 else []
        new = [_running(c, old, c.value(now), 1 - m, by) for old, now, by in pairs if old is not None]
    else:
        out = c.value(composites.rescale(c.b, c.tensor(x), c.tensor(mean), c.tensor(variance), c.arg("eps")))
        own, new = [], []
    flat = [c.reshape(v, (x.shape[1],)) for v in (*own, *new)]
    rest = [
        c.missing(*s, f"result {i} of it") for i, s in enumerate(c.outs) if i > len(flat) and s is not None
    ]
    return [_affine(c, out, scale, shift), *flat, *rest]


def _running(c: TorchCall, old: Value, now: Value, kept: float, new: float) -> Value:
    """The running statistic, updated by a fraction of the batch's statistic."""
    return c.elementwise(
        [c.elementwise([old, kept], functions.MUL), c.elementwise([now, new], functions.MUL)], functions.ADD
    )


# Lookups, dropout, losses.


@lowers("embedding")
def _embedding(c: TorchCall) -> Value:
    return take(c, c.x("weight"), c.x("indices"), 0)


@lowers("native_dropout", "dropout", "feature_dropout", "alpha_dropout")
def _dropout(c: TorchCall) -> Sequence[Value]:
    """A random mask, and the scaled product with it."""
    x = c.values[0]
    if not c.arg("train", False) or c.arg("p", 0.0) == 0.0:
        return [x, c.filled(x.shape, "bool")]
    mask = nests.generate(c.b, functions.RANDOM, x.shape, "bool", name="dropout")
    plain = c.op in ("native_dropout", "dropout") and c.arg("p") < 1
    scale = 1.0 / (1.0 - c.arg("p")) if plain else None
    (out,) = nests.elementwise(c.b, functions.MUL, [c.tensor(x), mask, scale], [x.dtype], flops=2.0)
    return [c.value(out), c.value(mask)]


@lowers(
    "rand",
    "randn",
    "randint",
    "rand_like",
    "randn_like",
    "randint_like",
    "bernoulli",
    "normal",
    "uniform",
    "exponential",
    "randperm",
    "normal_functional",
)
def _random(c: TorchCall) -> Value:
    return c.value(nests.generate(c.b, functions.RANDOM, *c.out(), name=c.op))


@lowers(
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward", "nll_loss2d_forward"
)
def _cross_entropy(c: TorchCall) -> Sequence[Value]:
    """The loss of scores [n c ...] or [c] for labels [n ...] or for probabilities of the classes.

    Classes are moved to the last dim, because the lookup needs them there. A mean is over the labels that are not
    ``ignore_index``.
    """
    x, labels = c.x(), c.x("target")
    if len(x.shape) == 1:
        x, labels = c.reshape(x, (1, *x.shape)), c.reshape(labels, (1, *labels.shape))
    rank = len(x.shape)
    flat = _unflattened(x)
    x = flat if flat is not x else c.transpose(x, [0, *range(2, rank), 1])
    rank = len(x.shape)
    labels = labels if "float" in labels.dtype else c.reshape(labels, x.shape[:-1])
    logp = x
    if c.op == "cross_entropy_loss":
        with c.b.called("log_softmax"):
            logp = c.value(composites.log_softmax(c.b, c.tensor(x), [rank - 1]))
    if "float" in labels.dtype:
        moved = labels if flat is x else c.transpose(labels, [0, *range(2, rank), 1])
        return [_of_probabilities(c, logp, c.reshape(moved, x.shape))]
    with c.b.called("" if c.arg("label_smoothing", 0.0) else "nll_loss"):
        return _of_labels(c, logp, labels)


def _of_labels(c: TorchCall, logp: Value, labels: Value) -> Sequence[Value]:
    """The loss of logarithms of probabilities [n ... c] for labels [n ...], and the number of these."""

    def if_known(v: Value, dtype: str) -> Value:
        return c.elementwise([known, v, 0.0], functions.WHERE, dtype=dtype, name="select")

    losses = c.value(composites.cross_entropy(c.b, c.tensor(logp), c.tensor(labels)))
    known = counts = c.elementwise([labels, c.arg("ignore_index", -100)], FUNCTIONS["ne"])
    if (weight := c.opt("weight")) is not None:
        each = take(c, weight, labels, 0)
        counts = if_known(each, each.dtype)
        losses = c.elementwise([losses, counts], functions.MUL)
    if smoothing := c.arg("label_smoothing", 0.0):
        scores = logp if weight is None else c.elementwise([logp, weight], functions.MUL)
        (every,) = nests.reduce(c.b, functions.SUM, [c.tensor(scores)], [len(logp.shape) - 1], [logp.dtype])
        losses = c.elementwise([losses, 1 - smoothing], functions.MUL)
        spread = c.elementwise([c.value(every), -smoothing / logp.shape[-1]], functions.MUL)
        losses = c.elementwise([losses, spread], functions.ADD)
    losses = if_known(losses, logp.dtype)
    how = c.arg("reduction", 1)
    if how == 0:
        return [c.reshape(losses, c.shape_out)]
    axes = range(len(losses.shape))
    (total,) = nests.reduce(c.b, functions.SUM, [c.tensor(losses)], axes, [logp.dtype])
    (number,) = nests.reduce(c.b, functions.SUM, [c.tensor(counts)], axes, [logp.dtype])
    out = c.value(total)
    if how == 1:
        out = c.elementwise([out, c.value(number)], functions.DIV)
    return [out, c.value(number)]


def _unflattened(x: Value) -> Value:
    """The value [b s c] if x is its reshape [(b s) c], as in most losses; otherwise x.

    With batch and positions as separate dims, the loss may be split in the same way as the layers before it.
    """
    if len(x.shape) != 2 or x.note[:1] != ("view",):
        return x
    base: Value = x.note[1]
    return base if len(base.shape) > 2 and base.shape[-1] == x.shape[-1] else x


def _of_probabilities(c: TorchCall, logp: Value, target: Value) -> Value:
    """The loss for labels that are probabilities: log-probabilities of the classes, weighted by the labels."""
    more = [None] if c.opt("weight") is not None or c.arg("label_smoothing", 0.0) else []
    each = c.elementwise([logp, target, *more], functions.MUL)
    how, rank = c.arg("reduction", 1), len(logp.shape)
    axes = [rank - 1] if how == 0 else range(rank)
    out = c.value(nests.reduce(c.b, functions.SUM, [c.tensor(each)], axes, [logp.dtype])[0])
    if how == 1:
        return c.elementwise([out, -math.prod(logp.shape[:-1])], functions.DIV)
    return c.elementwise([out], functions.NEG)


@lowers("mse_loss", "l1_loss")
def _distance(c: TorchCall) -> Value:
    x = c.elementwise([c.x(), c.x("target")], functions.SUB)
    x = c.elementwise([x], functions.SQUARE if c.op == "mse_loss" else FUNCTIONS["abs"])
    how = c.arg("reduction", 1)
    if how == 0:
        return x
    (total,) = nests.reduce(c.b, functions.SUM, [c.tensor(x)], range(len(x.shape)), [x.dtype])
    return c.elementwise([c.value(total), x.elements], functions.DIV) if how == 1 else c.value(total)


@lowers("glu")
def _glu(c: TorchCall) -> Value:
    """One half of the dim times the sigmoid of the other half."""
    x = c.x()
    axis = c.axis(c.arg("dim", -1), len(x.shape))
    halves = [c.value(nests.part(c.b, "split", c.tensor(x), axis, 2, i)) for i in range(2)]
    return c.elementwise([halves[0], activation(c, "sigmoid", halves[1])], functions.MUL)


@lowers("prelu")
def _prelu(c: TorchCall) -> Value:
    x, slope = c.x(), c.x("weight")
    slope = _a_channel(c, slope, len(x.shape)) if slope.elements > 1 else slope
    below = c.elementwise([x, slope], functions.MUL)
    return c.elementwise([c.elementwise([x, 0], FUNCTIONS["gt"]), below, x], functions.SELECT, dtype=x.dtype)


@lowers(
    "fake_quantize_per_tensor_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fake_quantize_per_channel_affine_cachemask",
)
def _fake_quantize(c: TorchCall) -> Sequence[Value | None]:
    """Rounded to a grid, and back. The mask of what is inside the grid is for backward, which is the op's own."""
    x = c.x()
    grid = [v for v in (c.given["scale"], c.given["zero_point"]) if isinstance(v, Value)]
    if "axis" in c.given:
        behind = len(x.shape) - 1 - c.axis(c.arg("axis"), len(x.shape))
        grid = [c.reshape(v, (*v.shape, *[1] * behind)) for v in grid]
    return [c.elementwise([x, *grid], FUNCTIONS["fake_quantize"], dtype=c.out()[1]), None]
