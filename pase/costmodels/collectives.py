"""Collectives as lines: every algorithm costs alpha + beta * bytes, and the cheapest is taken.

A group of devices is described by its ways at each link level. Every device of the mesh belongs to a group and all
groups communicate at once, so a level gives each device exactly its ``bandwidth``. Contention between groups that share
links is part of this definition, and nothing is added for it. A group with w devices below a level gains from the fact
that w devices carry one tensor's bytes across.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pase.errors import PaseError
from pase.machine import Algorithm, CollectiveKind, Machine, Mesh, axis_levels, level_ways

__all__ = ["DeviceGroup", "algorithms", "by_library", "group", "lines"]

# One-shot is used for all-reduce only, because libraries run the other kinds as rings.
_DEFAULTS: tuple[tuple[Literal["ring", "tree", "one_shot", "direct"], tuple[CollectiveKind, ...]], ...] = (
    ("ring", ()),
    ("tree", ()),
    ("one_shot", ("all_reduce",)),
    ("direct", ()),
)


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """The devices that one collective joins, described per link level, innermost first.

    ways: the number of devices.
    stretch: on a torus, the number of links between neighbours of the group (interleaved groups share links).
    ring: whether the group closes the torus to a ring.
    """

    ways: tuple[int, ...]
    stretch: tuple[int, ...]
    ring: tuple[bool, ...]


def group(mesh: Mesh, axes: int, machine: Machine) -> DeviceGroup:
    """The group of the axes in a bit set."""
    rows = axis_levels(mesh, machine)
    full = level_ways(mesh.devices, machine)
    ways, stretch, ring = [], [], []
    for level in range(len(full)):
        members = [i for i in range(len(rows)) if axes >> i & 1 and rows[i][level] > 1]
        between = [i for i in range(min(members, default=0), len(rows)) if i not in members]
        w = math.prod(rows[i][level] for i in members)
        s = math.prod(rows[i][level] for i in between) if members else 1
        wrap = machine.levels[level].wrap_ways
        ways.append(w)
        stretch.append(s)
        ring.append(0 < wrap <= full[level] and w * s == full[level])
    return DeviceGroup(ways=tuple(ways), stretch=tuple(stretch), ring=tuple(ring))


def algorithms(machine: Machine) -> tuple[Algorithm, ...]:
    """The machine's own algorithms, or else ring, binary tree, one-shot and direct at the levels' latencies."""
    own = tuple(a for a in machine.algorithms if not a.named)
    if own:
        return own
    steps = tuple(level.latency_s for level in machine.levels)
    return tuple(
        Algorithm(algorithm=name, protocol="default", launch_s=0.0, step_s=steps, kinds=kinds)
        for name, kinds in _DEFAULTS
    )


def by_library(machine: Machine, names: Sequence[str]) -> Machine:
    """The machine on which the first known of these libraries runs the collectives that it is for, and nothing else
    does; the machine itself if it knows none."""
    named = {a.protocol: a for a in machine.algorithms if a.named}
    chosen = next((named[name] for name in names if name in named), None)
    if chosen is None:
        return machine
    others = (a for a in algorithms(machine) if not set(a.kinds) & set(chosen.kinds))
    return replace(machine, algorithms=(*others, replace(chosen, named=False)))


def _seconds_per_byte(machine: Machine, g: DeviceGroup, a: Algorithm) -> list[float]:
    """For each level: the seconds in which a device sends one byte at this level while all other devices send, too."""
    out = []
    most = (a.most_bytes_per_s, *[a.most_between_bytes_per_s or a.most_bytes_per_s] * (len(g.ways) - 1))
    for level, w, stretch, ring, bound in zip(machine.levels, g.ways, g.stretch, g.ring, most, strict=True):
        bandwidth = level.bandwidth_at_ways.get(w, level.bandwidth_bytes_per_s)
        rate = bandwidth * level.efficiency * a.bandwidth_fraction
        if level.topology == "torus":
            rate *= (2 if ring else 1) / stretch
        out.append(1 / min(rate, bound or rate))
    return out


def _own_part(machine: Machine, g: DeviceGroup) -> float:
    """Seconds per byte of the whole in which a device copies its own part, which it sends to nobody."""
    rate = machine.own_part_bytes_per_s
    return 1 / (math.prod(g.ways) * rate) if rate else 0.0


def _ring(
    a: Algorithm, machine: Machine, g: DeviceGroup, passes: int, flat: bool
) -> list[tuple[float, float]]:
    """A reduce-scatter or an all-gather (1 pass), or both in sequence (an all-reduce, 2 passes). flat: only as one
    ring."""
    spb = _seconds_per_byte(machine, g, a)
    levels = [l for l, w in enumerate(g.ways) if w > 1]
    total = math.prod(g.ways)
    own = _own_part(machine, g)
    below = [math.prod(g.ways[:l]) for l in range(len(g.ways))]
    # Flat: one ring (per device below, each with its share of the bytes) goes through all devices. A byte makes
    # total - 1 hops, of which (w - 1) * (ways above) are at a level; Patarasuk & Yuan 2009.
    hops = sum((g.ways[l] - 1) * math.prod(g.ways[l + 1 :]) * a.step_s[l] for l in levels)
    out = [
        (
            a.launch_s + passes * hops,
            own + passes * (total - 1) / total * max(spb[l] / below[l] for l in levels),
        )
    ]
    if len(levels) > 1 and not flat:
        # Level by level: a reduce-scatter inside comes first, so that a level sees 1 / below of the bytes. There is one
        # call per level and pass, but the outermost all-reduce is a single call.
        calls = passes * (len(levels) - 1) + 1
        out.append(
            (
                calls * a.launch_s + passes * sum((g.ways[l] - 1) * a.step_s[l] for l in levels),
                own + passes * sum((g.ways[l] - 1) / g.ways[l] / below[l] * spb[l] for l in levels),
            )
        )
    if len(levels) > 1 and all(machine.levels[l].topology == "torus" for l in levels):
        # The dims of a torus have separate links: part p of the bytes starts with dim p.
        beta = 0.0
        for stage in range(len(levels)):
            slowest = 0.0
            for part in range(len(levels)):
                order = levels[part:] + levels[:part]
                done = math.prod(g.ways[l] for l in order[:stage])
                w = g.ways[order[stage]]
                slowest = max(slowest, (w - 1) / w / done * spb[order[stage]] / len(levels))
            beta += slowest
        alpha = a.launch_s + passes * len(levels) * max((g.ways[l] - 1) * a.step_s[l] for l in levels)
        out.append((alpha, passes * beta))
    return out


def _tree(a: Algorithm, machine: Machine, g: DeviceGroup) -> list[tuple[float, float]]:
    """An all-reduce up and down a pipelined (double binary) tree, which is a chain on the innermost levels."""
    spb = _seconds_per_byte(machine, g, a)
    depth, beta, below = 0.0, 0.0, 1
    for l, w in enumerate(g.ways):
        if w > 1:
            depth += (w - 1 if l < a.chain_levels else math.ceil(math.log2(w))) * a.step_s[l]
            beta = max(beta, 2 * spb[l] / below)
        below *= w
    return [(a.launch_s + 2 * depth, beta)]


def _one_shot(a: Algorithm, machine: Machine, g: DeviceGroup, share: float) -> list[tuple[float, float]]:
    """Every device sends ``share`` of its bytes to each peer at once. Only for switches."""
    if any(machine.levels[l].topology == "torus" for l, w in enumerate(g.ways) if w > 1):
        return []
    spb = _seconds_per_byte(machine, g, a)
    total, below, beta = math.prod(g.ways), 1, 0.0
    for l, w in enumerate(g.ways):
        if w > 1:
            beta = max(beta, (total - below) * share * spb[l])
        below *= w
    return [(a.launch_s + max(s for s, w in zip(a.step_s, g.ways, strict=True) if w > 1), beta)]


def _all_to_all(a: Algorithm, machine: Machine, g: DeviceGroup, copies: float) -> list[tuple[float, float]]:
    """Each device sends 1/total of its bytes to each peer. The slowest crossing determines the time.

    copies: of each item in these bytes, for uniformly random peers. A library that sends an item ``once`` to each of n
    units sends n (1 - (1 - 1/n)^copies) of them.
    """
    spb = _seconds_per_byte(machine, g, a)
    total, below, alpha, beta = math.prod(g.ways), 1, a.launch_s, 0.0
    for l, w in enumerate(g.ways):
        if w > 1:
            alpha += math.ceil((below * w - below) / a.peers_at_once) * a.step_s[l]
            if machine.levels[l].topology == "torus":
                # The middle link is the bottleneck: half of the line's devices send to the other half.
                crossing = (w // 2) * (w - w // 2) / w
            else:
                crossing = (total - below) / total
            units = total / below
            sent = units * (1 - (1 - 1 / units) ** copies) / copies if a.once else 1.0
            beta = max(beta, crossing * sent * spb[l])
        below *= w
    return [(alpha, beta + _own_part(machine, g))]


def _permute(a: Algorithm, machine: Machine, g: DeviceGroup) -> list[tuple[float, float]]:
    """Each device sends its bytes to one other device, possibly across the slowest level."""
    spb = _seconds_per_byte(machine, g, a)
    used = [l for l, w in enumerate(g.ways) if w > 1]
    return [(a.launch_s + max(a.step_s[l] for l in used), max(spb[l] for l in used))]


def _broadcast(a: Algorithm, machine: Machine, g: DeviceGroup) -> list[tuple[float, float]]:
    """A pipelined chain through all devices: each receives the tensor and passes it on.

    Rings run in parallel, one per device below a level, so that a level sees its share of the bytes.
    """
    spb = _seconds_per_byte(machine, g, a)
    hops, beta, below = 0.0, 0.0, 1
    for l, w in enumerate(g.ways):
        if w > 1:
            hops += (w - 1) * math.prod(g.ways[l + 1 :]) * a.step_s[l]
            beta = max(beta, spb[l] / below)
        below *= w
    return [(a.launch_s + hops, beta)]


def _in_network(a: Algorithm, machine: Machine, g: DeviceGroup) -> list[tuple[float, float]]:
    """An all-reduce by the switches of the innermost level: the tensor goes up once, and its sum comes down at the same
    time. The bytes therefore do not grow with the ways: n bytes, where a ring sends 2 (w - 1) / w of n.

    Between switches, sums go up and down a tree, to which each device below a switch lends its link. Two switches
    exchange their sums, so a link carries them once each way; in a larger tree, it carries two children's.
    """
    used = [l for l, w in enumerate(g.ways) if w > 1]
    if used[0] != 0 or any(machine.levels[l].topology == "torus" or not a.step_s[l] for l in used):
        return []
    spb = _seconds_per_byte(machine, g, a)
    alpha, beta, below = a.launch_s + a.step_s[0], spb[0], g.ways[0]
    for l in used[1:]:
        alpha += 2 * math.ceil(math.log2(g.ways[l])) * a.step_s[l]
        beta = max(beta, (1 if g.ways[l] == 2 else 2) * spb[l] / below)
        below *= g.ways[l]
    return [(alpha, beta)]


def _algorithm_lines(
    a: Algorithm, kind: CollectiveKind, machine: Machine, g: DeviceGroup, flat: bool, copies: float
) -> list[tuple[float, float]]:
    if (a.kinds and kind not in a.kinds) or math.prod(g.ways) < a.least_ways:
        return []
    match a.algorithm, kind:
        case "ring", "all_reduce":
            return _ring(a, machine, g, 2, flat)
        case "ring", "reduce_scatter" | "all_gather":
            return _ring(a, machine, g, 1, flat)
        case "tree", "all_reduce":
            return _tree(a, machine, g)
        case "one_shot", "all_reduce":
            return _one_shot(a, machine, g, 1.0)
        case "one_shot", "reduce_scatter" | "all_gather":
            return _one_shot(a, machine, g, 1.0 / math.prod(g.ways))
        case "ring", "broadcast":
            return _broadcast(a, machine, g)
        case "in_network", "all_reduce":
            return _in_network(a, machine, g)
        case "direct", "all_to_all":
            return _all_to_all(a, machine, g, copies)
        case "direct", "permute":
            return _permute(a, machine, g)
    return []


def _best_lines(
    kind: CollectiveKind, machine: Machine, g: DeviceGroup, flat: bool, copies: float
) -> list[tuple[float, float]]:
    return _undominated(
        [line for a in algorithms(machine) for line in _algorithm_lines(a, kind, machine, g, flat, copies)]
    )


def _undominated(found: list[tuple[float, float]]) -> list[tuple[float, float]]:
    kept: list[tuple[float, float]] = []
    for alpha, beta in sorted(set(found)):
        if not kept or beta < kept[-1][1]:
            kept.append((alpha, beta))
    return kept


def lines(
    kind: CollectiveKind, machine: Machine, g: DeviceGroup, *, flat: bool = False, copies: float = 1.0
) -> np.ndarray:
    """float64 [n, 2]: (alpha in s, beta in s per byte) of the algorithms that are best for some size, with rising
    alpha.

    flat: whether a ring goes through all devices, as one call of NCCL does. Otherwise rings also run level by level,
        with several calls. copies: of each item in the bytes of an all-to-all; see ``Analytic``.

    The cost is the minimum over n of alpha + beta * bytes, with bytes as in ``CostModel.collective``.
    """
    if math.prod(g.ways) == 1:
        return np.zeros((1, 2))
    found = _best_lines(kind, machine, g, flat, copies)
    if kind in ("all_reduce", "broadcast"):
        # A reduce-scatter (or scatter) followed by an all-gather does the same, so the cost is at most theirs.
        first, second = (_best_lines(k, machine, g, flat, copies) for k in ("reduce_scatter", "all_gather"))
        found += [(a1 + a2, b1 + b2) for a1, b1 in first for a2, b2 in second]
    if not found:
        raise PaseError(
            f"it has no algorithm for {kind} over ways {list(g.ways)}",
            where=f"machine {machine.name}",
            fix="add an [[algorithms]] entry for it, or remove all entries to use the defaults",
        )
    return np.array(_undominated(found))
