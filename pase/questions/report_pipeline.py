"""The parts of a report for a pipelined plan: a table of the stages, and a drawing of the schedule by rank."""

from __future__ import annotations

from html import escape

from pase.files.json_values import JsonObject
from pase.pages.parts import bar, table
from pase.pages.streams import StreamBox, drawn_streams
from pase.pipeline.types import Kind
from pase.plan.pipeline import unequal
from pase.plan.stage_timeline import action_name, simulated_stages
from pase.plan.table import bytes_text, cost_text
from pase.plan.types import PlanData

__all__ = ["drawn_schedule", "stages_data", "stages_table"]

_MOST_STAGES = 20


def stages_table(plan: PlanData) -> str:
    """An HTML table with a row for each stage: its rank, devices, blocks, seconds per micro-batch and memory.

    Empty if the plan has no stages.
    """
    p = plan.pipeline
    if p is None:
        return ""
    each = plan.mesh.devices
    most = max(s.forward_s + s.backward_s for s in p.stages)
    rows = [
        (
            str(k),
            p.rank_name(s.rank).removeprefix("rank "),
            f"{s.rank * each} to {(s.rank + 1) * each - 1}",
            str(s.blocks),
            cost_text(s.forward_s, plan.unit),
            cost_text(s.backward_s, plan.unit) + (", recomputes" if s.recomputes else ""),
            bytes_text(s.memory_bytes),
            bar([("compute", s.forward_s), ("backward", s.backward_s)], most),
        )
        for k, s in enumerate(p.stages)
    ]
    head = ["stage", "rank", "devices", "blocks>", "forward>", "backward>", "rank's memory>", "|"]
    shares = "".join(f"<p class='soft'>{escape(line)}</p>" for line in unequal(p, plan.cost))
    out = f"<h3>{escape(str(p))}</h3>{shares}" + table("Stages", head, rows[:_MOST_STAGES])
    if len(rows) > _MOST_STAGES:
        rest = table("The other stages", head, rows[_MOST_STAGES:])
        out += f"<details><summary>{len(rows) - _MOST_STAGES} more stages</summary>{rest}</details>"
    return out


def stages_data(plan: PlanData) -> JsonObject | None:
    """Data about the stages for the map of devices: the rank, the split and the nodes of each. None if there are no
    stages."""
    p = plan.pipeline
    if p is None:
        return None
    number = {n.name: i for i, n in enumerate(plan.nodes)}
    return {
        "ranks": p.degree,
        "list": [{"rank": s.rank, "blocks": s.blocks, "splits": s.strategy} for s in p.stages],
        # Only the splits that differ from the plan's own, because most nodes are split equally in all stages.
        "splits": [
            {
                number[name]: split
                for name, split in strategy.items()
                if name in number and split != plan.nodes[number[name]].split
            }
            for strategy in p.strategies
        ],
        "of": {number[name]: list(stages) for name, stages in p.stages_of.items() if name in number},
    }


def drawn_schedule(plan: PlanData) -> JsonObject | None:
    """The schedule for the timeline widget: one stream for each rank, with its micro-batches.

    None if ``simulated_stages`` is None.
    """
    stages = simulated_stages(plan)
    if stages is None:
        return None
    p = stages.pipeline
    streams: dict[str, list[StreamBox]] = {p.rank_name(r): [] for r in range(p.degree)}
    for a, rank, start, end in stages.actions():
        drawn = 0 if a.kind is Kind.FORWARD else 2 if a.kind is Kind.WEIGHT else 1
        box = StreamBox(label=action_name(a), kind=drawn, start_ns=start, length_ns=end - start)
        streams[p.rank_name(rank)].append(box)
    for name, rank, start, end in stages.hoisted():
        box = StreamBox(label=name, kind=3, start_ns=start, length_ns=end - start)
        streams[p.rank_name(rank)].append(box)
    return drawn_streams(
        "Schedule of the stages",
        streams,
        [
            ("forward", "compute"),
            ("backward", "backward"),
            ("weights' gradients", "weights"),
            ("hoisted, once a step", "update"),
        ],
        end_ns=round(stages.done.step_s * 1e9),
        narrow=16,
        hint=f"{p}: {cost_text(stages.done.step_s, 's')}. Boxes show the micro-batch. Click one, or use the arrow "
        "keys, to read it; drag to move; Ctrl and the wheel, or two fingers, zoom.",
    )
