"""Rules for ONNX's convolutions, pooling and normalization, and for ops on images and signals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pase.frontends.common.values import Value
from pase.frontends.onnx.rules import activation, lowers, nothing
from pase.frontends.onnx.values import OnnxCall
from pase.ir import Tensor, functions
from pase.ops import composites, nests, windows

__all__ = ["opaque_per_batch"]


def _positive(c: OnnxCall, name: str, n: int) -> list[int]:
    """An attribute with one positive integer per spatial dim; ones if it is missing."""
    out = c.ints(name) or [1] * n
    if len(out) != n or any(not 0 < k < 2**31 for k in out):
        raise c.fail(f"its {name} {out[:6]} do not match {n} spatial dims")
    return out


def _pads(c: OnnxCall, n: int) -> list[int]:
    """The pads of n spatial dims: those at the start of each dim, then those at the ends."""
    out = c.ints("pads") or [0] * (2 * n)
    if len(out) != 2 * n or any(abs(p) > 2**31 for p in out):
        raise c.fail(f"its pads {out[:6]} do not match {n} spatial dims")
    return out


def _windows(
    c: OnnxCall, x: Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[list[int], list[int]]:
    """(output size, padding in front) of each spatial dim under a sliding window, as ONNX defines them."""
    n = len(x)
    strides, pads = _positive(c, "strides", n), _pads(c, n)
    auto = c.text("auto_pad", "NOTSET")
    out, before = [], [0 if auto == "VALID" else pad for pad in pads[:n]]
    for i, (size, k, s, d) in enumerate(zip(x, kernel, strides, dilation, strict=True)):
        reach = (k - 1) * d + 1
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            out.append(-(-size // s))
            before[i] = _half(max((out[i] - 1) * s + reach - size, 0), auto)
            continue
        free = size - reach + (pads[i] + pads[i + n] if auto != "VALID" else 0)
        if free < 0:
            raise c.fail(f"its window of {reach} does not fit a dim of {size} elements")
        rounded = -(-free // s) if c.integer("ceil_mode") else free // s
        if c.integer("ceil_mode") and rounded * s >= size + pads[i]:
            rounded -= 1  # a window that starts in the padding after the data does not count
        out.append(rounded + 1)
    return out, before


def _half(padding: int, auto: str) -> int:
    """The part of a padding that is in front. SAME_UPPER puts the odd element at the end."""
    return (padding + (auto != "SAME_UPPER")) // 2


def _convolve(c: OnnxCall, x: Value, w: Value, dtype: str | None = None) -> Value:
    """A convolution of x [n c ...] with filters w [out, in of a group, ...]. dtype: of the result."""
    n = len(x.shape) - 2
    if n < 1 or len(w.shape) != n + 2:
        raise c.fail(f"its filter {list(w.shape)} does not fit an input {list(x.shape)}")
    groups = c.integer("group", 1)
    if groups < 1 or x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise c.fail(f"its filter {list(w.shape)} in {groups} groups does not fit {x.shape[1]} channels")
    kernel, dilation = w.shape[2:], _positive(c, "dilations", n)
    if (told := c.ints("kernel_shape")) and tuple(told) != kernel:
        raise c.fail(f"its kernel_shape {told[:6]} differs from its filter {list(w.shape)}")
    extents, padding = _windows(c, x.shape[2:], kernel, dilation)
    shape = c.shape((x.shape[0], w.shape[0], *extents))
    if math.prod(shape) == 0 or x.elements == 0 or w.elements == 0:
        return nothing(shape, dtype or x.dtype)
    dims = tuple(range(2, n + 2))
    out = windows.conv(
        c.b,
        c.tensor(x),
        c.tensor(w),
        shape,
        dtype or x.dtype,
        windows.ConvDims(x=(0, 1, dims), w=(0, 1, dims), out=(0, 1, dims)),
        windows.Sliding(strides=_positive(c, "strides", n), dilation=dilation, padding=padding),
        groups=groups,
    )
    return c.value(out)


def _channels(c: OnnxCall, v: Value, rank: int) -> Value:
    """A value per channel, reshaped to [c 1 1 ...] to broadcast against [n c ...]."""
    if len(v.shape) != 1:
        raise c.fail(f"it needs one value per channel, but an input has shape {list(v.shape)}")
    return c.reshape(v, (v.shape[0], *[1] * (rank - 2)))


def _biased(c: OnnxCall, out: Value, i: int) -> Value:
    bias = c.opt(i)
    if bias is None:
        return out
    if bias.shape != (out.shape[1],):
        raise c.fail(f"its bias {list(bias.shape)} does not fit {out.shape[1]} channels")
    return c.elementwise([out, _channels(c, bias, len(out.shape))], functions.ADD)


@lowers("Conv", "com.microsoft:FusedConv")
def _conv(c: OnnxCall) -> Value:
    out = _biased(c, _convolve(c, c.x(0), c.x(1)), 2)
    return activation(c, c.text("activation", "Relu").lower(), out) if c.op == "FusedConv" else out


@lowers("ConvInteger")
def _conv_integer(c: OnnxCall) -> Value:
    with c.b.undetermined(unless=c.opt(2) is None and c.opt(3) is None):  # zero points
        return _convolve(c, c.x(0), c.x(1), "int32")


@lowers("QLinearConv")
def _qlinear_conv(c: OnnxCall) -> Value:
    with c.b.undetermined():  # scales and zero points
        out = _biased(c, _convolve(c, c.x(0), c.x(3), "int32"), 8)
    return c.elementwise([out], functions.QUANTIZE, dtype=c.x(7).dtype)


@lowers("CausalConvWithState")
def _causal(c: OnnxCall) -> Sequence[Value]:
    """A depthwise convolution that only reads earlier elements. Elements before the input come from a state."""
    x, w = c.x(0), c.x(1)
    if len(x.shape) < 3 or w.shape[:2] != (x.shape[1], 1) or len(w.shape) != len(x.shape):
        raise c.fail(f"its filter {list(w.shape)} does not fit an input {list(x.shape)}")
    n = len(x.shape) - 2
    dims = tuple(range(2, n + 2))
    with c.b.undetermined():  # the state, and an activation
        made = windows.conv(
            c.b,
            c.tensor(x),
            c.tensor(w),
            x.shape,
            x.dtype,
            windows.ConvDims(x=(0, 1, dims), w=(0, 1, dims), out=(0, 1, dims)),
            windows.Sliding(strides=[1] * n, dilation=[1] * n, padding=[k - 1 for k in w.shape[2:]]),
            groups=x.shape[1],
        )
    return [_biased(c, c.value(made), 2), c.missing((*x.shape[:-1], w.shape[-1] - 1), x.dtype, "its state")]


@lowers("ConvTranspose")
def _conv_transpose(c: OnnxCall) -> Value:
    x, w = c.x(0), c.x(1)
    n, groups = len(x.shape) - 2, c.integer("group", 1)
    if n < 1 or len(w.shape) != n + 2 or groups < 1 or x.shape[1] != w.shape[0] or w.shape[0] % groups:
        raise c.fail(f"its filter {list(w.shape)} in {groups} groups does not fit an input {list(x.shape)}")
    strides, dilation, pads = _positive(c, "strides", n), _positive(c, "dilations", n), _pads(c, n)
    extra = c.ints("output_padding") or [0] * n
    if len(extra) != n:
        raise c.fail(f"its output_padding {extra[:6]} does not match {n} spatial dims")
    auto, told = c.text("auto_pad", "NOTSET"), c.ints("output_shape")
    spatial, before = [], []
    for i, size in enumerate(x.shape[2:]):
        overlap = (w.shape[i + 2] - 1) * dilation[i]
        full = strides[i] * (size - 1) + extra[i] + overlap + 1
        same = auto in ("SAME_UPPER", "SAME_LOWER")
        if told:
            spatial.append(told[-n:][i])
        elif same:
            spatial.append(size * strides[i])
        else:
            spatial.append(full - (0 if auto == "VALID" else pads[i] + pads[i + n]))
        # cut: the elements that are left out at the start of the result, the padding of the forward convolution.
        cut = _half(full - spatial[i], auto) if told or same else 0 if auto == "VALID" else pads[i]
        before.append(overlap - cut)
    shape = c.shape((x.shape[0], w.shape[1] * groups, *spatial))
    dims = tuple(range(2, n + 2))
    if groups > 1:  # filters [g i, o, ...] become [g o, i, ...], the layout of a convolution's filters
        per = w.shape[0] // groups
        w = c.reshape(w, (groups, per, *w.shape[1:]))
        w = c.transpose(w, [0, 2, 1, *range(3, n + 3)])
        w = c.reshape(w, (w.shape[0] * w.shape[1], per, *w.shape[3:]))
    if math.prod(shape) == 0:
        return nothing(shape, x.dtype)
    w_dims = (0, 1, dims) if groups > 1 else (1, 0, dims)
    with c.b.undetermined():  # the filters are flipped
        out = windows.conv(
            c.b,
            c.tensor(x),
            c.tensor(w),
            shape,
            x.dtype,
            windows.ConvDims(x=(0, 1, dims), w=w_dims, out=(0, 1, dims)),
            windows.Sliding(strides=[1] * n, dilation=dilation, padding=before, input_dilation=strides),
            groups=groups,
        )
    return _biased(c, c.value(out), 2)


# Pooling.


@lowers("MaxPool", "AveragePool", "LpPool")
def _pool(c: OnnxCall) -> Sequence[Value | None]:
    x = c.x()
    n = len(x.shape) - 2
    kernel = c.ints("kernel_shape") or []
    if n < 1 or len(kernel) != n:
        raise c.fail(f"its window {kernel[:6]} does not fit an input {list(x.shape)}")
    kernel, dilation = _positive(c, "kernel_shape", n), _positive(c, "dilations", n)
    extents, padding = _windows(c, x.shape[2:], kernel, dilation)
    shape = c.shape((*x.shape[:2], *extents))
    if c.op == "LpPool":
        x = c.elementwise([x, None], functions.INTEGER_POW)
    function = functions.WINDOW_MAX if c.op == "MaxPool" else functions.WINDOW_SUM
    strides = _positive(c, "strides", n)
    out = c.value(
        windows.window_reduce(
            c.b,
            function,
            c.tensor(x),
            shape,
            [1, 1, *kernel],
            windows.Sliding(strides=[1, 1, *strides], padding=[0, 0, *padding], dilation=[1, 1, *dilation]),
        )
    )
    if c.op != "MaxPool":
        plain = c.op == "AveragePool" and not any(padding) and not c.integer("ceil_mode")
        plain = (
            plain and not any(c.ints("pads") or ()) and c.text("auto_pad", "NOTSET") in ("NOTSET", "VALID")
        )
        out = c.elementwise([out, math.prod(kernel) if plain else None], functions.DIV)
    return [out, c.missing(shape, "int64", "the places of the maxima")]


@lowers("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(c: OnnxCall) -> Value:
    x = c.x()
    axes = list(range(2, len(x.shape)))
    if not axes:
        raise c.fail(f"its input {list(x.shape)} has no spatial dims to pool over")
    if c.op == "GlobalLpPool":
        x = c.elementwise([x, None], functions.INTEGER_POW)
    function = functions.REDUCE_MAX if c.op == "GlobalMaxPool" else functions.SUM
    out = c.value(nests.reduce(c.b, function, [c.tensor(x)], axes, [x.dtype], keepdims=True)[0])
    if c.op == "GlobalMaxPool":
        return out
    count = math.prod(x.shape[2:]) if c.op == "GlobalAveragePool" else None
    return c.elementwise([out, count], functions.DIV)


@lowers("LRN")
def _lrn(c: OnnxCall) -> Value:
    """x / (k + alpha * sum of squares over neighbouring channels) ** beta."""
    x, size = c.x(), c.integer("size", 1)
    if len(x.shape) < 2 or not 0 < size < 2**31:
        raise c.fail(f"its size {size} does not fit an input {list(x.shape)}")
    square = c.elementwise([x], functions.SQUARE)
    window = [size if i == 1 else 1 for i in range(len(x.shape))]
    total = windows.window_reduce(
        c.b,
        functions.WINDOW_SUM,
        c.tensor(square),
        x.shape,
        window,
        windows.Sliding(strides=[1] * len(x.shape), padding=[(k - 1) // 2 for k in window]),
    )
    scale = c.elementwise([c.value(total), None], functions.POW, flops=12.0)
    return c.elementwise([x, scale], functions.DIV)


# Normalization. Running statistics are constants. If an op uses the statistics of the batch, they are sums over it.


@lowers("BatchNormalization")
def _batch_norm(c: OnnxCall) -> Sequence[Value | None]:
    x = c.x(0)
    rank = len(x.shape)
    training = bool(c.integer("training_mode")) or (c.version < 7 and c.integer("is_test", 1) == 0)
    if rank < 2:
        raise c.fail(f"its input {list(x.shape)} has no channels")
    for i in range(1, 5):
        if c.x(i).shape != (x.shape[1],):
            raise c.fail(
                f"input {i} has shape {list(c.x(i).shape)}, which does not fit {x.shape[1]} channels"
            )
    if training:
        out = c.value(
            composites.normalize(
                c.b, c.tensor(x), [i for i in range(rank) if i != 1], c.real("epsilon", 1e-5)
            ).value
        )
    else:
        mean, variance = (c.tensor(_channels(c, c.value(c.buffer(c.x(i))), rank)) for i in (3, 4))
        out = c.value(composites.rescale(c.b, c.tensor(x), mean, variance, c.real("epsilon", 1e-5)))
    out = c.elementwise([out, _channels(c, c.x(1), rank)], functions.MUL)
    out = c.elementwise([out, _channels(c, c.x(2), rank)], functions.ADD)
    stat = c.missing((x.shape[1],), x.dtype, "its statistics")
    return [out, stat, stat, stat, stat]


@lowers("InstanceNormalization", "GroupNormalization", "MeanVarianceNormalization")
def _moments(c: OnnxCall) -> Value:
    x = c.x(0)
    rank = len(x.shape)
    if c.op == "MeanVarianceNormalization":
        axes = c.axes(c.ints("axes") or ([0, 2, 3] if rank == 4 else [0]), rank)
        return c.value(composites.normalize(c.b, c.tensor(x), axes, None).value)
    if rank < 3:
        raise c.fail(f"its input {list(x.shape)} has no spatial dims")
    scale, shift, epsilon = c.x(1), c.x(2), c.real("epsilon", 1e-5)
    if c.op == "InstanceNormalization":
        y = c.value(composites.normalize(c.b, c.tensor(x), list(range(2, rank)), epsilon).value)
        return _affine(c, y, _channels(c, scale, rank), _channels(c, shift, rank))
    groups = c.integer("num_groups", 1)
    if groups < 1 or x.shape[1] % groups:
        raise c.fail(f"its {x.shape[1]} channels cannot be divided into {groups} groups")
    cut = c.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    y = c.value(composites.normalize(c.b, c.tensor(cut), list(range(2, rank + 1)), epsilon).value)
    if scale.shape == (groups,) != (x.shape[1],):  # before opset 21, there is one scale per group
        y = _affine(c, y, _channels(c, scale, rank + 1), _channels(c, shift, rank + 1))
        return c.reshape(y, x.shape)
    return _affine(c, c.reshape(y, x.shape), _channels(c, scale, rank), _channels(c, shift, rank))


def _affine(c: OnnxCall, x: Value, scale: Value | None, shift: Value | None) -> Value:
    if scale is not None:
        x = c.elementwise([x, scale], functions.MUL)
    return x if shift is None else c.elementwise([x, shift], functions.ADD)


@lowers(
    "LayerNormalization",
    "RMSNormalization",
    "com.microsoft:SimplifiedLayerNormalization",
    "SimplifiedLayerNormalization",
)
def _layer_norm(c: OnnxCall) -> Sequence[Value | None]:
    x = c.x(0)
    axis = c.axis(c.integer("axis", -1), len(x.shape))
    axes, epsilon = list(range(axis, len(x.shape))), c.real("epsilon", 1e-5)
    if c.op == "LayerNormalization":
        found = composites.normalize(c.b, c.tensor(x), axes, epsilon)
        return [
            _affine(c, c.value(found.value), c.x(1), c.opt(2)),
            c.value(found.mean),
            c.value(found.inverse),
        ]
    y, inverse = (c.value(t) for t in composites.rms_normalize(c.b, c.tensor(x), axes, epsilon))
    return [_affine(c, y, c.x(1), None), inverse]


@lowers("com.microsoft:SkipLayerNormalization", "com.microsoft:SkipSimplifiedLayerNormalization")
def _skip_norm(c: OnnxCall) -> Sequence[Value | None]:
    """A residual sum and its normalization. The sum is the fourth result."""
    simple = "Simplified" in c.op
    total = c.elementwise([c.x(0), c.x(1)], functions.ADD)
    if (bias := c.opt(3 if simple else 4)) is not None:
        total = c.elementwise([total, bias], functions.ADD)
    axes, epsilon = [len(total.shape) - 1], c.real("epsilon", 1e-12)
    if simple:
        y = c.value(composites.rms_normalize(c.b, c.tensor(total), axes, epsilon)[0])
    else:
        y = c.value(composites.normalize(c.b, c.tensor(total), axes, epsilon).value)
    stat = c.missing((*total.shape[:-1], 1), "float32", "its statistics")
    return [_affine(c, y, c.x(2), None if simple else c.opt(3)), stat, stat, total]


@lowers("LpNormalization")
def _lp_norm(c: OnnxCall) -> Value:
    x = c.x()
    axis = c.axis(c.integer("axis", -1), len(x.shape))
    square = c.elementwise([x], functions.SQUARE)
    (total,) = nests.reduce(c.b, functions.SUM, [c.tensor(square)], [axis], [x.dtype], keepdims=True)
    root = c.elementwise([c.value(total)], functions.SQRT)
    return c.elementwise([x, root, None], functions.DIV)  # p may be 1, and a norm may be zero


# Images and signals. A batch may be split; a single image or signal is not split.


def opaque_per_batch(
    c: OnnxCall,
    ins: Sequence[Value],
    outs: Sequence[tuple[Sequence[int], str]],
    rank: int,
    flops: float,
    *,
    whole: Sequence[Value] = (),
) -> list[Value]:
    """One op whose first ``rank`` dims may be split, if all operands and results have the same sizes there.

    flops: of the whole op. whole: further operands, which have none of these dims.
    """
    shapes = [c.shape(s) for s, _ in outs]
    reads = [c.tensor(v) for v in ins if v.elements and not v.literal]
    if any(math.prod(s) == 0 for s in shapes):
        return [nothing(s, d) for s, (_, d) in zip(shapes, outs, strict=True)]
    lead = shapes[0][:rank]
    if any(tuple(t.shape[:rank]) != lead for t in reads) or any(s[:rank] != lead for s in shapes):
        rank = 0
    made: Sequence[Tensor] = nests.batched(
        c.b,
        c.op.lower(),
        reads,
        [(s, d) for s, (_, d) in zip(shapes, outs, strict=True)],
        rank,
        flops=flops / math.prod(shapes[0][:rank]),
        whole=[c.tensor(v) for v in whole if not v.literal],
    )
    return [c.value(t) for t in made]


@lowers("GridSample", "AffineGrid", "RoiAlign", "MaxRoiPool", "MaxUnpool", "Col2Im", "DeformConv")
def _images(c: OnnxCall) -> list[Value]:
    x = c.x(0)
    values = [
        c.x(0),
        *(c.x(i) for i in range(1, len(c.ins)) if c.opt(i) is not None and c.op != "AffineGrid"),
    ]
    points = 8.0
    if c.op == "GridSample":
        shape: Sequence[int] = (*x.shape[:2], *c.x(1).shape[1:-1])
    elif c.op == "AffineGrid":
        size = c.ints_of(1, "size")
        shape = (size[0], *size[2:], len(size) - 2)
    elif c.op == "RoiAlign":
        shape = (c.x(1).shape[0], x.shape[1], c.integer("output_height", 1), c.integer("output_width", 1))
        points *= max(c.integer("sampling_ratio"), 1) ** 2
    elif c.op == "MaxRoiPool":
        shape = (c.x(1).shape[0], x.shape[1], *(c.ints("pooled_shape") or [1, 1]))
    elif c.op == "MaxUnpool":
        if c.opt(2) is not None:
            shape = c.ints_of(2, "output_shape")
            values = values[:2]
        else:
            n = len(x.shape) - 2
            k, s, p = _positive(c, "kernel_shape", n), _positive(c, "strides", n), _pads(c, n)
            spatial = [(x.shape[i + 2] - 1) * s[i] + k[i] - p[i] - p[i + n] for i in range(n)]
            shape = (*x.shape[:2], *spatial)
    elif c.op == "Col2Im":
        block = c.ints_of(2, "block_shape")
        if x.shape[1] % max(math.prod(block), 1):
            raise c.fail(f"its {x.shape[1]} columns do not match a block_shape of {block[:6]}")
        shape = (x.shape[0], x.shape[1] // math.prod(block), *c.ints_of(1, "image_shape"))
        values = values[:1]
    else:
        w = c.x(1)
        kernel = w.shape[2:]
        shape = (
            x.shape[0],
            w.shape[0],
            *_windows(c, x.shape[2:], kernel, _positive(c, "dilations", len(kernel)))[0],
        )
        points = 2.0 * math.prod(w.shape[1:]) + 8.0 * math.prod(kernel) * w.shape[1]
    return opaque_per_batch(c, values, [(shape, x.dtype)], 1, points * math.prod(c.shape(shape)))


@lowers("Det")
def _det(c: OnnxCall) -> list[Value]:
    x = c.x()
    n = x.shape[-1]
    return opaque_per_batch(c, [x], [(x.shape[:-2], x.dtype)], len(x.shape) - 2, 2 / 3 * n * x.elements)


@lowers("DFT", "STFT")
def _fourier(c: OnnxCall) -> list[Value]:
    """The dims before the transformed one (for STFT, the signals) may be split.

    5 log2(n) FLOPs per point (Cooley and Tukey's count).
    """
    x, lead, whole = c.x(), 1, []
    if c.op == "STFT":
        whole = [c.x(2)] if c.opt(2) is not None else []  # the window
        step = c.ints_of(1, "frame_step")[0]
        n = c.x(2).shape[0] if c.opt(2) is not None else c.ints_of(3, "frame_length")[0]
        frames = (x.shape[1] - n) // max(step, 1) + 1
        shape: list[int] = [x.shape[0], frames, n // 2 + 1 if c.integer("onesided", 1) else n, 2]
    else:
        axis = (
            c.integer("axis", 1)
            if c.version < 20
            else c.ints_of(2, "axis")[0]
            if c.opt(2) is not None
            else -2
        )
        axis = lead = c.axis(axis, len(x.shape))
        n = c.ints_of(1, "length")[0] if c.opt(1) is not None else x.shape[axis]
        back = bool(c.integer("onesided") and c.integer("inverse"))  # from a half spectrum to real numbers
        shape = [*x.shape[:-1], 1 if back else 2]
        shape[axis] = n // 2 + 1 if c.integer("onesided") and not back else n
        if back and c.opt(1) is None:
            shape[axis] = 2 * (x.shape[axis] - 1)
    work = 5.0 * math.log2(max(n, 2)) * math.prod(c.shape(shape))
    return opaque_per_batch(c, [x], [(shape, x.dtype)], lead, work, whole=whole)
