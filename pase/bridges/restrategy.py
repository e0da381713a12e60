"""What if a traced run had another strategy: the measured step, scaled by what is predicted of the two layouts.

A trace of one strategy does not show another's ops. What can be said is a ratio: for compute, and for each kind of
collective, what the other layout is predicted to take, over what this one is. Measured durations are scaled by it; so
what a prediction is off by, as long as it is off alike for both, cancels. The launching threads stay as measured. A
kind of collective that the run does not have is added at its predicted time, scaled as the others were measured, as if
nothing hid it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.files.json_values import JsonObject

if TYPE_CHECKING:
    from pase.api import Plan
    from pase.replay.graph import DataflowGraph
    from pase.replay.reports.report import Rewrite
    from pase.replay.types import Timeline

__all__ = ["by_prediction", "by_ratio", "predicted"]


def predicted(plan: Plan) -> dict[str, float]:
    """Predicted cost of a step on a device, in the plan's unit: "compute" (with the update), and each collective."""
    out = {"compute": plan.compute}
    for c in plan.collectives:
        out[c.kind] = out.get(c.kind, 0.0) + c.cost
    return out


def by_prediction(now: Path, other: Path) -> Rewrite:
    """The step that the other layout predicts, in place of the one that ``now`` does: nothing is measured."""
    _, b = _pair(now, other)

    def change(_: Timeline, __: DataflowGraph) -> tuple[DataflowGraph, JsonObject]:
        from pase.replay import estimate, measure

        if b.timeline is None:
            raise PaseError(
                f"{other}: no collective on a parameter: this plan has no scheduled step to compare with"
            )
        m = measure(b.timeline)
        note = "predicted against predicted: both steps are what the cost model says, nothing is measured"
        return estimate(m, m.steady()), {"method": "prediction", "note": note}

    return change


def by_ratio(now: Path, other: Path) -> Rewrite:
    """The measured graph, its durations times predicted(other) / predicted(now), by kind.

    The batch may be another one: what grows with it is what the two predictions say. PaseError where the two layouts
    are not of the same parameters, machine, number of devices, cost model and optimizer, or where the run has
    collectives of a kind of which the layout it is said to have has none.
    """
    a, b = _pair(now, other)
    ours, theirs = predicted(a), predicted(b)

    def change(t: Timeline, g: DataflowGraph) -> tuple[DataflowGraph, JsonObject]:
        return _scaled(g, ours, theirs, a.unit, str(now))

    return change


def _pair(now: Path, other: Path) -> tuple[Plan, Plan]:
    from pase.api import load

    a, b = load(now), load(other)
    weights = [{k: (tuple(t.shape), t.dtype) for k, t in p.parameters.items()} for p in (a, b)]
    if weights[0] != weights[1]:
        lacks = sorted(set(weights[0].items()) ^ set(weights[1].items()))[0][0]
        raise PaseError(
            f"{now} and {other} are not of one model: parameter '{lacks}' differs. The batch may differ, the "
            "parameters may not"
        )
    for what in ("devices", "machine_digest", "cost_model", "unit", "optimizer"):
        x, y = getattr(a, what), getattr(b, what)
        if x != y:
            raise PaseError(
                f"{now} and {other} differ in {what.replace('_', ' ')} ({x}, {y}), so "
                "their predictions cannot be compared"
            )
    return a, b


def _scaled(
    g: DataflowGraph, now: Mapping[str, float], other: Mapping[str, float], unit: str, where: str
) -> tuple[DataflowGraph, JsonObject]:
    from pase.replay.types import COLLECTIVE, OPERATIONS, on_stream

    comm = g.kind == COLLECTIVE
    compute = on_stream(g.kind) & ~comm
    duration = g.duration_ns.copy()
    ratios = {"compute": _ratio(now["compute"], other["compute"])}
    duration[compute] *= ratios["compute"]
    measured_s = 0.0
    ranks = max(1, len(set(g.rank[comm].tolist())))
    for kind in sorted({OPERATIONS[int(k)] for k in g.operation[comm]}):
        mine = comm & (g.operation == OPERATIONS.index(kind))
        if kind not in now:
            # A barrier or a broadcast of the framework's own: no strategy's doing.
            if kind in other:
                raise PaseError(
                    f"{where}: the run has {kind} collectives, but this layout predicts "
                    "none, so it is not the run's layout"
                )
            continue
        ratios[kind] = _ratio(now[kind], other.get(kind, 0.0))
        measured_s += float(duration[mine].sum()) / 1e9 / ranks
        duration[mine] *= ratios[kind]
    known = sum(now[k] for k in ratios if k != "compute")
    added = sum(v for k, v in other.items() if k not in now)
    if added and not known and unit != "s":
        raise PaseError(
            f"costs in {unit} cannot be added to a measured time, and no collective shows the scale"
        )
    added_s = added * (measured_s / known if known else 1.0)
    said = ", ".join(f"{k} ×{v:.3g}" for k, v in ratios.items())
    note = f"a prediction by ratio, not a replay of the other strategy: {said}"
    unseen = sorted(k for k in now if k != "compute" and k not in ratios)
    if unseen:
        note += f"; {', '.join(unseen)}, predicted of the run's layout, are not in the trace: left out"
    if added_s:
        kinds = ", ".join(sorted(k for k in other if k not in now))
        note += f"; {kinds}, which the run has not: {added_s * 1e3:.3f} ms, counted as exposed"
    return replace(g, duration_ns=duration), {
        "method": "ratio",
        "ratios": ratios,
        "added_s": added_s,
        "note": note,
    }


def _ratio(now: float, other: float) -> float:
    return other / now if now > 0 else 1.0
