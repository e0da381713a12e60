"""Rules for TensorFlow's convolutions, pools, norms, softmax, losses, images and linear algebra.

An op that becomes several loop nests (softmax, batch norm, cross entropy) is written out in the same ops as in JAX, so
that strategies and costs are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from pase.frontends.common.values import Value
from pase.frontends.tf.rules import lowers, opaque
from pase.frontends.tf.rules_products import matmul
from pase.frontends.tf.values import Absent, TfCall, TfResult, elements
from pase.ir import Tensor, functions
from pase.ops import composites, nests, windows
from pase.ops.activations import ACTIVATIONS

__all__: list[str] = []


def _layout(c: TfCall, rank: int, default: str = "NHWC") -> tuple[int, int, list[int]]:
    """(batch dim, channel dim, spatial dims) of a tensor, according to the attribute data_format."""
    form = c.text("data_format", default)
    if len(form) != rank or form[0] != "N" or "C" not in form:
        raise c.fail(f"data_format '{form[:20]}' is not supported for a tensor of {rank} dims")
    return 0, form.index("C"), [i for i, letter in enumerate(form) if letter not in "NC"]


def _per_dim(c: TfCall, key: str, rank: int) -> list[int]:
    out = c.wholes(key) or [1] * rank
    if len(out) != rank or any(n < 1 for n in out):
        raise c.fail(f"its {key} {out} do not fit a tensor of {rank} dims")
    return out


def _extent(c: TfCall, i: int, size: int, reach: int, stride: int) -> tuple[int, int]:
    """(output size, padding in front) of a spatial dim. reach: the size of the dilated window."""
    padding, before = c.text("padding"), 0
    if padding == "SAME":
        out = -(-size // stride)
        return out, max((out - 1) * stride + reach - size, 0) // 2
    if padding == "EXPLICIT":
        pads = c.wholes("explicit_paddings")
        if len(pads) < 2 * i + 2:
            raise c.fail(f"its explicit_paddings {pads} do not cover dim {i}")
        before = pads[2 * i]
        size += before + pads[2 * i + 1]
    elif padding != "VALID":
        raise c.fail(f"its padding '{padding[:20]}' is not SAME, VALID or EXPLICIT")
    if size < reach:
        raise c.fail(f"a window of {reach} elements does not fit a dim of {size}")
    return (size - reach) // stride + 1, before


@lowers("Conv2D", "Conv3D", "DepthwiseConv2dNative", "_FusedConv2D")
def _conv(c: TfCall) -> Sequence[TfResult]:
    """A convolution with filters [window…, input channels of a group, output channels].

    Filters of a depthwise convolution are [window…, channels, multiplier].
    """
    x, w = c.x(0), c.x(1)
    rank = 5 if c.node.op == "Conv3D" else 4
    shape, filters = c.rank(0, rank), c.rank(1, rank)
    form = "NDHWC" if rank == 5 else "NHWC"
    batch, channel, spatial = _layout(c, rank, form)
    if c.node.op == "DepthwiseConv2dNative":
        if filters[2] != shape[channel]:
            raise c.fail(f"its filters of shape {filters} do not fit {shape[channel]} channels")
        filters = (*filters[:2], 1, filters[2] * filters[3])
        w = nests.reshape(c.b, w, filters)
    inner, outer = filters[-2:]
    if shape[channel] % inner:
        raise c.fail(f"its filters of shape {filters} do not fit {shape[channel]} channels")
    strides, dilations = _per_dim(c, "strides", rank), _per_dim(c, "dilations", rank)
    out, padding = [0] * rank, [0] * len(spatial)
    out[batch], out[channel] = shape[batch], outer
    for k, i in enumerate(spatial):
        reach = (filters[k] - 1) * dilations[i] + 1
        out[i], padding[k] = _extent(c, i, shape[i], reach, strides[i])
    made = windows.conv(
        c.b,
        x,
        w,
        c.shape(out),
        c.type("T"),
        windows.ConvDims(
            x=(batch, channel, spatial),
            w=(rank - 1, rank - 2, range(rank - 2)),
            out=(batch, channel, spatial),
        ),
        windows.Sliding(
            strides=[strides[i] for i in spatial], dilation=[dilations[i] for i in spatial], padding=padding
        ),
        groups=shape[channel] // inner,
    )
    return [_fused(c, made, channel) if c.node.op == "_FusedConv2D" else made]


_FUSED = {
    "Relu": "relu",
    "Relu6": "relu6",
    "Elu": "elu",
    "LeakyRelu": "leaky_relu",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "GeluExact": "gelu",
    "GeluApproximate": "gelu_tanh",
}


def _fused(c: TfCall, x: Tensor, channel: int) -> Tensor:
    """Applies the ops that the graph optimizer fused after a product: a bias, an activation."""
    for op in [s.decode("ascii", "replace") for s in c.node.attr["fused_ops"].list.s]:
        if op == "BiasAdd":
            bias = c.x(2)
            if channel != len(x.shape) - 1:
                bias = nests.reshape(c.b, bias, (*bias.shape, *[1] * (len(x.shape) - 1 - channel)))
            (x,) = nests.elementwise(c.b, functions.ADD, [x, bias], [x.dtype], name=op, shape=x.shape)
        elif op in _FUSED:
            numbers = [c.real("leakyrelu_alpha", 0.2)] if op == "LeakyRelu" else []
            x = ACTIVATIONS[_FUSED[op]](c.b, x, *numbers)
        else:
            raise c.fail(
                f"pase does not support the fused op '{op[:40]}'", fix="freeze the graph before optimizing it"
            )
    return x


@lowers("_FusedMatMul")
def _fused_matmul(c: TfCall) -> Sequence[TfResult]:

    c.rank(0, 2), c.rank(1, 2)
    made = matmul(c, c.flag("transpose_a"), c.flag("transpose_b"), c.type("T"))
    return [_fused(c, c.tensor(made), 1)]


@lowers("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput")
def _transposed(c: TfCall) -> Sequence[TfResult]:
    """A transposed convolution. The operands are the shape of the result, the filters, and the input."""
    out = c.shape(c.numbers(0, "sizes"))
    rank = len(out)
    shape, filters = c.rank(2, rank), c.rank(1, rank)
    if rank not in (4, 5) or "Depthwise" in c.node.op:
        return opaque(c, [(out, c.type("T"))], flops=2.0 * elements(shape) * elements(filters[:2]))
    form = "NDHWC" if rank == 5 else "NHWC"
    batch, channel, spatial = _layout(c, rank, form)
    strides, dilations = _per_dim(c, "strides", rank), _per_dim(c, "dilations", rank)
    if filters[-1] != shape[channel] or out[batch] != shape[batch] or out[channel] != filters[-2]:
        raise c.fail(f"its filters of shape {filters} do not fit an input {shape} and a result {out}")
    overlap = [(filters[k] - 1) * dilations[i] for k, i in enumerate(spatial)]
    pads = [n - _extent(c, i, out[i], n + 1, strides[i])[1] for i, n in zip(spatial, overlap, strict=True)]
    with c.b.undetermined():  # the filters are flipped
        made = windows.conv(
            c.b,
            c.x(2),
            c.x(1),
            out,
            c.type("T"),
            windows.ConvDims(
                x=(batch, channel, spatial),
                w=(rank - 2, rank - 1, range(rank - 2)),
                out=(batch, channel, spatial),
            ),
            windows.Sliding(
                strides=[1] * len(spatial),
                dilation=[dilations[i] for i in spatial],
                padding=pads,
                input_dilation=[strides[i] for i in spatial],
            ),
        )
    return [made]


@lowers("MaxPool", "AvgPool", "MaxPoolV2", "MaxPool3D", "AvgPool3D", "MaxPoolWithArgmax")
def _pool(c: TfCall) -> Sequence[TfResult]:
    x = c.x()
    rank = len(x.shape)
    shape = c.rank(0, 5 if c.node.op.endswith("3D") else 4)
    if c.node.op == "MaxPoolV2":
        window, strides = c.numbers(1, "window"), c.numbers(2, "strides")
    else:
        window, strides = _per_dim(c, "ksize", rank), _per_dim(c, "strides", rank)
    if len(window) != rank or len(strides) != rank or min(window + strides) < 1:
        raise c.fail(f"its window {window} with strides {strides} does not fit a tensor of {rank} dims")
    out, padding = zip(*(_extent(c, i, s, window[i], strides[i]) for i, s in enumerate(shape)), strict=True)
    function = functions.WINDOW_SUM if c.node.op.startswith("Avg") else functions.WINDOW_MAX

    def inside() -> Tensor:
        """How many elements of the operand each window takes."""
        rows = []
        for size, n, stride, before, many in zip(shape, window, strides, padding, out, strict=True):
            first = np.arange(many) * stride - before
            rows.append(np.minimum(first + n, size) - np.maximum(first, 0))
        wide = [m if n > 1 else 1 for m, n in zip(out, window, strict=True)]
        counts = functools.reduce(np.multiply.outer, [r[:m] for r, m in zip(rows, wide, strict=True)])
        return c.b.constant(wide, x.dtype, contents=counts.astype(np.float32))

    made = windows.window_reduce(
        c.b,
        function,
        x,
        c.shape(out),
        window,
        windows.Sliding(strides=strides, padding=padding),
        name=c.node.op,
    )
    if function is functions.WINDOW_SUM:
        plain = not any(padding) and c.text("padding") == "VALID"
        made = composites.apply(c.b, functions.DIV, made, elements(window) if plain else inside())
    return (
        [made, c.b.constant(c.shape(out), c.type("Targmax"))] if c.node.op == "MaxPoolWithArgmax" else [made]
    )


def _cast(c: TfCall, x: Tensor, dtype: str) -> Tensor:
    return nests.elementwise(c.b, functions.CAST, [x], [dtype])[0]


@lowers("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "_FusedBatchNormEx")
def _batch_norm(c: TfCall) -> Sequence[TfResult]:
    """Batch norm over the global batch: if the batch is split, its statistics are summed across devices."""
    x, dtype = c.x(0), c.dtype(0)
    rank = len(c.rank(0, 4, 5))
    _, channel, _ = _layout(c, rank, "NHWC" if rank == 4 else "NDHWC")
    around = [i for i in range(rank) if i != channel]
    wide = (x.shape[channel], *[1] * (rank - 1 - channel))

    def spread(t: Tensor) -> Tensor:
        return t if len(wide) == 1 else nests.reshape(c.b, t, wide)

    for i in range(1, 5):
        used = i < 3 or not c.flag("is_training", True)
        if used and c.shape_of(i) != (x.shape[channel],):
            raise c.fail(
                f"operand {i} has shape {c.shape_of(i)}, which does not fit {x.shape[channel]} channels"
            )
    y = x if dtype == "float32" else _cast(c, x, "float32")
    if c.flag("is_training", True):
        found = composites.normalize(c.b, y, around, c.real("epsilon", 1e-4))
        out = found.value
        mean, variance = (nests.reshape(c.b, t, (x.shape[channel],)) for t in (found.mean, found.variance))
    else:
        mean, variance = c.x(3), c.x(4)
        out = composites.rescale(c.b, y, spread(mean), spread(variance), c.real("epsilon", 1e-4))
    out = composites.scale_and_shift(c.b, out, spread(c.x(1)), spread(c.x(2)))
    if dtype != "float32":
        out = _cast(c, out, dtype)
    if c.node.op == "_FusedBatchNormEx":
        if c.text("activation_mode", "Identity") == "Relu":
            out = ACTIVATIONS["relu"](c.b, out)
        elif c.text("activation_mode", "Identity") != "Identity":
            raise c.fail(f"pase does not support the activation '{c.text('activation_mode')[:40]}'")
    reserved = Absent("a residual for batch norm's own gradient")
    return [out, mean, variance, reserved, reserved, reserved]


@lowers("Softmax", "LogSoftmax")
def _softmax(c: TfCall) -> Sequence[TfResult]:
    x = c.x()
    if not x.shape:
        raise c.fail("its operand is a scalar, which has no classes")
    make = composites.softmax if c.node.op == "Softmax" else composites.log_softmax
    return [make(c.b, x, [len(x.shape) - 1])]


@lowers("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
def _cross_entropy(c: TfCall) -> Sequence[TfResult]:
    """The loss per row. The second result is a gradient, which pase does not need."""
    (rows, classes) = c.rank(0, 2)
    sparse = c.node.op.startswith("Sparse")
    if sparse and c.shape_of(1) != (rows,):
        raise c.fail(f"its labels of shape {c.shape_of(1)} do not fit logits of shape {c.shape_of(0)}")
    if not sparse and c.shape_of(1) not in ((rows, classes), (1, classes), (rows, 1), (1, 1)):
        raise c.fail(f"its labels of shape {c.shape_of(1)} do not fit logits of shape {c.shape_of(0)}")
    x, labels = _rows_apart(c, sparse)
    n = len(x.shape) - 1
    if sparse:
        loss = composites.cross_entropy_of_logits(c.b, x, labels)
    else:
        weighted = composites.apply(c.b, functions.MUL, composites.log_softmax(c.b, x, [n]), labels)
        (total,) = nests.reduce(c.b, functions.SUM, [weighted], [n], [x.dtype])
        loss = composites.apply(c.b, functions.NEG, total)
    return [c.reshape(c.value(loss), (rows,)), Absent("a gradient, which pase does not compute")]


def _rows_apart(c: TfCall, sparse: bool) -> tuple[Tensor, Tensor]:
    """Logits and labels before the reshapes that merged their rows, if both were merged in the same way."""
    v, labels = c.v(0), c.v(1)
    if v.note[:1] == labels.note[:1] == ("view",) and v.note[1].shape[-1] == v.shape[-1]:
        apart: Value = v.note[1]
        if labels.note[1].shape == (apart.shape[:-1] if sparse else apart.shape):
            return c.tensor(apart), c.tensor(labels.note[1])
    return c.x(0), c.x(1)


@lowers("LRN")
def _lrn(c: TfCall) -> Sequence[TfResult]:
    """Local response normalization over channels, which are not split: a window sum, a power, a division."""
    x = c.x()
    radius = c.whole("depth_radius", 5)
    outs = [(c.rank(0, 4), x.dtype)]
    return nests.sequential(
        c.b, functions.OPAQUE, [x], 3, outs, name="LRN", flops=2.0 * (2 * radius + 1) + 14.0
    )


@lowers("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea", "ScaleAndTranslate")
def _resize(c: TfCall) -> Sequence[TfResult]:
    """Resizes images. Rows and columns are not split; images and channels may be."""
    x = c.x()
    batch, _, _, channels = c.rank(0, 4)
    size = c.numbers(1, "size")
    if len(size) != 2:
        raise c.fail(f"its size {size} must have two elements: rows and columns")
    dtype = x.dtype if c.node.op == "ResizeNearestNeighbor" else "float32"
    flops = {"ResizeNearestNeighbor": 1.0, "ResizeBilinear": 8.0}.get(c.node.op, 32.0)
    made = nests.restrict(c.b, c.node.op, [x], c.shape([batch, *size, channels]), [True, False, False, True])
    if flops == 1.0 and dtype == x.dtype:
        return [made]
    return nests.elementwise(c.b, functions.CAST, [made, None], [dtype], name=c.node.op, flops=flops - 1.0)


@lowers("CropAndResize")
def _crop(c: TfCall) -> Sequence[TfResult]:
    x, boxes = c.rank(0, 4), c.rank(1, 2)
    size = c.numbers(3, "crop size")
    out = c.shape([boxes[0], *size, x[3]])
    return opaque(c, [(out, "float32")], flops=8.0 * elements(out))


# FLOPs for an n by n matrix, as multiples of n**3 (Golub and Van Loan, Matrix Computations).
_MATRIX = {
    "Cholesky": 1 / 3,
    "Qr": 4 / 3,
    "SelfAdjointEigV2": 9.0,
    "Svd": 21.0,
    "MatrixInverse": 2.0,
    "MatrixDeterminant": 2 / 3,
    "LogMatrixDeterminant": 2 / 3,
    "MatrixSolve": 8 / 3,
    "MatrixTriangularSolve": 1.0,
    "Lu": 2 / 3,
}


@lowers(*_MATRIX)
def _matrix(c: TfCall) -> Sequence[TfResult]:
    """A factorization or solve. A batch of matrices may be split; a matrix is not split."""
    xs = [c.x(i) for i in range(len(c.ins)) if c.known(i) is None]
    shape: tuple[int, ...] = c.x(0).shape  # type: ignore[assignment]
    if len(shape) < 2:
        raise c.fail(f"its operand must be a matrix or a batch of matrices, but has shape {shape}")
    lead, rows, columns = shape[:-2], shape[-2], shape[-1]
    small = min(rows, columns)
    full = c.flag("full_matrices")
    outs: dict[str, list[tuple[int, ...]]] = {
        "Qr": [(rows, rows if full else small), (rows if full else small, columns)],
        "SelfAdjointEigV2": [(rows,), (rows, columns)],
        "Svd": [(small,), (rows, rows if full else small), (columns, columns if full else small)],
        "MatrixDeterminant": [()],
        "LogMatrixDeterminant": [(), ()],
        "Lu": [(rows, columns), (rows,)],
    }
    if c.node.op.endswith("Solve"):
        outs[c.node.op] = [c.shape_of(1)[-2:]]
    made = [((*lead, *tail), c.dtype(0)) for tail in outs.get(c.node.op, [(rows, columns)])]
    rank = len(lead) if all(t.shape[: len(lead)] == lead for t in xs) else 0
    return nests.batched(c.b, c.node.op, xs, made, rank, flops=_MATRIX[c.node.op] * max(rows, columns) ** 3)


@lowers("FFT", "FFT2D", "FFT3D", "IFFT", "IFFT2D", "IFFT3D", "RFFT", "IRFFT", "RFFT2D", "IRFFT2D")
def _fft(c: TfCall) -> Sequence[TfResult]:
    """The transformed dims are not split; 5 log2(n) FLOPs per point (Cooley and Tukey's count)."""
    import math

    x, op = c.x(), c.node.op
    rank = 2 if "2D" in op else 3 if "3D" in op else 1
    if len(x.shape) < rank:
        raise c.fail(f"its operand of shape {c.shape_of(0)} has fewer than {rank} dims")
    lead, tail = c.shape_of(0)[:-rank], list(c.shape_of(0)[-rank:])
    if "RFFT" in op:
        tail = c.numbers(1, "length")
        if op.startswith("RFFT"):
            tail[-1] = tail[-1] // 2 + 1
    points = elements(tail)
    dtype = c.type("Treal") if op.startswith("IRFFT") else c.type("Tcomplex")
    flops = 5.0 * math.log2(max(points, 2)) * points
    made = [(c.shape([*lead, *tail]), dtype)]
    return nests.batched(c.b, op, [x], made, len(lead), flops=flops, function=functions.FFT)


@lowers("InTopKV2", "InTopK")
def _in_top(c: TfCall) -> Sequence[TfResult]:
    (rows, _) = c.rank(0, 2)
    return opaque(c, [((rows,), "bool")], flops=float(elements(c.shape_of(0))), differentiable=False)
