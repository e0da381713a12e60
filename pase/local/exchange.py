"""Reshard steps whose parts do not nest, as permutes that together carry each element once.

Most reshard steps pass on whole digits, and are one collective (``pase.local.parts``). If a mesh axis gets a part of a
dim that overlaps with the part that it had, a device sends only to some of the others, and a different amount to each.
Each device still sends as much as it receives. So the table of amounts by source and target is a sum of permutations
(Birkhoff, 1946), and each permutation is a permute of equal parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pase.local.parts import NotNested, held, pairs, view
from pase.local.types import LocalReshardStep
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout, Digit

__all__ = ["ExchangeRound", "UnitExchange", "exchange", "nests"]


@dataclass(frozen=True, kw_only=True)
class ExchangeRound:
    """One permute.

    pairs: (source, target), positions along the step's axes, row-major. units: which of its units each position sends,
    int64 [positions, units].
    """

    pairs: tuple[tuple[int, int], ...]
    units: np.ndarray

    @property
    def stays(self) -> bool:
        """Whether every device sends only to itself."""
        return all(a == b for a, b in self.pairs)


@dataclass(frozen=True, kw_only=True)
class UnitExchange:
    """A reshard step in units: the largest blocks of the changing dims that no digit cuts.

    before, after: how many units a device has along each dim; 1 for a dim that does not change. rounds: the permutes.
    order: int64 [positions, units]. Afterwards, a position's unit i is the order[position, i]-th unit that it received,
    counted over all rounds.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    rounds: tuple[ExchangeRound, ...]
    order: np.ndarray


def nests(step: LocalReshardStep, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether a reshard step is one collective of whole digits. If not, ``exchange`` gives the permutes to send."""
    try:
        if step.kind == "permute":
            pairs(step, shape, mesh)
        else:
            view(step, shape, mesh)
    except NotNested:
        return False
    return True


@lru_cache(maxsize=1 << 12)
def exchange(step: LocalReshardStep, shape: tuple[int, ...], mesh: Mesh) -> UnitExchange:
    """An all-to-all or a permute as permutes of units. shape: of the whole tensor.

    Raises NotNested if a device does not send as much as it receives.
    """
    if step.kind not in ("all_to_all", "permute"):
        raise NotNested("it does not move whole digits", where=f"{step.kind} over {', '.join(step.axes)}")
    axes = [mesh.names.index(name) for name in step.axes]
    units = tuple(_units(dim, step, axes) for dim in range(len(shape)))
    group = [
        tuple(dict(zip(axes, at, strict=True)).get(a, 0) for a in range(len(mesh.sizes)))
        for at in itertools.product(*(range(mesh.sizes[a]) for a in axes))
    ]
    had, has = (
        [_numbers(units, layout, place, mesh) for place in group] for layout in (step.before, step.after)
    )
    common = _handed(had, has, math.prod(units))
    left = np.zeros((len(group), len(group)), dtype=np.int64)
    for pair, some in common.items():
        left[pair] = len(some)
    sizes = {x.size for x in (*had, *has)}
    if len(sizes) > 1 or {int(n) for n in (*left.sum(0), *left.sum(1))} != sizes:
        raise NotNested(
            "devices hold parts of different sizes", where=f"{step.kind} over {', '.join(step.axes)}"
        )
    rounds, arrived = [], [list[int]() for _ in group]
    while left.any():
        targets, amount = _matching(left)
        sent = []
        for source, target in enumerate(targets):
            begin = len(common[source, target]) - left[source, target]
            some = common[source, target][begin : begin + amount]
            sent.append(np.searchsorted(had[source], some))
            arrived[target] += some
            left[source, target] -= amount
        rounds.append(ExchangeRound(pairs=tuple(enumerate(targets)), units=np.stack(sent)))
    order = [np.argsort(received, kind="stable") for received in arrived]
    return UnitExchange(
        before=_extents(units, step.before, mesh),
        after=_extents(units, step.after, mesh),
        rounds=tuple(rounds),
        order=np.stack(order),
    )


def _handed(
    had: Sequence[np.ndarray], has: Sequence[np.ndarray], units: int
) -> dict[tuple[int, int], list[int]]:
    """(source, target) -> the units that go from one to the other.

    A device keeps the units that it already has. If several devices have a unit and several others need it, they are
    paired in order.
    """
    sources, targets = ([set[int]() for _ in range(units)] for _ in range(2))
    for sets, held_by in ((sources, had), (targets, has)):
        for device, some in enumerate(held_by):
            for unit in some:
                sets[unit].add(device)
    out: dict[tuple[int, int], list[int]] = {}
    for unit, (there, wanted) in enumerate(zip(sources, targets, strict=True)):
        kept = there & wanted
        for pair in (
            *((i, i) for i in kept),
            *zip(sorted(there - kept), sorted(wanted - kept), strict=False),
        ):
            out.setdefault(pair, []).append(unit)
    return out


def _units(dim: int, step: LocalReshardStep, axes: Sequence[int]) -> int:
    """The number of units into which a whole dim is cut: 1 if no axis of the step changes what it holds of the dim."""
    if not any(
        s != t and dim in {x.dim for x in (s, t) if isinstance(x, Digit)} for s, t in _states(step, axes)
    ):
        return 1
    return math.lcm(*(blocks for layout in (step.before, step.after) for blocks, _ in layout.along(dim)))


def _states(step: LocalReshardStep, axes: Sequence[int]) -> list[tuple[object, object]]:
    return [(step.before[a], step.after[a]) for a in axes]


def _within(units: tuple[int, ...], layout: AxisLayout) -> AxisLayout:
    """The layout, restricted to the dims that are cut into units."""
    return layout.within(lambda dim: units[dim] > 1)


def _numbers(units: tuple[int, ...], layout: AxisLayout, place: tuple[int, ...], mesh: Mesh) -> np.ndarray:
    """The row-major numbers of the units that a device holds, in order.

    Other axes than those of the step may split these dims too. Their share is the same for all devices of a group, and
    does not change the position of a unit within a device's part.
    """
    along = held(units, _within(units, layout), place, mesh)
    return np.ravel_multi_index(np.ix_(*along), units).reshape(-1)


def _extents(units: tuple[int, ...], layout: AxisLayout, mesh: Mesh) -> tuple[int, ...]:
    return tuple(map(len, held(units, _within(units, layout), (0,) * len(layout), mesh)))


def _matching(amounts: np.ndarray) -> tuple[list[int], int]:
    """The next permute: (a different target for each source, how many units each of them sends).

    Units that stay on their device come first, then permutes in the order of decreasing size. amounts: int [sources,
    targets], whose rows and columns all have the same sum.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    if stays := int(amounts.diagonal().min()):
        return list(range(len(amounts))), stays
    for least in sorted({int(x) for x in amounts.flat if x}, reverse=True):
        found = maximum_bipartite_matching(csr_array(amounts >= least), perm_type="column")
        if (found >= 0).all():
            return [int(x) for x in found], least
    raise AssertionError("a table whose rows and columns have equal sums has a perfect matching (Hall)")
