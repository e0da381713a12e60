"""One op of a local program as a loop nest in numpy, on one device: its result, and its derivative in reverse mode.

Operands are broadcast over the op's iteration dims, the op's function is applied pointwise, and dims that the result
does not walk are summed (or reduced by a maximum or minimum). An op with a sliding window has the window's elements as
extra dims. A lookup is a product with a one-hot row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pase.errors import PaseError
from pase.ir import Access, Node, Op, Window
from pase.ir.literals import Number
from pase.ir.parameters import Windows
from pase.ir.types import is_floating
from pase.local.functions import COMPUTED, NUMPY, SLOPES, PointValues
from pase.local.parts import iteration_dim
from pase.local.types import Combine, Extents, LocalOp, LocalOperand, LocalResult
from pase.tables.axis_layout import AxisLayout
from pase.tables.layouts import concrete_size

__all__ = ["LocalNest", "SlidingDim", "coordinates", "refused"]

_READS = {"reduce": 1, "view": 1, "window": 1, "matmul": 2, "conv": 2, "gather": 2, "scatter": 3}
"""Kind of op -> its number of operands, if its maps describe it fully."""

_POOLED: dict[str, Combine] = {"reduce_window_max": "max", "reduce_window_min": "min"}
_REDUCED: dict[str, Callable[..., np.ndarray]] = {"sum": np.sum, "max": np.max, "min": np.min}
_NEUTRAL = {"sum": 0.0, "max": -np.inf, "min": np.inf}


@dataclass(frozen=True, kw_only=True)
class SlidingDim:
    """A tensor dim under a window, on one device.

    dim: the iteration dim. tap: the iteration dim of the window's elements; there are ``taps`` of them, ``dilation``
    apart. before: number of rows read before the shard. rows: number of rows of the shard. reach: number of rows read
    in total.
    """

    dim: str
    tap: str
    taps: int
    stride: int
    dilation: int
    before: int
    rows: int
    reach: int

    @property
    def behind(self) -> int:
        """Number of rows read after the shard."""
        return self.reach - self.rows - self.before

    def index(self, points: int) -> np.ndarray:
        """The row numbers that each point reads, [points, taps]."""
        return np.arange(points)[:, None] * self.stride + np.arange(self.taps)[None, :] * self.dilation


@dataclass(frozen=True, kw_only=True)
class LocalNest:
    """An op as a loop nest on one device.

    combine: how points are reduced. joins: how partial results of several devices are reduced. sizes: iteration dim ->
        its size on this device, in order. numbers: the function's operands (``Op.numbers``).
    sliding: the dims of the first operand that are under a window.
    looked: for a lookup or an update by index, the dim that the index selects from; rows: its unsharded size.
    dtype: of the result. Floating-point numbers are not rounded to it.
    """

    op: Op
    combine: Combine
    joins: Combine
    sizes: Mapping[str, int]
    numbers: tuple[Number | None, ...]
    sliding: Mapping[int, SlidingDim] = field(default_factory=dict)
    looked: str | None = None
    rows: int = 0
    dtype: str = "float64"

    @classmethod
    def of(
        cls, local: LocalOp, node: Node, ways_of: Sequence[int], dtype: str, back: bool = False
    ) -> LocalNest:
        """The nest of an op on one device.

        ways_of: the sizes of the mesh. dtype: of the result. back: use the layout of the result's gradient instead of
        the result's layout.
        Raises PaseError if the graph does not determine what the op computes.
        """
        op, space = local.op, node.space
        given = op.numbers
        known = op.function.name == "scatter_add" or op.function.name in COMPUTED
        known = known and len(op.reads) == _READS.get(op.kind, len(op.reads))
        if given is None or not known or len(op.writes) > 1:
            raise refused(op, "the graph does not determine what it computes", "pass its function as `rules`")
        whole = {d: concrete_size(space[d].size, op.name) for d in op.dims}
        values: Sequence[LocalOperand | LocalResult] = (*local.operands, *local.results)
        ways = dict.fromkeys(whole, 1)
        for a, v in zip((*op.reads, *op.writes), values, strict=True):
            layout = v.gradient if back and isinstance(v, LocalResult) else v.layout
            for name, w in _splits(a, layout, whole, ways_of).items():
                ways[name] = max(ways[name], w)
        sizes = {d: n // ways[d] for d, n in whole.items()}
        sliding = _sliding(op, local, node, whole, ways, sizes)
        looked = _looked_up(op) if op.kind in ("gather", "scatter") else None
        of_parts = [
            v.tensor
            for position, (a, v) in enumerate(zip((*op.reads, *op.writes), values, strict=True))
            for dim, (n, walk) in enumerate(zip(v.shape, a.map.walks, strict=True))
            if not (position == 0 and dim in sliding) and n != math.prod(whole[d] for d in walk.dims)
        ]
        if op.kind == "view" and set(op.reads[0].map.dims) - set(op.writes[0].map.dims):
            of_parts.append(values[0].tensor)
        if of_parts:
            what = f"it takes a part of '{of_parts[0]}', and the graph does not determine which"
            raise refused(op, what, "pass its function as `rules`")
        return cls(
            op=op,
            combine=_POOLED.get(op.function.name, local.combine),
            joins=local.combine,
            sizes=sizes,
            numbers=given,
            sliding=sliding,
            looked=looked,
            dtype=dtype,
            rows=0 if looked is None else whole[looked],
        )

    @property
    def neutral(self) -> float:
        """The padding value where a window crosses the tensor's border."""
        return _NEUTRAL[self.combine]

    def _names(self, a: Access) -> list[str]:
        """The iteration dims of an array's dims, in order."""
        out: list[str] = []
        for i, walk in enumerate(a.map.walks):
            slides = self.sliding.get(i) if a is self.op.reads[0] else None
            out += [slides.dim, slides.tap] if slides else walk.dims
        return out

    def spread(self, x: np.ndarray, a: Access) -> np.ndarray:
        """The array with one dim per iteration dim; dims that its map does not walk have one element."""
        if a is self.op.reads[0]:
            for i, s in self.sliding.items():
                index = s.index(self.sizes[s.dim])
                x = np.take(x, index.ravel(), axis=i)
        names = self._names(a)
        x = x.reshape([self.sizes[d] for d in names])
        order = [names.index(d) for d in self.sizes if d in names]
        return x.transpose(order).reshape([n if d in names else 1 for d, n in self.sizes.items()])

    def collected(self, values: PointValues, a: Access, combine: str) -> np.ndarray:
        """The accessed array, from values over all iteration dims: dims that its map does not walk are reduced.

        With ``combine="sum"``, this is the transpose of ``spread``.
        """
        full = np.broadcast_to(values, tuple(self.sizes.values()))
        names = self._names(a)
        full = _REDUCED[combine](full, axis=tuple(i for i, d in enumerate(self.sizes) if d not in names))
        kept = [d for d in self.sizes if d in names]
        full = full.transpose([kept.index(d) for d in names])
        slides = self.sliding if a is self.op.reads[0] else {}
        shape = [
            self.sizes[slides[i].dim] * slides[i].taps
            if i in slides
            else math.prod(self.sizes[d] for d in w.dims)
            for i, w in enumerate(a.map.walks)
        ]
        full = full.reshape(shape)
        for i, s in slides.items():
            out = np.zeros((s.reach, *np.moveaxis(full, i, 0).shape[1:]))
            np.add.at(out, s.index(self.sizes[s.dim]).ravel(), np.moveaxis(full, i, 0))
            full = np.moveaxis(out, 0, i)
        return full

    def _wide(self, xs: Sequence[np.ndarray], where: np.ndarray | None) -> list[PointValues]:
        """All operands over the iteration dims, including literals; an index becomes one-hot."""
        read = iter(self.spread(x, a) for x, a in zip(xs, self.op.reads, strict=True))
        out = [next(read) if n is None else n for n in self.numbers]
        if where is not None:
            if np.any((np.asarray(out[1]) < 0) | (np.asarray(out[1]) >= self.rows)):
                what = f"an index is outside of 0 to {self.rows - 1}, and the graph does not determine what it means"
                raise refused(self.op, what)
            out[1] = np.equal(out[1], where).astype(float)
        return out

    def made(
        self, xs: Sequence[np.ndarray], where: np.ndarray | None = None, first: bool = True
    ) -> np.ndarray:
        """The op's result from its operands.

        where: for a lookup, the index of each point. first: whether this device contributes the array that updates are
        added to.
        """
        wide, write = self._wide(xs, where), self.op.writes[0]
        if self.op.kind == "scatter":
            return self.collected(wide[1] * wide[2], write, "sum") + first * xs[0]
        made = COMPUTED[self.op.function.name](NUMPY, *wide)
        if self.op.function.name == "cast" and not is_floating(self.dtype):
            made = np.not_equal(made, 0) if self.dtype == "bool" else np.trunc(made)
        return self.collected(made, write, self.combine)

    def reached(self, x: np.ndarray, top: np.ndarray) -> np.ndarray:
        """1 at each point that attains the maximum or minimum and 0 elsewhere, over all iteration dims."""
        return (self.spread(x, self.op.reads[0]) == self.spread(top, self.op.writes[0])).astype(float)

    def pulled(
        self,
        i: int,
        g: np.ndarray,
        xs: Sequence[np.ndarray],
        shares: np.ndarray | None,
        where: np.ndarray | None = None,
        first: bool = True,
    ) -> np.ndarray:
        """The gradient of the i-th operand, from the result's gradient ``g``.

        shares: for a maximum or minimum, each point's share of the gradient. where, first: as in ``made``.
        """
        wide, spread = self._wide(xs, where), self.spread(g, self.op.writes[0])
        if self.op.kind == "scatter":
            return g * first if i == 0 else self.collected(spread * wide[1], self.op.reads[i], "sum")
        name = self.op.function.name
        position = [k for k, n in enumerate(self.numbers) if n is None][i]
        slope: PointValues = (
            SLOPES[name](position)(*wide, COMPUTED[name](NUMPY, *wide)) if shares is None else shares
        )
        return self.collected(spread * slope, self.op.reads[i], "sum")


