"""A pipelined plan in a report: its stages with their ranks, and a drawing of the schedule, rank by rank."""

from __future__ import annotations

from html import escape

import numpy as np

from pase.files.json_values import JsonObject
from pase.pages.parts import bar, table
from pase.pages.streams import StreamBox, drawn_streams
from pase.pipeline.order import order_of
from pase.pipeline.registry import schedule
from pase.pipeline.simulate import simulate
from pase.pipeline.types import Kind, StageTimes
from pase.plan.pipeline import PipelinePlan
from pase.plan.table import bytes_text, cost_text
from pase.plan.types import PlanData

__all__ = ["drawn_schedule", "stages_table"]

_WORDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "backward, inputs"} | {
    Kind.WEIGHT: "backward, weights"
}
_MOST_ACTIONS = 60_000


def stages_table(plan: PlanData) -> str:
    """A row for each stage: its rank, devices, blocks, seconds of a micro-batch and memory. HTML; empty without
    stages."""
    p = plan.pipeline
    if p is None:
        return ""
    each = plan.mesh.devices
    most = max(s.forward_s + s.backward_s for s in p.stages)
    rows = (
        (
            str(k),
            f"{s.rank}",
            f"{s.rank * each} to {(s.rank + 1) * each - 1}",
            str(s.blocks),
            cost_text(s.forward_s, plan.unit),
            cost_text(s.backward_s, plan.unit) + (", recomputes" if s.recomputes else ""),
            bytes_text(s.memory_bytes),
            bar([("compute", s.forward_s), ("backward", s.backward_s)], most),
        )
        for k, s in enumerate(p.stages)
    )
    head = ["stage", "rank", "devices", "blocks>", "forward>", "backward>", "rank's memory>", "|"]
    return f"<h3>{escape(str(p))}</h3>" + table("Stages", head, rows)


def _times(p: PipelinePlan) -> StageTimes | None:
    """The stages' seconds; None for layouts written before they were stored."""
    parts = [(s.weight_s, s.again_s, s.send_s) for s in p.stages]
    if not p.before_s or any(x is None for part in parts for x in part):
        return None
    weight, again, send = np.array(parts, dtype=float).T
    backward = np.array([s.backward_s for s in p.stages])
    return StageTimes(
        forward=np.array([s.forward_s for s in p.stages]),
        input=backward - weight - again,
        weight=weight,
        again=again,
        send=send[:-1],
        before=np.array(p.before_s),
        after=np.array(p.after_s),
    )


def drawn_schedule(plan: PlanData) -> JsonObject | None:
    """The schedule for the timeline widget: one stream for each rank, with the micro-batches that it works on. None
    without stages, for older layouts, and for schedules with too many actions to draw."""
    p = plan.pipeline
    times = None if p is None else _times(p)
    if p is None or times is None:
        return None
    listed = schedule(p.schedule, p.degree, p.micro_batches, p.chunks)
    order = order_of(listed)
    if order.kind.size > _MOST_ACTIONS:
        return None
    done = simulate(listed, times)
    streams: dict[str, list[StreamBox]] = {f"rank {r}": [] for r in range(p.degree)}
    for i, (kind, stage, micro, rank) in enumerate(
        zip(order.kind.tolist(), order.stage.tolist(), order.micro.tolist(), order.rank.tolist(), strict=True)
    ):
        start, end = round(done.start[i] * 1e9), round(done.end[i] * 1e9)
        label = f"micro-batch {micro}: {_WORDS[Kind(kind)]}, stage {stage}"
        drawn = 0 if kind == Kind.FORWARD else 2 if kind == Kind.WEIGHT else 1
        streams[f"rank {rank}"].append(
            StreamBox(label=label, kind=drawn, start_ns=start, length_ns=end - start)
        )
    for r in range(p.degree):
        for name, begin, seconds in (
            ("before the first micro-batch", 0.0, p.before_s[r]),
            (
                "after the last micro-batch: sums of gradients, the update",
                done.end[order.last[r]],
                p.after_s[r],
            ),
        ):
            if seconds:
                box = StreamBox(
                    label=name, kind=3, start_ns=round(begin * 1e9), length_ns=round(seconds * 1e9)
                )
                streams[f"rank {r}"].append(box)
    return drawn_streams(
        "Schedule of the stages",
        streams,
        [
            ("forward", "compute"),
            ("backward", "backward"),
            ("weights' gradients", "activations"),
            ("once a step", "update"),
        ],
        end_ns=round(done.step_s * 1e9),
        hint=f"{p}: {cost_text(done.step_s, 's')}. Click a box, or use the arrow keys, to read it; drag to move; Ctrl "
        "and the wheel, or two fingers, zoom.",
    )
