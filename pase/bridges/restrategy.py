"""Estimates a traced run under another strategy, by scaling the measured step with the predictions for two layouts.

A trace of one strategy does not show the ops of another. For compute and for each kind of collective, the measured
durations are scaled by the ratio of the other layout's predicted time to this layout's. Prediction errors that both
layouts share cancel. Host launches stay as measured. If the other layout has a kind of collective that the run lacks,
its predicted time is scaled by the measured-to-predicted ratio of the other collectives and added as exposed time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.replay.changes.rewrite import Rewrite, Rewritten

if TYPE_CHECKING:
    from pase.api import Plan
    from pase.replay.graph import DataflowGraph
    from pase.replay.measurement.spending import Spending
    from pase.replay.reports.diagnose import MoreAdvice
    from pase.replay.reports.findings import Finding, Scene
    from pase.replay.types import Timeline

__all__ = ["as_advice", "by_prediction", "by_ratio", "predicted", "split_finding"]


def predicted(plan: Plan) -> dict[str, float]:
    """Returns the predicted cost per device and step in the plan's unit: "compute" (with the update), and each
    collective kind."""
    out = {"compute": plan.compute}
    for c in plan.collectives:
        out[c.kind] = out.get(c.kind, 0.0) + c.cost
    return out


def by_prediction(now: Path, other: Path) -> Rewrite:
    """Returns the rewrite that replaces the step predicted for ``now`` by that for ``other``. Nothing is measured."""
    _, b = _pair(now, other)

    def change(_: Timeline, __: DataflowGraph) -> Rewritten:
        from pase.replay import estimate, measure

        if b.timeline is None:
            raise PaseError(
                "no parameter has a collective, so this plan has no scheduled step to compare with",
                where=str(other),
            )
        m = measure(b.timeline)
        note = "predicted against predicted: both steps come from the cost model, nothing is measured"
        return Rewritten(graph=estimate(m, m.steady()), note=note, detail={"method": "prediction"})

    return change


def by_ratio(now: Path, other: Path) -> Rewrite:
    """Returns the rewrite that multiplies measured durations by predicted(other) / predicted(now), by kind.

    The two layouts may have different batches, because the predictions account for them. Raises PaseError if they
    differ in parameters, machine, number of devices, cost model or optimizer, or if the run has a kind of collective
    that ``now`` lacks and ``other`` has.
    """
    a, b = _pair(now, other)
    ours, theirs = predicted(a), predicted(b)

    def change(t: Timeline, g: DataflowGraph) -> Rewritten:
        return _scaled(g, ours, theirs, a.unit, str(now))

    return change


def as_advice(now: Path, others: Sequence[Path]) -> MoreAdvice:
    """Returns what ranks other splits of the run among the advice of ``diagnose_run``.

    now: the layout of the run. others: layouts of the same model and batch. Raises PaseError if they are not.
    """
    pairs = []
    for other in others:
        a, b = _pair(now, other)
        batches = [{k: (tuple(t.shape), t.dtype) for k, t in p.inputs.items()} for p in (a, b)]
        if batches[0] != batches[1]:
            raise PaseError(
                "the layouts are for different batches, so neither saves time of the other",
                where=f"{now} and {other}",
                fix="compile both for the run's batch, or ask pase replay --what-if strategy=",
            )
        pairs.append((other, predicted(a), predicted(b), a.unit))

    def look(s: Scene, spent: Sequence[Spending]) -> list[Finding]:
        if not spent:
            return []
        slowest = max(spent, key=lambda x: x.total_ns).rank
        return [split_finding(s, slowest, now, *pair) for pair in pairs]

    return look


def split_finding(
    s: Scene,
    rank: int,
    run: Path,
    other: Path,
    ours: Mapping[str, float],
    theirs: Mapping[str, float],
    unit: str,
) -> Finding:
    """Returns what another split saves, at most the time of this rank's ops that it removes less what it adds.

    ours, theirs: what the two layouts predict (``predicted``). A split that saves nothing is a finding without a cost,
    because it was asked for.
    """
    from pase.replay.reports.findings import Finding
    from pase.replay.types import on_stream

    g = s.graph
    changed = _scaled(g, ours, theirs, unit, str(run))
    added_ns = changed.added_s * 1e9
    less = np.where(g.rank == rank, g.duration_ns - changed.graph.duration_ns, 0.0)
    removed_ns = float(less[less > 0].sum())
    gain = s.saved(changed.graph, removed_ns) - added_ns
    if s.run.doubts:
        title = (
            f"What the split of {other.name} would save cannot be said: the replay of this run is not trusted"
        )
    elif gain > 0:
        title = f"Split the layers as in {other.name}"
    else:
        title = f"The split of {other.name} saves nothing here"
    return Finding(
        kind="split",
        title=title,
        detail=f"Measured times, {changed.note.removeprefix('a prediction by ratio, ')}.",
        cost_ns=min(max(gain, 0.0), max(removed_ns - added_ns, 0.0)),
        measured_ns=float(g.duration_ns[(g.rank == rank) & on_stream(g.kind)].sum()),
    )


def _pair(now: Path, other: Path) -> tuple[Plan, Plan]:
    from pase.api import load

    a, b = load(now), load(other)
    weights = [{k: (tuple(t.shape), t.dtype) for k, t in p.parameters.items()} for p in (a, b)]
    if weights[0] != weights[1]:
        lacks = sorted(set(weights[0].items()) ^ set(weights[1].items()))[0][0]
        raise PaseError(
            f"the layouts are of different models: parameter '{lacks}' differs",
            where=f"{now} and {other}",
            fix="give two layouts of one model (the batch may differ)",
        )
    for what in ("devices", "machine_digest", "cost_model", "unit", "optimizer"):
        x, y = getattr(a, what), getattr(b, what)
        if x != y:
            raise PaseError(
                f"the layouts differ in {what.replace('_', ' ')} ({x}, {y}), so their predictions cannot be compared",
                where=f"{now} and {other}",
                fix=f"compile both with the same {what.replace('_', ' ')}",
            )
    return a, b


def _scaled(
    g: DataflowGraph, now: Mapping[str, float], other: Mapping[str, float], unit: str, where: str
) -> Rewritten:
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
            # If neither layout has it, it is a barrier or broadcast of the framework and independent of the strategy.
            if kind in other:
                raise PaseError(
                    f"the run has {kind} collectives, but this layout predicts none, so it is not the run's layout",
                    where=where,
                    fix="give the layout that the run used",
                )
            continue
        ratios[kind] = _ratio(now[kind], other.get(kind, 0.0))
        measured_s += float(duration[mine].sum()) / 1e9 / ranks
        duration[mine] *= ratios[kind]
    known = sum(now[k] for k in ratios if k != "compute")
    added = sum(v for k, v in other.items() if k not in now)
    if added and not known and unit != "s":
        raise PaseError(
            f"costs in {unit} cannot be added to a measured time, and no measured collective gives the scale",
            where=where,
            fix="compile with a cost model that predicts seconds",
        )
    added_s = added * (measured_s / known if known else 1.0)
    said = ", ".join(f"{k} ×{v:.3g}" for k, v in ratios.items())
    note = f"a prediction by ratio, not a replay of the other strategy: {said}"
    unseen = sorted(k for k in now if k != "compute" and k not in ratios)
    if unseen:
        note += f"; predicted for the run's layout but not in the trace, so left out: {', '.join(unseen)}"
    if added_s:
        kinds = ", ".join(sorted(k for k in other if k not in now))
        note += f"; {kinds}, which the run does not have: {added_s * 1e3:.3f} ms, counted as exposed"
    detail: JsonObject = {"method": "ratio", "ratios": ratios, "added_s": added_s}
    return Rewritten(graph=replace(g, duration_ns=duration), added_s=added_s, note=note, detail=detail)


def _ratio(now: float, other: float) -> float:
    return other / now if now > 0 else 1.0