def refused(op: Op, what: str, fix: str = "") -> PaseError:
    """The error for an op that numpy cannot compute."""
    return PaseError(what, where=f"'{op.name}' at {op.source}", fix=fix)


def _looked_up(op: Op) -> str:
    """The dim of the table that the index selects from."""
    table = op.reads[0] if op.kind == "gather" else op.writes[0]
    others = {d for a in (*op.reads[1:], *(op.writes if op.kind == "gather" else ())) for d in a.map.dims}
    found = [d for d in table.map.dims if d not in others]
    if len(found) != 1:
        raise refused(op, "it does not look up single elements of one dim")
    return found[0]


def _sliding(
    op: Op,
    local: LocalOp,
    node: Node,
    whole: dict[str, int],
    ways: Mapping[str, int],
    sizes: dict[str, int],
) -> dict[int, SlidingDim]:
    """The dims of the first operand that are under a window, by number.

    Adds the dims of the windows' elements to ``whole`` and ``sizes``.
    """
    taps = [d for d in op.dims if node.space[d].kind == "window"]
    found: dict[int, SlidingDim] = {}
    for i, walk in enumerate(op.reads[0].map.walks if op.kind in ("conv", "window") else ()):
        w = walk.window
        if w is None and (not walk.dims or local.operands[0].shape[i] == whole[walk.dims[0]]):
            continue
        w = w or Window(extent=1)
        if len(walk.dims) > 1:
            raise refused(op, "its window is not along exactly one iteration dim")
        (dim,), n = walk.dims or (f"{i}@",), local.operands[0].shape[i]  # none: the result has one element
        whole.setdefault(dim, 1)
        sizes.setdefault(dim, 1)
        if op.kind == "conv":
            tap = taps.pop(0) if w.extent > 1 else f"{dim}@"
            count = whole.get(tap, 1)
        else:
            far = op.parameters.dilation[i] if isinstance(op.parameters, Windows) else 1
            tap, count = f"{dim}@", (w.extent - 1) // far + 1
        if count > 1 and (w.extent - 1) % (count - 1):
            raise refused(op, "the graph does not determine the dilation of its window")
        whole.setdefault(tap, count)
        sizes.setdefault(tap, count)
        found[i] = SlidingDim(
            dim=dim,
            tap=tap,
            taps=count,
            stride=w.stride,
            dilation=(w.extent - 1) // max(count - 1, 1),
            before=w.before,
            rows=n // ways.get(dim, 1),
            reach=(sizes[dim] - 1) * w.stride + w.extent,
        )
    return found


def _splits(
    a: Access, layout: AxisLayout, sizes: Mapping[str, int], ways: Sequence[int]
) -> Mapping[str, int]:
    """Iteration dim -> the number of parts into which a layout of the accessed tensor splits it."""
    out: dict[str, int] = {}
    for axis, digit in layout.digits:
        walk = a.map.walks[digit.dim]
        d = walk.dims[0] if walk.window else iteration_dim(walk.dims, sizes, digit.blocks, ways[axis])
        if d is not None:
            out[d] = out.get(d, 1) * ways[axis]
    return out


def coordinates(shape: Extents, a: Access, dim: str, sizes: Mapping[str, int]) -> np.ndarray:
    """An unsharded tensor in which each element is its own index along an iteration dim."""
    i = next(k for k, w in enumerate(a.map.walks) if dim in w.dims)
    dims = a.map.walks[i].dims
    minor = math.prod(sizes[d] for d in dims[dims.index(dim) + 1 :])
    along = np.arange(shape[i]) // minor % sizes[dim]
    return np.broadcast_to(along.reshape([-1 if k == i else 1 for k in range(len(shape))]), shape)
