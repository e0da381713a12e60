"""Reshards a tensor from one Mesh-TensorFlow layout to another, by reshapes that Mesh-TF can lower.

For each mesh axis, ``mtf.reshape`` compares the product of the dims before the dim that the axis splits. If this
product changes, it slices, gathers or exchanges along that axis. It raises an error if the dim to split does not exist
before the reshape, and it interleaves two axes that trade places in one reshape. A reshard therefore goes through
intermediate shapes, such that each reshape moves axes only to dims that are not split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pase.backends.mesh_tf.names import MeshTfDim, TensorDims, flat
from pase.errors import PaseError
from pase.ops.nests import common_factors

__all__ = ["direct", "reshape_steps"]

MeshTfShape = tuple[MeshTfDim, ...]


def reshape_steps(have: TensorDims, want: TensorDims, axes: Mapping[str, int]) -> list[MeshTfShape]:
    """The shapes to reshape to, in order. The last one is the wanted shape. Empty if the tensor already has it.

    >>> b, s = MeshTfDim("b", 8, "x"), MeshTfDim("s", 4)
    >>> reshape_steps(((b,), (s,)), ((MeshTfDim("b", 8),), (MeshTfDim("s", 4, "x"),)), {"x": 2})
    [(MeshTfDim(base='b', size=8, axis=None), MeshTfDim(base='s', size=4, axis='x'))]
    """
    now, goal = flat(have), flat(want)
    for shape in (now, goal):
        used = [d.axis for d in shape if d.axis is not None]
        if len(set(used)) != len(used):
            raise PaseError(f"dims {shape} would split a tensor twice over one mesh axis", where="layout")
    if now == goal:
        return []
    if direct(now, goal, axes):
        return [goal]
    steps: list[MeshTfShape] = []
    factors = _common_shape(now, goal)
    if factors is None or not (_fits(now, factors, axes) and _fits(goal, factors, axes)):
        return _through_whole(now, goal)
    fine = _refined(now, factors)
    if len(fine) != len(now):
        steps.append(fine)
    target = [d.axis for d in _refined(goal, factors)]
    state = [d.axis for d in fine]
    while state != target:
        after = list(state)
        for i, axis in enumerate(target):
            free = state[i] is None and axis is not None
            if free:  # an all-to-all if the axis splits another dim, else a slice
                after = [axis if j == i else None if a == axis else a for j, a in enumerate(after)]
        if after == state:  # the remaining axes must be removed, or wait for each other: gather
            gone = [i for i, a in enumerate(state) if a is not None and a not in target]
            waiting = [i for i, a in enumerate(state) if a is not None and a != target[i]]
            for i in gone or waiting[:1]:
                after[i] = None
        state = after
        steps.append(tuple(replace(d, axis=a) for d, a in zip(fine, state, strict=True)))
    if steps[-1] != goal:
        if len(steps) > 1 and direct(steps[-2], goal, axes):
            steps.pop()
        steps.append(goal)
    return steps


def direct(now: MeshTfShape, goal: MeshTfShape, axes: Mapping[str, int]) -> bool:
    """Whether one mtf.reshape does this correctly, and one reshape in reverse does it for the gradient."""
    return _one_way(now, goal, axes) and _one_way(goal, now, axes)


def _one_way(now: MeshTfShape, goal: MeshTfShape, axes: Mapping[str, int]) -> bool:
    before, after = _starts(now), _starts(goal)
    where = {d.axis: i for i, d in enumerate(now) if d.axis is not None}
    for i, d in enumerate(goal):
        if d.axis is None:
            continue
        old = where.get(d.axis)
        if old is not None and before[old] == after[i]:
            continue
        at = [j for j, start in enumerate(before) if start == after[i]]
        if not at or now[at[-1]].axis is not None or now[at[-1]].size % axes[d.axis]:
            if old is not None or at:
                return False
            if any(s is not None and before[j] <= after[i] < before[j] * now[j].size for j, s in _split(now)):
                return False  # the cut would be inside a dim that another axis splits
    return True


def _split(shape: MeshTfShape) -> list[tuple[int, str]]:
    return [(i, d.axis) for i, d in enumerate(shape) if d.axis is not None]


def _starts(shape: MeshTfShape) -> list[int]:
    """For each dim, the product of the sizes before it (Mesh-TF's cumprod)."""
    out, n = [], 1
    for d in shape:
        out.append(n)
        n *= d.size
    return out


def _common_shape(now: MeshTfShape, goal: MeshTfShape) -> list[int] | None:
    """The sizes of the coarsest shape from which both can be made by merging adjacent dims."""
    common = common_factors([d.size for d in now], [d.size for d in goal])
    return None if common is None else [int(str(f)) for f in common[0]]


def _fits(shape: MeshTfShape, factors: Sequence[int], axes: Mapping[str, int]) -> bool:
    """Whether the first factor of each split dim of the shape is divisible by the size of its axis."""
    k = 0
    for d in shape:
        if d.axis is not None and factors[k] % axes[d.axis]:
            return False
        n = 1
        while n < d.size:
            n *= factors[k]
            k += 1
    return True


def _refined(shape: MeshTfShape, factors: Sequence[int]) -> MeshTfShape:
    """The shape with its dims divided into these factors. If a dim is split, its first factor is split."""
    out: list[MeshTfDim] = []
    k = 0
    for d in shape:
        n, first = 1, len(out)
        while n < d.size:
            out.append(MeshTfDim(f"{d.base}_at{len(out) - first}", factors[k], d.axis if n == 1 else None))
            n *= factors[k]
            k += 1
        if len(out) == first + 1:
            out[first] = d
    return tuple(out)


def _through_whole(now: MeshTfShape, goal: MeshTfShape) -> list[MeshTfShape]:
    """Gather split dims, reshape, and split again. This always works."""
    steps = [tuple(replace(d, axis=None) for d in now), tuple(replace(d, axis=None) for d in goal), goal]
    return [s for k, s in enumerate(steps) if s != (now, *steps)[k]]
