"""Mesh-TensorFlow's rules for layouts, as a check that does not need TensorFlow.

The rules are those of ``LayoutRules`` and ``MeshImpl`` (mesh_tensorflow 0.1.21, ops.py): a dim's name has at most one
mesh axis, the dims of a tensor have different mesh axes, and an axis divides the dim that it splits. Some ops also
require that certain dims are not split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pase.errors import PaseError

__all__ = ["check_layout", "check_tensor", "parse_pairs"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.]*\Z")


def parse_pairs(text: str, what: str) -> list[tuple[str, str]]:
    """``"a:x;b:y"`` -> [("a", "x"), ("b", "y")].

    >>> parse_pairs("batch:data;h:model", "layout_rules")
    [('batch', 'data'), ('h', 'model')]
    """
    out = []
    for part in text.split(";") if text else []:
        name, colon, value = part.partition(":")
        if not colon or not _NAME.match(name) or not value:
            raise PaseError(
                f"'{part}' is not NAME:VALUE",
                where=f"{what} '{text}'",
                fix="separate NAME:VALUE pairs by ';'",
            )
        out.append((name, value))
    return out


def check_layout(mesh_shape: str, layout_rules: str) -> tuple[dict[str, int], dict[str, str]]:
    """(mesh axis -> size, dim name -> mesh axis). Raises PaseError if Mesh-TF would reject them or ignore a rule."""
    mesh: dict[str, int] = {}
    for axis, size in parse_pairs(mesh_shape, "mesh_shape"):
        if axis in mesh:
            raise PaseError(f"axis '{axis}' occurs twice", where=f"mesh_shape '{mesh_shape}'")
        if not size.isdecimal() or int(size) < 1:
            raise PaseError(f"axis '{axis}' has size '{size}'", where=f"mesh_shape '{mesh_shape}'")
        mesh[axis] = int(size)
    layout: dict[str, str] = {}
    for dim, axis in parse_pairs(layout_rules, "layout_rules"):
        if axis not in mesh:
            raise PaseError(
                f"dim '{dim}' is split over mesh axis '{axis}', which the mesh {mesh_shape} does not have",
                where="layout_rules",
            )
        if layout.setdefault(dim, axis) != axis:
            raise PaseError(
                f"dim '{dim}' has two mesh axes, {layout[dim]} and {axis}, but Mesh-TensorFlow splits a dim over one",
                where="layout_rules",
                fix="merge the axes, or make two dims of it",
            )
    return mesh, layout


def check_tensor(
    what: str,
    dims: Sequence[tuple[str, int]],
    mesh: dict[str, int],
    layout: dict[str, str],
    whole: Iterable[str] = (),
) -> None:
    """Check a tensor's dims, (name, size), under a layout. whole: the names of dims that this op cannot split."""
    seen: dict[str, str] = {}
    for name, size in dims:
        axis = layout.get(name)
        if axis is None:
            continue
        if axis in seen and seen[axis] != name:
            raise PaseError(
                f"dims '{seen[axis]}' and '{name}' are both split over mesh axis '{axis}', but Mesh-TensorFlow splits "
                f"one dim of a tensor over an axis",
                where=what,
            )
        if axis in seen:
            raise PaseError(f"it has dim '{name}' twice", where=what)
        if size % mesh[axis]:
            raise PaseError(
                f"dim '{name}' of {size} elements cannot be split evenly over {mesh[axis]} devices",
                where=what,
            )
        if name in set(whole):
            raise PaseError(
                f"this op cannot split '{name}', but the layout splits it over '{axis}'", where=what
            )
        seen[axis] = name
    if len({n for n, _ in dims}) != len(dims):
        raise PaseError(f"a dim's name occurs twice in {[n for n, _ in dims]}", where=what)
