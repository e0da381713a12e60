"""``pase explain``: shows the cause of every second and byte of a layout, and the cost of the alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import (
    ChoicesTimeLimit,
    JsonOption,
    LayoutFile,
    LayoutMachine,
    LayoutModel,
    StrictOption,
    print_json,
    progress,
    strictly,
    warn_misfit,
)
from pase.files.codec import to_tree
from pase.files.terminal import console
from pase.plan.pipeline import lines as stage_lines

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from pase.files.terminal import Console
    from pase.plan.types import PlanData
    from pase.questions.explain import Alternative, Explanation, LayerReport

__all__ = ["explain", "summary"]

PURPOSE = "Plan"


def explain(
    layout: LayoutFile,
    layer: Annotated[
        str | None,
        typer.Option("--layer", "-l", help="Report on this layer in full. Takes a name from the tables."),
    ] = None,
    model: LayoutModel = None,
    machine: LayoutMachine = None,
    time_limit: ChoicesTimeLimit = 20.0,
    every: Annotated[
        bool, typer.Option("--all", help="With --layer: list every way to split it, not only the 12 best.")
    ] = False,
    json: JsonOption = False,
    strict: StrictOption = False,
) -> None:
    """Show where the time and memory of a layout go, and why.

    Without --layer, prints every cause of time (products, gathers of parameters, sums of gradients, ...). For each
    layer, it prints the cost of the best strategy that splits this layer differently.

    With --layer, prints the layer's work on one device, each collective with its reason, the bytes that the layer
    keeps, and every other way to split it. Each alternative has the cost of the best complete strategy around it. This
    cost is exact, not an estimate from this layer alone.

    \b
    Examples:
      pase explain layout.json
      pase explain layout.json --layer blocks.ff.w1:dot
    """
    from pase.api import load
    from pase.questions.explain import explain as explained

    with progress() as say:
        e = explained(load(layout), layer, model=model, machine=machine, time_limit=time_limit, progress=say)
    if json:
        print_json(summary(e))
        warn_misfit(e.plan)
        strictly(e.plan.sound, strict)
        return
    c = console()
    if e.layer is None:
        _overview(e, c)
    else:
        warn_misfit(e.plan)
        for line in stage_lines(e.plan):
            c.print(line)
        _layer(e, e.layer, c, None if every else 12)
    if e.remark:
        c.print(e.remark)
    strictly(e.plan.sound, strict)


def summary(e: Explanation) -> dict[str, object]:
    """The object that --json prints."""
    out: dict[str, object] = {
        "model": e.plan.model,
        "cost": e.plan.cost,
        "unit": e.plan.unit,
        "pipeline": None if e.plan.pipeline is None else to_tree(e.plan.pipeline),
        "causes": [
            {"group": c.group, "what": c.what, "cost": c.cost, "bytes": c.nbytes, "count": c.count}
            for c in e.causes
        ],
        "memory_bytes": {
            k: getattr(e.plan.memory, k)
            for k in ("parameters", "gradients", "optimizer", "activations", "buffers", "total")
        },
        "layers": [
            {
                "name": n.name,
                "compute": n.cost.compute,
                "communication": n.cost.communication,
                "update": n.cost.update,
                "next_best": e.next_best.get(n.name),
            }
            for n in e.plan.nodes
        ],
        "unfused": [
            {
                "layers": list(u.layers),
                "source": str(u.source),
                "cost": u.cost,
                "fused": u.fused,
                "kept_bytes": u.kept,
            }
            for u in e.unfused
        ],
        "unaligned": [
            {
                "layer": u.layer,
                "source": str(u.source),
                "sizes": {d: list(sizes) for d, sizes in u.sizes.items()},
                "cost": u.cost,
                "padded": u.padded,
            }
            for u in e.unaligned
        ],
        "remark": e.remark,
        "remarks": [r.to_json() for r in e.plan.noted],
    }
    if e.layer is not None:
        out["layer"] = _layer_summary(e.layer)
    return out


def _layer_summary(r: LayerReport) -> dict[str, object]:
    return {
        "name": r.node.name,
        "op": r.node.op,
        "einsum": r.node.einsum,
        "times": r.node.times,
        "sizes": dict(r.node.sizes),
        "local": dict(r.local),
        "split": {d: list(axes) for d, axes in r.node.split.items()},
        "work": [
            {
                "phase": w.phase,
                "kind": w.kind,
                "dtype": w.dtype,
                "flops": w.flops,
                "bytes": w.nbytes,
                "mnk": None if w.mnk is None else list(w.mnk),
                "times": w.times,
                "cost": w.cost,
                "of_peak_flops": w.achieved_flops,
                "of_memory_bandwidth": w.achieved_bytes,
            }
            for w in r.work
        ],
        "collectives": [
            {
                "kind": c.kind,
                "tensor": c.tensor,
                "axes": list(c.axes),
                "bytes": c.nbytes,
                "times": c.times,
                "phase": c.phase,
                "from": c.source,
                "cost": c.cost,
                "why": reason,
            }
            for c, reason in r.collectives
        ],
        "holds_bytes": dict(r.holds),
        "alternatives": [
            {
                "split": {d: list(axes) for d, axes in a.split.items()},
                "ways": dict(a.ways),
                "cost": a.cost if a.cost < float("inf") else None,
                "chosen": a.chosen,
            }
            for a in r.alternatives
        ],
    }


def _table(*columns: str) -> RichTable:
    """A rich table. A column whose name ends in '>' is aligned to the right."""
    from rich.table import Table

    out = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        out.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    return out


def _overview(e: Explanation, c: Console) -> None:
    from pase.compiler.unfused import unfused_text
    from pase.plan.answer import split_text
    from pase.plan.table import bytes_text, cost_text, headline, layer_rows
    from pase.questions.explain import whole_time

    plan = e.plan
    for line in headline(plan):
        c.print(line)
    c.print()
    whole = whole_time(e.causes)
    table = _table("where the time goes", "time>", "share>", "bytes a device>", "collectives>")
    for x in e.causes:
        moved = x.group == "communication" and x.cost > 0
        table.add_row(
            x.what,
            cost_text(x.cost, plan.unit),
            f"{x.cost / whole:.1%}" if x.cost > 0 else "",
            bytes_text(x.nbytes) if moved else "",
            str(x.count) if moved else "",
        )
    if plan.hidden:
        table.add_row("the step", cost_text(plan.cost, plan.unit), "", "", "")
    c.print(table)
    c.print()
    table = _table("layer", "split", "time>", "share>", "best other split>")
    for row in sorted(layer_rows(plan.nodes, plan.mesh), key=lambda row: -row.total):
        first = row.nodes[0]
        other = e.next_best.get(first.name)
        if not row.total and other is None:
            continue
        table.add_row(
            row.title,
            split_text(first.split.items(), plan.mesh) or "-",
            cost_text(row.total, plan.unit),
            f"{row.total / whole:.1%}",
            "" if other is None else _against(other, plan.cost),
        )
    c.print(table)
    if e.unfused and e.problem is not None:
        c.print()
        c.print(unfused_text(e.plan, e.problem, e.unfused))
    if e.unaligned:
        c.print()
        c.print(_paddable(e))


def _paddable(e: Explanation) -> str:
    """A sentence about what aligned rows of products would save, and at which sizes."""
    from pase.plan.table import cost_text

    saved = sum(u.cost - u.padded for u in e.unaligned)
    places = "; ".join(
        f"{u.layer}: {', '.join(f'{d} {old:,} → {new:,}' for d, (old, new) in u.sizes.items())}"
        for u in e.unaligned[:3]
    )
    more = f"; and {len(e.unaligned) - 3} others" if len(e.unaligned) > 3 else ""
    return (
        f"rows of some products are no multiple of 16 bytes on a device, and a GPU copies them more slowly: with "
        f"larger sizes, products would take {cost_text(saved, e.plan.unit)} less ({saved / e.plan.cost:.0%} of the "
        f"step). {places}{more}"
    )


def _against(cost: float, ours: float) -> str:
    if cost == float("inf"):
        return "impossible"
    more = cost / ours - 1 if ours else 0.0
    if abs(more) < 5e-7:
        return "the same"
    return f"{more:+.2%}" if abs(more) >= 1e-4 else f"{'+' if more > 0 else '-'}0.01%"


def _split(split: Mapping[str, Sequence[str]]) -> str:
    return "  ".join(f"{d}:{'·'.join(axes)}" for d, axes in split.items()) or "-"


def _layer(e: Explanation, r: LayerReport, c: Console, most: int | None) -> None:
    from pase.plan.table import bytes_text, cost_text

    plan, n, unit = e.plan, r.node, e.plan.unit

    def say(text: str) -> None:
        c.print(text)

    say(f"{n.name}: {n.op}  {n.einsum}" + (f"   in {n.source}" if n.source else ""))
    say("sizes    " + "  ".join(f"{d}={s}" for d, s in n.sizes.items()) + f"   {n.times} times a step")
    say(
        "split    " + _split(n.split) + "   on a device  " + "  ".join(f"{d}={s}" for d, s in r.local.items())
    )
    say(
        f"costs    {cost_text(n.cost.total, unit)} of {cost_text(plan.cost, unit)}: "
        f"compute {cost_text(n.cost.compute, unit)} · communication {cost_text(n.cost.communication, unit)} · "
        f"update {cost_text(n.cost.update, unit)}"
    )
    if r.holds:
        held = [
            f"{k} {bytes_text(b)}" if b >= 0 else f"minus {bytes_text(-b)} that is counted at its readers"
            for k, b in r.holds.items()
        ]
        say("keeps    " + " · ".join(held) + " on a device")
    if r.work:
        c.print()
        c.print(_work_table(r, unit))
    if r.collectives:
        c.print()
        c.print(_collectives_table(r, plan))
    if r.alternatives:
        c.print()
        c.print(_alternatives(r.alternatives[:most], plan.cost, plan.unit))
        if most is not None and len(r.alternatives) > most:
            say(f"and {len(r.alternatives) - most} more expensive ones (--all)")


def _work_table(r: LayerReport, unit: str) -> RichTable:
    from pase.plan.table import bytes_text, cost_text

    table = _table(
        "work", "m n k", "FLOP>", "bytes>", "times>", "step>", "of peak FLOP/s>", "of memory bandwidth>"
    )
    for w in r.work:
        table.add_row(
            f"{w.phase} {w.kind} {w.rate}",
            "" if w.mnk is None else " ".join(f"{x:g}" for x in w.mnk),
            f"{w.flops:.4g}",
            bytes_text(w.nbytes),
            f"{w.times:g}",
            cost_text(w.cost, unit),
            "" if w.achieved_flops is None else f"{w.achieved_flops:.0%}",
            "" if w.achieved_bytes is None else f"{w.achieved_bytes:.0%}",
        )
    return table


def _collectives_table(r: LayerReport, plan: PlanData) -> RichTable:
    from pase.plan.table import bytes_text, cost_text

    table = _table("collective", "from", "over", "bytes>", "times>", "step>", "why")
    sizes = plan.mesh.by_name
    for m, reason in r.collectives:
        table.add_row(
            f"{m.kind.replace('_', '-')} {m.phase}",
            m.source,
            "·".join(f"{a}={sizes[a]}" for a in m.axes),
            bytes_text(m.nbytes),
            str(m.times),
            cost_text(m.cost, plan.unit),
            reason,
        )
    return table


def _alternatives(found: tuple[Alternative, ...], ours: float, unit: str) -> RichTable:
    from pase.plan.table import cost_text

    shown = _table("split this layer", "axes", "best strategy with it>", "against ours>")
    for a in found:
        ways = "  ".join(f"{d} {w} ways" for d, w in a.ways.items()) or "not at all"
        cost = "impossible" if a.cost == float("inf") else cost_text(a.cost, unit)
        shown.add_row(
            ways + ("  (chosen)" if a.chosen else ""), _split(a.split), cost, _against(a.cost, ours)
        )
    return shown
