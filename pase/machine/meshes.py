"""Meshes that fit a machine: ordered factorizations of the devices, and the links that each axis crosses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from pase.errors import PaseError
from pase.machine.types import Machine, Mesh

__all__ = ["axis_levels", "level_ways", "mesh_from", "meshes"]

_AXIS_NAMES = "xyzwvutsrqponmlkjihgfedcba"

MOST_DEVICES = 1 << 20
"""Ten times the largest cluster. Far above this, there are too many meshes even to list."""


def level_ways(devices: int, machine: Machine) -> tuple[int, ...]:
    """The number of units that each link level joins when ``devices`` are used, innermost first.

    The product of these numbers is ``devices``. If the machine fixes the shape (a TPU slice), this shape is used.
    Otherwise each level takes the largest divisor for which it has room: 12 devices on nodes of 8 are 2 nodes x 6.

    >>> from pase.machine import load
    >>> level_ways(32, load("h100x8")), level_ways(12, load("h100x8")), level_ways(4, load("h100x8"))
    ((8, 4), (6, 2), (4, 1))
    """
    if devices < 1:
        raise PaseError(f"must be at least 1, got {devices}", where="devices")
    if devices > MOST_DEVICES:
        raise PaseError(
            f"must be at most {MOST_DEVICES}, got {devices}, more than any machine has", where="devices"
        )
    if devices in machine.shapes:
        return machine.shapes[devices]
    ways, left = [], devices
    for level in machine.levels:
        take = left if level.ways == 0 else max(d for d in range(1, level.ways + 1) if left % d == 0)
        ways.append(take)
        left //= take
    if left > 1:
        room = math.prod(level.ways for level in machine.levels)
        raise PaseError(
            f"it has room for {room} devices in equal parts, not for {devices}",
            where=f"machine {machine.name}",
            fix="ask for fewer devices, or add an outer [[levels]] entry to its file",
        )
    return tuple(ways)


def _split(stride: int, size: int, ways: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """The ways of one axis at each level, and whether the axis covers a whole factor of each level."""
    out, aligned, unit = [1] * len(ways), True, 1
    for level, w in enumerate(ways):
        low, high = max(stride, unit), min(stride * size, unit * w)
        if high > low:
            whole = low % stride == 0 and (stride * size) % high == 0 and low % unit == 0 and high % low == 0
            aligned = aligned and whole and (unit * w) % high == 0
            out[level] = high // low
        unit *= w
    return tuple(out), aligned and math.prod(out) == size


def axis_levels(mesh: Mesh, machine: Machine) -> tuple[tuple[int, ...], ...]:
    """For each axis, its ways at each link level (innermost first). Their product is the size of the axis.

    An axis that does not cover whole factors of the levels (3 devices of an 8-way node) is assumed to have all its ways
    at the outermost level that any of its groups crosses.

    >>> from pase.machine import load
    >>> axis_levels(Mesh(names=("data", "model"), sizes=(8, 4)), load("h100x8"))
    ((2, 4), (4, 1))
    """
    ways = level_ways(mesh.devices, machine)
    rows = []
    for stride, size in zip(mesh.strides, mesh.sizes, strict=True):
        row, aligned = _split(stride, size, ways)
        if not aligned:
            # Some group contains a level's boundary, unless whole groups fit below that boundary.
            below = [math.prod(ways[:level]) for level in range(len(ways))]
            touched = max(
                level
                for level in range(len(ways))
                if level == 0 or (ways[level] > 1 and below[level] % (stride * size))
            )
            row = tuple(size if level == touched else 1 for level in range(len(ways)))
        rows.append(row)
    return tuple(rows)


def _named(sizes: tuple[int, ...]) -> Mesh:
    letters = len(_AXIS_NAMES)
    return Mesh(
        names=tuple(_AXIS_NAMES[i] if i < letters else f"axis{i}" for i in range(len(sizes))), sizes=sizes
    )


def _factorizations(devices: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yields the ordered factorizations into 1 to ``parts`` factors of 2 or more, shortest first within a prefix."""
    yield (devices,)
    if parts > 1:
        for first in range(2, devices // 2 + 1):
            if devices % first == 0:
                for rest in _factorizations(devices // first, parts - 1):
                    yield (first, *rest)


def _primes(n: int) -> list[int]:
    out, p = [], 2
    while n > 1:
        while n % p == 0:
            out.append(p)
            n //= p
        p = p + 1 if p * p <= n else n
    return out


def meshes(
    devices: int, machine: Machine, max_axes: int = 3, *, max_prime_axes: int = 6, distinct: bool = True
) -> list[Mesh]:
    """The meshes to search, in the order of their search cost: fewer axes first, then larger inner axes.

    These are the ordered factorizations of ``devices`` into at most ``max_axes`` axes of which each covers whole
    factors of the link levels; the machine's own hierarchy; and the finest mesh (one axis per prime factor, level by
    level), if it has at most ``max_prime_axes`` axes.

    distinct: whether to drop meshes that differ from an earlier one only in the order of axes between which no link can
        distinguish (2x4 and 4x2 within one switch). Their configs are the same, and so are their costs, but for how a
        dim that is split over both axes becomes one that is split over the outer of them only (0.036% of
        a step on 12 H100). A proof over every mesh prices them all.

    >>> from pase.machine import load
    >>> ["x".join(map(str, m.sizes)) for m in meshes(16, load("h100x8"), 2)]
    ['16', '2x8', '4x4', '8x2', '2x2x2x2']
    """
    if max_axes < 1:
        raise PaseError(f"must be at least 1, got {max_axes}", where="max_axes")
    ways = level_ways(devices, machine)
    if devices == 1:
        return [_named((1,))]
    found = sorted(_factorizations(devices, max_axes), key=lambda sizes: (len(sizes), sizes))
    found.append(tuple(w for w in reversed(ways) if w > 1))
    primes = tuple(p for w in reversed(ways) for p in sorted(_primes(w), reverse=True))
    if len(primes) <= max_prime_axes:
        found.append(primes)
    switched = all(level.topology == "switch" for level in machine.levels)
    kept: dict[tuple[object, ...], Mesh] = {}
    for sizes in found:
        mesh = _named(sizes)
        split = [_split(stride, size, ways) for stride, size in zip(mesh.strides, sizes, strict=True)]
        # The mesh with one axis always covers every level whole.
        if all(aligned for _, aligned in split):
            same = distinct and switched
            key: tuple[object, ...] = tuple(sorted(row for row, _ in split)) if same else sizes
            kept.setdefault(key, mesh)
    return sorted(kept.values(), key=lambda mesh: len(mesh.sizes))


def mesh_from(text: str, devices: int) -> Mesh:
    """Parses "4x8" or "data=4,model=8". Raises PaseError if it cannot, or if the mesh does not have ``devices``
    devices.

    >>> mesh_from("data=4,model=8", 32)
    Mesh(names=('data', 'model'), sizes=(4, 8))
    >>> mesh_from("4x8", 64)
    Traceback (most recent call last):
    ...
    pase.errors.PaseError: mesh '4x8': it has 4 x 8 = 32 devices, but 64 were asked for
    """
    parts = re.split(r"[,;]" if "=" in text else r"[x×*]", text)
    pattern = r"\s*(?:(?P<name>[^\W\d]\w*)\s*=\s*)?(?P<size>\d+)\s*"
    read = [re.fullmatch(pattern, part) for part in parts]
    named = [m is not None and m["name"] is not None for m in read]
    if not all(read) or any(named) != all(named):
        raise PaseError(
            "it cannot be read",
            where=f"mesh '{text}'",
            fix="write sizes as '4x8', outermost first, or names and sizes as 'data=4,model=8'",
        )
    sizes = tuple(int(m["size"]) for m in read if m)
    if 0 in sizes:
        raise PaseError("it has an axis of size 0", where=f"mesh '{text}'", fix="use sizes of 1 or more")
    names = tuple(m["name"] for m in read if m) if all(named) else _named(sizes).names
    if len(set(names)) != len(names):
        raise PaseError(
            "it names an axis twice", where=f"mesh '{text}'", fix="give each axis a name of its own"
        )
    if math.prod(sizes) != devices:
        product = " x ".join(map(str, sizes))
        shown = product if len(sizes) == 1 else f"{product} = {math.prod(sizes)}"
        raise PaseError(f"it has {shown} devices, but {devices} were asked for", where=f"mesh '{text}'")
    return Mesh(names=names, sizes=sizes)
