"""Collective tables from a run's traces: what a collective cost once its last rank had come."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.machine import COLLECTIVES, CollectiveCurve, Curve, Machine, level_ways

if TYPE_CHECKING:
    from pase.replay.types import Timeline

__all__ = ["curves_of", "with_traces"]

_FEWEST = 3


def _ways(ranks: tuple[int, ...], full: tuple[int, ...]) -> tuple[int, ...] | None:
    """Ways of a group at each level, of ranks numbered with the innermost level fastest; None: no box of them.

    >>> _ways((0, 2), (2, 2)), _ways((0, 1, 2, 3), (2, 2)), _ways((0, 3), (2, 2))
    ((1, 2), (2, 2), None)
    """
    out, unit = [], 1
    for w in full:
        out.append(len({r // unit % w for r in ranks}))
        unit *= w
    return tuple(out) if math.prod(out) == len(ranks) > 1 else None


def curves_of(timeline: Timeline, machine: Machine) -> tuple[tuple[CollectiveCurve, ...], JsonObject]:
    """Median seconds by kind, ways and bytes of an aligned timeline's collectives, and what was left out.

    A collective costs from its last rank's start to its last rank's end: waiting for a late rank is the
    step's affair, not the link's. A size needs three instances, a curve two sizes.
    """
    from pase.replay.measurement.clocks import collective_costs
    from pase.replay.measurement.matching import match_collectives
    from pase.replay.types import OPERATIONS

    ranks = timeline.ranks
    full = level_ways(len(ranks), machine)
    matches, _ = match_collectives(timeline)
    found: dict[tuple[str, tuple[int, ...]], dict[int, list[float]]] = {}
    left = {
        "of another kind or of unknown size": 0,
        "seen by some of their ranks alone": 0,
        "over no whole levels": 0,
    }
    for match, cost in zip(matches, collective_costs(timeline, matches), strict=True):
        e = next(iter(match.members.values()))
        kind, nbytes = OPERATIONS[timeline["operation"][e]], int(timeline["nbytes"][e])
        members = timeline.groups[match.group].ranks if match.group >= 0 else ()
        members = members or tuple(match.members)
        if kind not in COLLECTIVES or nbytes <= 0 or cost["work_ns"] <= 0:
            left["of another kind or of unknown size"] += 1
        elif set(members) - set(match.members):
            left["seen by some of their ranks alone"] += 1
        elif (ways := _ways(tuple(ranks.index(r) for r in members), full)) is None:
            left["over no whole levels"] += 1
        else:
            found.setdefault((kind, ways), {}).setdefault(nbytes, []).append(cost["work_ns"] * 1e-9)
    curves = []
    for (kind, ways), sizes in sorted(found.items()):
        kept = {n: t for n, t in sizes.items() if len(t) >= _FEWEST}
        left["too few of their size or kind"] = left.get("too few of their size or kind", 0) + sum(
            len(t) for n, t in sizes.items() if n not in kept or len(kept) < 2
        )
        if len(kept) > 1:
            order = sorted(kept)
            # A run's own traffic blurs its collectives: a fall between two sizes is noise here.
            seconds = np.maximum.accumulate([float(np.median(kept[n])) for n in order])
            curve = Curve(nbytes=tuple(map(float, order)), seconds=tuple(map(float, seconds)))
            curves.append(CollectiveCurve(kind=kind, ways=ways, curve=curve))  # type: ignore[arg-type]
    return tuple(curves), {"left_out": {k: v for k, v in left.items() if v}}


def with_traces(machine: Machine, traces: Path, name: str) -> tuple[Machine, JsonObject]:
    """The machine with the collectives of these traces in place of its own of the same kind and ways."""
    from pase.replay import align, load

    timeline = align(load(traces))
    curves, told = curves_of(timeline, machine)
    if not curves:
        raise PaseError(
            f"{traces}: no kind of collective was seen by all of its ranks at two sizes, three times each; left "
            f"out: {told['left_out'] or 'nothing, there was none'}. Trace more ranks and iterations"
        )
    taken = {(c.kind, c.ways) for c in curves}
    kept = tuple(c for c in machine.collectives if (c.kind, c.ways) not in taken)
    sources = {**machine.sources, "collectives": f"traces in {traces.name}, median of end minus latest start"}
    merged = dataclasses.replace(
        machine,
        name=name,
        collectives=tuple(sorted((*kept, *curves), key=lambda c: (c.kind, c.ways))),
        sources=sources,
        provenance={**machine.provenance, "collectives from": f"{traces.name}, {len(timeline.ranks)} ranks"},
    )
    return merged, told
