"""Meshes that fit a machine: ordered factorizations of the devices, and the links each axis crosses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from pase.errors import PaseError
from pase.machine.types import Machine, Mesh

__all__ = ["axis_levels", "level_ways", "mesh_from", "meshes"]

_AXIS_NAMES = "xyzwvutsrqponmlkjihgfedcba"

MOST_DEVICES = 1 << 20
"""Ten times the largest cluster; far above it the meshes alone are too many to list."""


def level_ways(devices: int, machine: Machine) -> tuple[int, ...]:
    """How many units each link level joins when ``devices`` are used, innermost first.

    The product is ``devices``. A machine that fixes the shape (a TPU slice) says so; elsewhere each
    level takes the largest divisor that it has room for: 12 devices on 8 a node are 2 nodes x 6.

    >>> from pase.machine import load
    >>> level_ways(32, load("h100x8")), level_ways(12, load("h100x8")), level_ways(4, load("h100x8"))
    ((8, 4), (6, 2), (4, 1))
    """
    if devices < 1:
        raise PaseError(f"devices must be at least 1, got {devices}")
    if devices > MOST_DEVICES:
        raise PaseError(
            f"{devices} devices are more than any machine has; at most {MOST_DEVICES} are searched"
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
            f"machine {machine.name} has room for {room} devices in equal parts, not for {devices}; "
            f"ask for fewer, or give its file an outer [[levels]] entry"
        )
    return tuple(ways)


def _split(stride: int, size: int, ways: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """Ways of one axis at each level, and whether it covers a whole factor of each."""
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
    """Per axis, the ways it has at each link level (innermost first); their product is its size.

    An axis that does not cover whole factors of the levels (3 devices of an 8-way node) is taken to
    have all its ways at the outermost level that any of its groups crosses.

    >>> from pase.machine import load
    >>> axis_levels(Mesh(names=("data", "model"), sizes=(8, 4)), load("h100x8"))
    ((2, 4), (4, 1))
    """
    ways = level_ways(mesh.devices, machine)
    rows = []
    for stride, size in zip(mesh.strides, mesh.sizes, strict=True):
        row, aligned = _split(stride, size, ways)
        if not aligned:
            # Some group has a level's boundary in it unless whole groups fit below that boundary.
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
    """Ordered factorizations into 1..parts factors of 2 or more, shortest first within a prefix."""
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
    """Meshes worth a search, cheapest to search first: fewer axes, then larger inner axes.

    Every ordered factorization of ``devices`` into at most ``max_axes`` axes of which each covers
    whole factors of the link levels; the machine's own hierarchy; and the finest mesh (one axis per
    prime factor, level by level) if it has at most ``max_prime_axes`` axes.
    distinct: drop meshes that differ from an earlier one only in the order of axes between which no
    link can tell (2x4 and 4x2 within one switch): their configs and costs are the same.

    >>> from pase.machine import load
    >>> ["x".join(map(str, m.sizes)) for m in meshes(16, load("h100x8"), 2)]
    ['16', '2x8', '4x4', '8x2', '2x2x2x2']
    """
    if max_axes < 1:
        raise PaseError(f"max_axes must be at least 1, got {max_axes}")
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
        # The one-axis mesh always covers every level whole.
        if all(aligned for _, aligned in split):
            same = distinct and switched
            key: tuple[object, ...] = tuple(sorted(row for row, _ in split)) if same else sizes
            kept.setdefault(key, mesh)
    return sorted(kept.values(), key=lambda mesh: len(mesh.sizes))


def mesh_from(text: str, devices: int) -> Mesh:
    """Parses "4x8" or "data=4,model=8". PaseError where it cannot be read or is not ``devices``.

    >>> mesh_from("data=4,model=8", 32)
    Mesh(names=('data', 'model'), sizes=(4, 8))
    >>> mesh_from("4x8", 64)
    Traceback (most recent call last):
    ...
    pase.errors.PaseError: mesh '4x8' has 4 x 8 = 32 devices, but 64 were asked for
    """
    parts = re.split(r"[,;]" if "=" in text else r"[x×*]", text)
    pattern = r"\s*(?:(?P<name>[^\W\d]\w*)\s*=\s*)?(?P<size>\d+)\s*"
    read = [re.fullmatch(pattern, part) for part in parts]
    named = [m is not None and m["name"] is not None for m in read]
    if not all(read) or any(named) != all(named):
        raise PaseError(
            f"cannot read mesh '{text}': write sizes as '4x8', outermost first, or names and sizes as "
            f"'data=4,model=8'"
        )
    sizes = tuple(int(m["size"]) for m in read if m)
    if 0 in sizes:
        raise PaseError(f"mesh '{text}' has an axis of size 0: sizes start at 1")
    names = tuple(m["name"] for m in read if m) if all(named) else _named(sizes).names
    if len(set(names)) != len(names):
        raise PaseError(f"mesh '{text}' names an axis twice: each axis needs a name of its own")
    if math.prod(sizes) != devices:
        product = " x ".join(map(str, sizes))
        shown = product if len(sizes) == 1 else f"{product} = {math.prod(sizes)}"
        raise PaseError(f"mesh '{text}' has {shown} devices, but {devices} were asked for")
    return Mesh(names=names, sizes=sizes)
