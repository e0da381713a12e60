"""Loop nests in which a window slides over dims: convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pase.errors import PaseError
from pase.ir import AccessMap, DimKind, Size, Tensor, Walk, Window
from pase.ir.functions import Function
from pase.ir.parameters import Windows
from pase.ir.sizes import is_one, quotient
from pase.ops.builder import Computes, Dims, GraphBuilder, Read, Write

__all__ = ["ConvDims", "Sliding", "conv", "window_reduce"]


@dataclass(frozen=True, kw_only=True)
class Sliding:
    """How a window slides over dims. padding: elements in front of each dim. No dilation means one everywhere."""

    strides: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int] = ()
    input_dilation: Sequence[int] = ()

    def window(self, k: int, extent: int) -> Window:
        """The window over the k-th of the dims, which takes ``extent`` elements."""
        reach = (extent - 1) * (self.dilation[k] if self.dilation else 1) + 1
        return Window(extent=reach, stride=self.strides[k], before=self.padding[k])


@dataclass(frozen=True, kw_only=True)
class ConvDims:
    """The dims of a convolution's tensors: x and out (batch, channel, spatial), w (out, in, spatial)."""

    x: tuple[int, int, Sequence[int]]
    w: tuple[int, int, Sequence[int]]
    out: tuple[int, int, Sequence[int]]


def _windowed(name: str, size_in: Size, size_out: Size, window: Window, dims: Dims, dilated: bool) -> Walk:
    """The walk of a spatial dim. The dim may be split only if blocks of the output align with blocks of the input."""
    if is_one(size_out) and is_one(size_in) and window == Window(extent=1):
        return Walk()
    aligned = not dilated and size_in == size_out * window.stride
    dims[name] = (size_out, "parallel" if aligned else "replicated")
    return Walk((name,), None if aligned and window == Window(extent=1) else window)


def conv(
    b: GraphBuilder,
    x: Tensor,
    w: Tensor,
    shape: Sequence[Size],
    dtype: str,
    at: ConvDims,
    slides: Sliding,
    *,
    groups: int = 1,
) -> Tensor:
    """A convolution. ``slides`` has an entry for each spatial dim."""
    xb, xc, xs = at.x
    wn, wc, ws = at.w
    ob, on, os = at.out
    dims: Dims = {}

    def dim(name: str, size: Size, kind: DimKind) -> tuple[str, ...]:
        if is_one(size):
            return ()
        dims[name] = (size, kind)
        return (name,)

    batch = dim("b", x.shape[xb], "parallel")
    g = dim("g", groups, "parallel") if groups > 1 else ()
    per_group = quotient(w.shape[wn], groups)
    if per_group is None:
        raise PaseError(
            f"{w.shape[wn]} output channels cannot be divided into {groups} groups",
            where=f"convolution at {b.source}",
        )
    c = dim("c", w.shape[wc], "reduction")
    n = dim("n", per_group, "parallel")
    there = (
        1.0  # the fraction of a window that covers elements of x; the rest are the zeros of input dilation
    )
    walks_x: list[Walk] = [Walk()] * len(x.shape)
    walks_w: list[Walk] = [Walk()] * len(w.shape)
    walks_o: list[Walk] = [Walk()] * len(shape)
    walks_x[xb] = walks_o[ob] = Walk(batch)
    walks_x[xc], walks_w[wc] = Walk(g + c), Walk(c)
    walks_w[wn], walks_o[on] = Walk(g + n), Walk(g + n)
    for k, (i, j, o) in enumerate(zip(xs, ws, os, strict=True)):
        extent = w.shape[j]
        if not isinstance(extent, int):
            raise PaseError(
                f"the extent of a filter must be a number, not {extent}", where=f"convolution at {b.source}"
            )
        up = bool(slides.input_dilation) and slides.input_dilation[k] != 1
        there /= slides.input_dilation[k] if up else 1
        window = slides.window(k, extent)
        walks_x[i] = _windowed(f"h{k}", x.shape[i], shape[o], window, dims, up)
        walks_o[o] = Walk((f"h{k}",)) if f"h{k}" in dims and not is_one(shape[o]) else Walk()
        if not is_one(extent):
            dims[f"r{k}"] = (extent, "window")
            walks_w[j] = Walk((f"r{k}",))
    reads = [Read(x, AccessMap(tuple(walks_x))), Read(w, AccessMap(tuple(walks_w)))]
    write = Write(tuple(shape), dtype, AccessMap(tuple(walks_o)))
    with b.undetermined(unless=there == 1.0):
        return b.nest("conv", "conv", reads, [write], dims, flops=2.0 * there)[0]


def window_reduce(
    b: GraphBuilder,
    function: Function,
    x: Tensor,
    shape: Sequence[Size],
    window: Sequence[int],
    slides: Sliding,
    *,
    name: str = "",
) -> Tensor:
    """Pooling over every dim whose window is larger than one. ``slides`` has an entry for each dim."""
    dims: Dims = {}
    walks: list[Walk] = []
    points = 1
    for i, (s_in, s_out) in enumerate(zip(x.shape, shape, strict=True)):
        reach = slides.window(i, window[i])
        if reach == Window(extent=1) and s_in == s_out:
            walks.append(Walk(() if is_one(s_in) else (f"d{i}",)))
            if not is_one(s_in):
                dims[f"d{i}"] = (s_in, "parallel")
        else:
            walks.append(_windowed(f"d{i}", s_in, s_out, reach, dims, False))
            points *= window[i]
    out = AccessMap.of(*[() if is_one(s) else (f"d{i}",) for i, s in enumerate(shape)])
    write = Write(tuple(shape), x.dtype, out)
    read = Read(x, AccessMap(tuple(walks)))
    return b.nest(
        name or function.name,
        "window",
        [read],
        [write],
        dims,
        Computes(
            function=function,
            parameters=Windows(dilation=tuple(slides.dilation))
            if any(d != 1 for d in slides.dilation)
            else None,
        ),
        flops=float(points),
    )[0]
