"""Functions that generated Mesh-TensorFlow programs call if Mesh-TF does not have an op, or only a limited one.

They are built from Mesh-TF's own ops and ``mtf.slicewise``, which runs a TensorFlow function on each device's slice.
Gradients of slicewise functions are defined here, because Mesh-TF's generic gradient cannot take an incoming gradient
that is a partial sum. Tensors are ``mtf.Tensor``. The dims that a function works on are given as lists of
``mtf.Dimension``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pase.backends.mesh_tf.shim import mesh_tensorflow

if TYPE_CHECKING:
    from mesh_tensorflow import Dimension, Lowering, Mesh, Operation, Shape, Tensor
    from tensorflow import DType
    from tensorflow import Tensor as Slice

__all__ = [
    "conv2d",
    "cwise",
    "descend",
    "halo",
    "local",
    "lookup",
    "one_hot",
    "pool2d",
    "summed",
    "variable",
    "where",
]


def variable(
    mesh: Mesh,
    name: str,
    dims: Sequence[Dimension],
    dtype: str,
    values: Mapping[str, np.ndarray] | None,
) -> Tensor:
    """A parameter. values: name -> array in the source's shape. A missing name gets a random initial value."""
    mtf, tf = mesh_tensorflow()
    shape = [d.size for d in dims]
    initial: Callable[..., Slice] = tf.truncated_normal_initializer(stddev=0.02)
    if values is not None and name in values:
        array = np.asarray(values[name]).reshape(shape)

        def initial(*_: object, **__: object) -> Slice:
            return tf.constant(array, dtype)

    scope = re.sub(r"[^A-Za-z0-9_./]", "_", name).lstrip("_/")
    return mtf.get_variable(
        mesh,
        scope or "v",
        mtf.Shape(list(dims)),
        dtype=getattr(tf, dtype),
        initializer=initial,
    )


