"""Layouts of arguments that the user fixed, over the user's own mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["FREE_LAYOUTS", "FixedLayout", "FixedMesh", "to_free"]

FREE_LAYOUTS = (
    "let the search decide: pass jax.ShapeDtypeStruct(x.shape, x.dtype) in place of each such array x"
)
"""The fix to suggest for arrays whose layout a plan cannot keep."""


@dataclass(frozen=True, kw_only=True)
class FixedMesh:
    """A user's mesh: its axes, outermost first. Axes with one device split nothing and are left out.

    >>> mesh = FixedMesh(names=("data", "model"), sizes=(2, 4))
    >>> str(mesh), mesh.devices
    ('data=2, model=4', 8)
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def parts(self, sizes: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
        """Axis -> the numbers of the axes of a finer mesh that together form this axis.

        sizes: the sizes of the finer mesh's axes, outermost first. Returns None if they do not divide this mesh's axes.

        >>> FixedMesh(names=("data", "model"), sizes=(2, 4)).parts((2, 2, 2))
        {'data': (0,), 'model': (1, 2)}
        >>> FixedMesh(names=("data", "model"), sizes=(2, 4)).parts((4, 2)) is None
        True
        """
        out: dict[str, tuple[int, ...]] = {}
        axis = 0
        for name, size in zip(self.names, self.sizes, strict=True):
            first, ways = axis, 1
            while ways < size and axis < len(sizes):
                ways *= sizes[axis]
                axis += 1
            if ways != size:
                return None
            out[name] = tuple(range(first, axis))
        return out if math.prod(sizes[axis:]) == 1 else None


@dataclass(frozen=True, kw_only=True)
class FixedLayout:
    """The layout that an argument already has, or that a constraint gives it.

    path: the argument's name in the user's program.
    dims: for each tensor dim, the mesh axes that split it, major to minor, or None if the search decides.
    constraint: the name or pattern of the constraint; "" if the argument has the layout.
    """

    path: str
    mesh: FixedMesh
    dims: tuple[tuple[str, ...] | None, ...]
    constraint: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"P({', '.join(map(_entry, self.dims))}) on the mesh {self.mesh}"


def to_free(layouts: Iterable[FixedLayout]) -> str:
    """What to do if a plan cannot keep layouts, as the last words of a fix.

    >>> to_free([FixedLayout(path="x", mesh=FixedMesh(names=(), sizes=()), dims=(), constraint="batch")])
    "leave out the constraint 'batch'"
    """
    patterns = dict.fromkeys(layout.constraint for layout in layouts)
    if not patterns or "" in patterns:
        return FREE_LAYOUTS
    named = ", ".join(f"'{p}'" for p in patterns)
    return f"leave out the constraint{'s' if len(patterns) > 1 else ''} {named}"


def _entry(axes: tuple[str, ...] | None) -> str:
    if axes is None:
        return "UNCONSTRAINED"
    return repr(axes[0]) if len(axes) == 1 else repr(axes or None)
