"""Corrects a machine by a run's traces: tables of collectives, and the rates of products and light ops.

A collective's cost counts from the arrival of its last rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.machine import COLLECTIVES, CollectiveCurve, CostModel, Curve, Machine, level_ways

if TYPE_CHECKING:
    from pase.replay.types import Timeline

__all__ = ["curves_of", "with_traces"]

_FEWEST = 3
_WARM_S = 5.0
"""A card reaches its power limit within seconds."""


def _ways(ranks: tuple[int, ...], full: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns a group's number of ranks along each level (innermost level fastest); None if it does not span a box.

    >>> _ways((0, 2), (2, 2)), _ways((0, 1, 2, 3), (2, 2)), _ways((0, 3), (2, 2))
    ((1, 2), (2, 2), None)
    """
    out, unit = [], 1
    for w in full:
        out.append(len({r // unit % w for r in ranks}))
        unit *= w
    return tuple(out) if math.prod(out) == len(ranks) > 1 else None


def curves_of(timeline: Timeline, machine: Machine) -> tuple[tuple[CollectiveCurve, ...], JsonObject]:
    """Returns the curves of an aligned timeline's collectives, by kind and ways, and counts of what was left out.

    A collective's cost counts from its last rank's start to its last rank's end, because waiting for a late rank is not
    a cost of the link. Each size has the median of at least three instances, and a curve has at least two sizes.
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
            # Other traffic of the run disturbs its collectives, so a decrease between two sizes is noise.
            seconds = np.maximum.accumulate([float(np.median(kept[n])) for n in order])
            curve = Curve(nbytes=tuple(map(float, order)), seconds=tuple(map(float, seconds)))
            curves.append(CollectiveCurve(kind=kind, ways=ways, curve=curve))  # type: ignore[arg-type]
    return tuple(curves), {"left_out": {k: v for k, v in left.items() if v}}


def with_traces(
    machine: Machine, traces: Path, name: str, model: Callable[[Machine], CostModel] | None = None
) -> tuple[Machine, JsonObject]:
    """Returns the machine with what the traces say, and what was taken and left out.

    Collectives replace those that have the same kind and ways. model: makes the cost model that predicts with a
    machine; with it, the rates of products and light ops are corrected, too (``trace_rates``).

    Raises PaseError if the traces say nothing of collectives or rates.
    """
    from pase.calibrate.trace_rates import Corrected, corrected
    from pase.replay import align, load, measure
    from pase.replay.measurement.spending import spendings

    timeline = align(load(traces))
    curves, told = curves_of(timeline, machine)
    done: list[Corrected] = []
    left: dict[str, str] = {}
    if model is not None:
        machine, done, left = corrected(machine, spendings(measure(timeline)), model)
    if not curves and not done:
        raise PaseError(
            "no kind of collective was traced on all of its ranks at two sizes, three times each (left out: "
            f"{told['left_out'] or 'nothing, because there are no collectives'}), and no rate could be corrected"
            + (f" ({'; '.join(f'{k}: {v}' for k, v in left.items())})" if left else ""),
            where=str(traces),
            fix="trace more ranks and iterations, with record_shapes in PyTorch",
        )
    sources, provenance = dict(machine.sources), dict(machine.provenance)
    if curves:
        taken = {(c.kind, c.ways) for c in curves}
        kept = tuple(c for c in machine.collectives if (c.kind, c.ways) not in taken)
        curves = tuple(sorted((*kept, *curves), key=lambda c: (c.kind, c.ways)))
        sources["collectives"] = f"traces in {traces.name}, median of end minus latest start"
        provenance["collectives from"] = f"{traces.name}, {len(timeline.ranks)} ranks"
    if done:
        provenance["rates from"] = f"{traces.name}: " + ", ".join(
            f"{c.figure} {c.before:.3g} -> {c.after:.3g}" for c in done
        )
    merged = dataclasses.replace(
        machine, name=name, collectives=curves or machine.collectives, sources=sources, provenance=provenance
    )
    notes = []
    span_s = float(timeline.end_ns.max() - timeline["start_ns"].min()) / 1e9
    if done and span_s < _WARM_S:
        notes.append(
            f"the trace is {span_s:.2g} s long; a card that has reached its power limit multiplies more slowly"
        )
    return merged, {
        **told,
        "notes": notes,
        "rates": [dataclasses.asdict(c) for c in done],
        "rates_left": left,
    }