def descend(
    loss: Tensor, parameters: Mapping[str, Tensor], learning_rate: float
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(loss, gradients, assignments) of a step of gradient descent.

    All gradients are computed before the first assignment. Otherwise some would read slices that are already updated.
    """
    mtf, _ = mesh_tensorflow()
    made = mtf.gradients([loss], list(parameters.values()))
    lost = [name for name, g in zip(parameters, made, strict=True) if g is None]
    if lost:
        raise ValueError(f"the loss does not depend on {', '.join(lost)}")
    whole = [mtf.identity(loss), *(mtf.identity(g) for g in made)]  # reduces partial sums
    updates = []
    for p, g in zip(parameters.values(), whole[1:], strict=True):
        updates.append(mtf.assign(p, mtf.depend(p - learning_rate * g, whole)))
    return whole[0], whole[1:], updates


def cwise(fn: Callable[..., Slice], *xs: Tensor, dtype: DType | None = None) -> Tensor:
    """Apply an elementwise TensorFlow function. Operands broadcast by the names of their dims."""
    mtf, _ = mesh_tensorflow()
    dims: list[Dimension] = []
    for x in sorted(xs, key=lambda x: -len(x.shape.dims)):
        dims += [d for d in x.shape.dims if d not in dims]
    shape = mtf.Shape(dims)
    return local(fn, *(mtf.broadcast(x, shape) for x in xs), splittable=dims, dtype=dtype)


def slopes(fn: Callable[..., Slice], args: Sequence[Slice], wanted: Sequence[int], dy: Slice) -> list[Slice]:
    """The gradients of fn(*args) with respect to some arguments. The arguments are detached: one may be computed from
    another (such as its mean), and gradients must not pass along that path here."""
    _, tf = mesh_tensorflow()
    cut = [tf.stop_gradient(a) for a in args]
    made: list[Slice] = tf.gradients(
        fn(*cut), [cut[i] for i in wanted], dy, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    return made


def local(
    fn: Callable[..., Slice],
    *xs: Tensor,
    splittable: Sequence[Dimension],
    shape: Shape | None = None,
    dtype: DType | None = None,
) -> Tensor:
    """Apply a TensorFlow function to slices. This is correct only if every operand has all dims that are split."""
    mtf, _ = mesh_tensorflow()

    def gradient(op: Operation, dy: Tensor) -> list[Tensor]:
        wanted = [i for i, x in enumerate(xs) if x.dtype.is_floating]

        def back(*slices: Slice) -> Slice:
            made = slopes(fn, slices[:-1], wanted, slices[-1])
            return tuple(made) if len(made) > 1 else made[0]

        made = mtf.slicewise(
            back,
            [*xs, dy],
            output_shape=[xs[i].shape for i in wanted],
            output_dtype=[xs[i].dtype for i in wanted],
            splittable_dims=splittable,
            grad_function=0,
        )
        out: list[Tensor] = [None] * len(xs)
        for i, g in zip(wanted, made, strict=True):
            out[i] = g
        return out

    return mtf.slicewise(
        fn,
        list(xs),
        output_shape=shape,
        output_dtype=dtype,
        splittable_dims=splittable,
        grad_function=gradient,
    )


def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a if the condition holds, else b. Elements that are not selected may be infinite."""
    _, tf = mesh_tensorflow()
    return cwise(tf.where, condition, a, b, dtype=a.dtype)


def one_hot(ids: Tensor, dims: Sequence[Dimension], dtype: DType) -> list[Tensor]:
    """Factors whose product is 1 where the index in ``dims``, major to minor, equals ``ids``, and 0 elsewhere."""
    mtf, tf = mesh_tensorflow()
    left = mtf.cast(ids, tf.int32)
    out = []
    for d in reversed(dims):
        out.append(mtf.one_hot(mtf.mod(left, d.size) if len(dims) > 1 else left, d, dtype=dtype))
        left = mtf.floordiv(left, d.size) if len(dims) > 1 else left
    return out


def lookup(table: Tensor, ids: Tensor, over: Sequence[Dimension], shape: Sequence[Dimension]) -> Tensor:
    """Rows of the table by index, as a product with one-hot vectors like Mesh-TF's own gather. ``over`` may be
    split."""
    mtf, _ = mesh_tensorflow()
    return mtf.einsum([*one_hot(ids, over, table.dtype), table], output_shape=mtf.Shape(list(shape)))


def summed(
    fn: Callable[..., Slice],
    *xs: Tensor,
    shape: Shape,
    over: Sequence[Dimension],
    gradient: Callable[[Tensor], list[Tensor]] | None = None,
    name: str = "summed",
) -> Tensor:
    """Apply a TensorFlow function to slices, and sum its results over the devices that split ``over``.

    gradient: maps the result's gradient to the operands' gradients.
    """
    mtf, _ = mesh_tensorflow()

    class Summed(mtf.Operation):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(list(xs), name=name)
            self._outputs = [mtf.Tensor(self, shape, xs[0].dtype)]
            self._splittable_dims, self._unsplittable_dims = self._initialize_all_dimensions_as_splittable()

        def gradient(self, grad_ys: list[Tensor]) -> list[Tensor]:
            if gradient is None:
                raise NotImplementedError(f"{name} is a gradient, and has no gradient itself")
            return gradient(grad_ys[0])

        def lower(self, lowering: Lowering) -> None:
            impl = lowering.mesh_impl(self)
            y = impl.slicewise(fn, *[lowering.tensors[x] for x in self.inputs])
            axes = sorted({impl.tensor_dimension_to_mesh_axis(d) for d in over} - {None})
            if axes:
                size = impl.laid_out_size(shape)
                y = mtf.LazyAllreduceSum(
                    impl, y, axes, lambda: lowering.add_counter(f"allreduce/{axes}/{name}", size)
                )
            lowering.set_tensor_lowering(self.outputs[0], y)

    return Summed().outputs[0]


def halo(x: Tensor, blocks: Dimension, rows: Dimension, low: int, high: int) -> Tensor:
    """Extend each block of rows by the last ``low`` rows of the previous block and the first ``high`` rows of the next
    one, or by zeros at the ends. (Like ``mtf.halo_exchange``, but the two sides may differ.)"""
    mtf, _ = mesh_tensorflow()
    parts = [x]
    if low:
        parts.insert(0, mtf.shift(mtf.slice(x, rows.size - low, low, rows.name), 1, blocks, wrap=False))
    if high:
        parts.append(mtf.shift(mtf.slice(x, 0, high, rows.name), -1, blocks, wrap=False))
    return mtf.concat(parts, rows.name) if len(parts) > 1 else x


def conv2d(
    x: Tensor,
    w: Tensor,
    *,
    over: Sequence[Dimension],
    strides: tuple[int, int],
    padding: Sequence[tuple[int, int]],
) -> Tensor:
    """x: [batch dims, rows, columns, channels], w: [rows, columns, channels, out channels]. over: the channels.

    Mesh-TF's own convolution computes a wrong extent for some strides ((in - k + 1) // stride, rounded down), and pads
    like TensorFlow only for stride 1. Therefore the input is padded here, to an extent for which it is right.
    """
    mtf, _ = mesh_tensorflow()
    n = len(over)
    for k in (0, 1):
        rows, extent, (low, high) = x.shape.dims[-2 - n + k], w.shape.dims[k].size, padding[k]
        out = (rows.size + low + high - extent) // strides[k] + 1
        needed = out * strides[k] + extent - 1 - rows.size - low
        if needed < 0:
            raise ValueError(
                f"conv2d: {rows.size} rows, padded by {low} and {high}, under a window of {extent}"
            )
        if low or needed:
            x = mtf.pad(x, [low, needed], rows.name)
    if n == 1 and len(w.shape.dims) == 4:
        return mtf.Conv2dOperation(x, w, [1, *strides, 1], "VALID").outputs[0]
    return _conv2d_of_parts(x, w, list(over), strides)


def _conv2d_of_parts(x: Tensor, w: Tensor, over: list[Dimension], strides: tuple[int, int]) -> Tensor:
    """An unpadded convolution with channels in several dims. Mesh-TF's own has one dim each for input and output."""
    mtf, tf = mesh_tensorflow()
    n = len(over)
    batch, made = x.shape.dims[: -2 - n], w.shape.dims[2 + n :]
    rows = [
        mtf.Dimension(d.name, (d.size - f.size) // s + 1)
        for d, f, s in zip(x.shape.dims[-2 - n : -n], w.shape.dims[:2], strides, strict=True)
    ]

    def conv(a: Slice, b: Slice) -> Slice:
        of_a, of_b = a.shape.as_list(), b.shape.as_list()
        channels = int(np.prod(of_b[2 : 2 + n]))
        y = tf.nn.conv2d(
            tf.reshape(a, [-1, *of_a[len(batch) : len(batch) + 2], channels]),
            tf.reshape(b, [*of_b[:2], channels, -1]),
            [1, *strides, 1],
            "VALID",
        )
        return tf.reshape(y, [*of_a[: len(batch)], *y.shape.as_list()[1:3], *of_b[2 + n :]])

    def gradient(dy: Tensor) -> list[Tensor]:
        dx = summed(
            lambda a, b, d: slopes(conv, (a, b), [0], d)[0],
            x,
            w,
            dy,
            shape=x.shape,
            over=made,
            name="conv2d_backprop_input",
        )
        dw = summed(
            lambda b, a, d: slopes(conv, (a, b), [1], d)[0],
            w,
            x,
            dy,
            shape=w.shape,
            over=batch,
            name="conv2d_backprop_filter",
        )
        return [dx, dw]

    shape = mtf.Shape([*batch, *rows, *made])
    return summed(conv, x, w, shape=shape, over=over, gradient=gradient, name="conv2d_op")


def pool2d(
    x: Tensor,
    kind: str,
    over: Sequence[Dimension],
    *,
    window: tuple[int, int],
    strides: tuple[int, int],
    padding: Sequence[tuple[int, int]],
) -> Tensor:
    """Pool over rows and columns. (Mesh-TF's own op accepts only windows that do not overlap.)

    x: [batch dims, rows, columns, channel dims].
    kind: "MAX" or "SUM".
    over: rows and columns.
    padding: elements before and after them that are in no window's result.
    """
    mtf, tf = mesh_tensorflow()
    dims = x.shape.dims
    first = dims.index(over[0])

    def pooled(s: Slice) -> Slice:
        sizes = s.shape.as_list()
        flat = tf.reshape(s, [-1, *sizes[first : first + 2], int(np.prod(sizes[first + 2 :]))])
        if any(map(any, padding)):
            nothing = s.dtype.min if kind == "MAX" else 0
            flat = tf.pad(flat, [(0, 0), *padding, (0, 0)], constant_values=nothing)
        made = tf.nn.pool(flat, window, "MAX" if kind == "MAX" else "AVG", strides=strides, padding="VALID")
        made = made if kind == "MAX" else made * float(window[0] * window[1])
        return tf.reshape(made, [*sizes[:first], *made.shape.as_list()[1:3], *sizes[first + 2 :]])

    out = [
        mtf.Dimension(d.name, (d.size + sum(pads) - n) // s + 1)
        for d, n, s, pads in zip(over, window, strides, padding, strict=True)
    ]
    free = [d for d in dims if d not in over]
    return local(pooled, x, splittable=free, shape=mtf.Shape([*dims[:first], *out, *dims[first + 2 :]]))
