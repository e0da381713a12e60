"""Mesh-TensorFlow's rules for layouts, as a check that needs no TensorFlow.

From ``LayoutRules`` and ``MeshImpl`` (mesh_tensorflow 0.1.21, ops.py): a dim's name has at most one mesh axis, the dims
of a tensor have different mesh axes, and an axis divides the dim that it splits. Ops also require some dims unsplit.
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
            raise PaseError(f"{what} '{text}': '{part}' is not NAME:VALUE; parts are separated by ';'")
        out.append((name, value))
    return out


def check_layout(mesh_shape: str, layout_rules: str) -> tuple[dict[str, int], dict[str, str]]:
    """(mesh axis -> size, dim name -> mesh axis). Raises PaseError if Mesh-TF would reject them, or ignore a rule."""
    mesh: dict[str, int] = {}
    for axis, size in parse_pairs(mesh_shape, "mesh_shape"):
        if axis in mesh:
            raise PaseError(f"mesh_shape '{mesh_shape}': axis '{axis}' occurs twice")
        if not size.isdecimal() or int(size) < 1:
            raise PaseError(f"mesh_shape '{mesh_shape}': axis '{axis}' has size '{size}'")
        mesh[axis] = int(size)
    layout: dict[str, str] = {}
    for dim, axis in parse_pairs(layout_rules, "layout_rules"):
        if axis not in mesh:
            raise PaseError(
                f"layout_rules: dim '{dim}' goes to mesh axis '{axis}', which the mesh {mesh_shape} does not have"
            )
        if layout.setdefault(dim, axis) != axis:
            raise PaseError(
                f"layout_rules: dim '{dim}' has two mesh axes, {layout[dim]} and {axis}; Mesh-TensorFlow splits a "
                f"dim over one: merge the axes, or make two dims of it"
            )
    return mesh, layout


def check_tensor(
    what: str,
    dims: Sequence[tuple[str, int]],
    mesh: dict[str, int],
    layout: dict[str, str],
    whole: Iterable[str] = (),
) -> None:
    """A tensor's (name, size) dims under a layout. whole: names that this op cannot split."""
    seen: dict[str, str] = {}
    for name, size in dims:
        axis = layout.get(name)
        if axis is None:
            continue
        if axis in seen and seen[axis] != name:
            raise PaseError(
                f"{what}: dims '{seen[axis]}' and '{name}' are both split over mesh axis '{axis}'; Mesh-TensorFlow "
                f"splits one dim of a tensor over an axis"
            )
        if axis in seen:
            raise PaseError(f"{what}: has dim '{name}' twice")
        if size % mesh[axis]:
            raise PaseError(f"{what}: dim '{name}' of {size} elements over {mesh[axis]} devices is uneven")
        if name in set(whole):
            raise PaseError(f"{what}: this op cannot split '{name}', and the layout has it over '{axis}'")
        seen[axis] = name
    if len({n for n, _ in dims}) != len(dims):
        raise PaseError(f"{what}: a dim's name occurs twice in {[n for n, _ in dims]}")
