"""Hypothesis strategies for meshes and for layouts of small tensors."""

from __future__ import annotations

from math import prod
from random import Random

from hypothesis import strategies as st

from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout, AxisState, Digit

SIZES = st.lists(st.sampled_from([2, 2, 2, 3, 4]), min_size=1, max_size=4).filter(lambda s: prod(s) <= 48)


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 4) -> Mesh:
    sizes = tuple(draw(SIZES))[:max_axes]
    return Mesh(names=tuple("abcd"[: len(sizes)]), sizes=sizes)


@st.composite
def layouts(
    draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], partial: bool, contiguous: bool = False
) -> AxisLayout:
    """A layout of the shape: axes in any order on any dim, in strides that divide the dim.

    Major digits are sometimes left out, as in a dim merged from several of which only a minor one is split. With
    ``contiguous`` they never are.
    """
    out: list[AxisState] = [None] * len(mesh.sizes)
    left = list(shape)
    for a in draw(st.permutations(range(len(mesh.sizes)))):
        if partial and draw(st.integers(0, 4)) == 0:
            out[a] = "partial"
            continue
        fits = [t for t in range(len(shape)) if left[t] % mesh.sizes[a] == 0]
        t = draw(st.sampled_from([*fits, -1]))
        if t < 0:
            continue
        skips = [k for k in (1, 2, 3) if left[t] % (mesh.sizes[a] * k) == 0]
        left[t] //= mesh.sizes[a] * (1 if contiguous else draw(st.sampled_from([1, *skips])))
        out[a] = Digit(t, shape[t] // left[t])
    return AxisLayout(out)


def random_layout(rng: Random, sizes: tuple[int, ...], dims: int, partial: float) -> AxisLayout:
    """A contiguous layout of a tensor whose dims divide evenly. partial: the probability that an axis is partial."""
    out: list[AxisState] = [None] * len(sizes)
    blocks = [1] * dims
    for a in rng.sample(range(len(sizes)), len(sizes)):
        t = rng.randrange(-1, dims)
        if rng.random() < partial:
            out[a] = "partial"
        elif t >= 0:
            blocks[t] *= sizes[a]
            out[a] = Digit(t, blocks[t])
    return AxisLayout(out)


def nested(mesh: Mesh, *rows: AxisLayout) -> bool:
    """Whether the digits of all these layouts belong to one mixed radix."""
    spans = [(d.dim, d.blocks // mesh.sizes[axis], d.blocks) for r in rows for axis, d in r.digits]
    bounds = [(t, edge) for t, low, high in spans for edge in (low, high)]
    return all(t != u or x % y == 0 or y % x == 0 for t, x in bounds for u, y in bounds)


SHAPES = st.sampled_from([(8,), (24, 4), (8, 8), (12, 12), (4, 4, 4), (16, 6)])
Rows = list[AxisLayout]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mesh, Rows, Rows]:
    mesh, shape = draw(meshes()), draw(SHAPES)
    src, dst = (draw(st.lists(layouts(mesh, shape, True), min_size=1, max_size=6)) for _ in range(2))
    return mesh, src, dst
