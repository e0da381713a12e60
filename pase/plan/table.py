"""A plan as a table for people: a headline, a row per layer, and how parameters are stored."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pase.files.quantities import bytes_text
from pase.files.terminal import console
from pase.ir.blocks import hoisted_text, recompute_text
from pase.plan.pipeline import lines as stage_lines
from pase.plan.types import NodePlan, PlanData, TensorPlan

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from pase.files.terminal import Console

__all__ = [
    "as_html",
    "as_text",
    "bytes_text",
    "cost_text",
    "devices_text",
    "headline",
    "in_a_line",
    "layer_table",
    "misfit_text",
    "padding_text",
    "render",
    "storage_table",
]


def cost_text(cost: float, unit: str) -> str:
    """
    >>> cost_text(0.0345, "s"), cost_text(2e-6, "s"), cost_text(1.2e12, "FLOP")
    ('34.5 ms', '2.00 µs', '1.2e+12 FLOP')
    """
    if unit != "s":
        return f"{cost:.4g} {unit}"
    if cost < 0:
        return f"-{cost_text(-cost, unit)}"
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if cost >= scale:
            return f"{cost / scale:.3g} {name}" if cost / scale >= 10 else f"{cost / scale:.2f} {name}"
    return "0" if cost == 0 else f"{cost * 1e6:.2g} µs"


_KINDS = {
    "all_reduce": "AR",
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_to_all": "A2A",
    "permute": "CP",
}


def _mesh_text(plan: PlanData) -> str:
    return "  ".join(f"{n}={s}" for n, s in zip(plan.mesh.names, plan.mesh.sizes, strict=True))


def devices_text(plan: PlanData) -> str:
    """Return how many devices the plan uses, and of how many if it leaves some idle."""
    offered = plan.devices + plan.idle
    used = f"{plan.devices} of " if plan.idle else ""
    return f"{used}{offered} device{'s' * (offered > 1)}"


def headline(plan: PlanData) -> list[str]:
    """Return the lines above the table: model, mesh, predicted step, memory, certificate."""
    count = sum(t.elements for t in plan.parameters.values())
    scale = f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
    batch = ", ".join(
        f"{path} {'×'.join(map(str, t.shape)) or 'scalar'}" for path, t in list(plan.inputs.items())[:3]
    )
    lines = [f"{plan.model} · {scale} parameters · {batch} · {devices_text(plan)} of {plan.machine}"]
    tried = sorted(plan.tried, key=lambda t: t.cost)
    others = [t for t in tried if t.mesh != plan.mesh.sizes and t.cost > plan.cost * (1 + 1e-9)][:2]
    runners = ", ".join(f"{'×'.join(map(str, t.mesh))} +{(t.cost / plan.cost - 1):.1%}" for t in others)
    ties = sum(t.cost <= plan.cost * (1 + 1e-9) for t in tried) - 1
    note = f"best of {len(tried)} meshes" if len(tried) > 1 else "mesh as given"
    note += f"; {ties} more cost the same" if ties > 0 else ""
    note += f"; runners-up {runners}" if runners else ""
    lines.append(f"mesh   {_mesh_text(plan)}    {note}")
    against = " · ".join(
        f"{name.replace('_', ' ')} {cost_text(cost, plan.unit)}"
        + (f" (×{cost / plan.cost:.2f})" if plan.cost else "")
        + (", does not fit" if name in plan.too_large else "")
        for name, cost in _shortlist(plan)
    )
    lines.append(
        f"step   {cost_text(plan.cost, plan.unit)} predicted   compute {cost_text(plan.compute, plan.unit)} · "
        f"communication {cost_text(plan.communication, plan.unit)}"
        + (f", {cost_text(plan.hidden, plan.unit)} of it hidden" if plan.hidden else "")
        + (f" · {against}" if against else "")
    )
    if plan.throughput is not None:
        lines.append(f"speed  {plan.throughput}{_peak_text(plan)}")
    lines += stage_lines(plan)
    if plan.padding:
        lines.append(f"padded {padding_text(plan)}")
    if plan.pipeline is None and (plan.accumulate > 1 or plan.remat or plan.once != "none"):
        how = [f"{plan.accumulate} micro-batches, gradients summed"] if plan.accumulate > 1 else []
        how += [f"{part} in backward" for part in recompute_text(plan.remat)]
        how += hoisted_text(plan.once)
        lines.append(f"to fit {' · '.join(how)}")
    m = plan.memory
    lines.append(
        f"memory {bytes_text(m.total)} of {bytes_text(plan.memory_there)} a device   parameters "
        f"{bytes_text(m.parameters)} · gradients {bytes_text(m.gradients)} · optimizer {bytes_text(m.optimizer)} · "
        f"activations {bytes_text(m.activations)} · buffers {bytes_text(m.buffers)}"
    )
    if plan.waiting_bytes:
        lines.append(f"       and {bytes_text(plan.waiting_bytes)} of gradients that wait for later steps")
    if (warning := misfit_text(plan)) is not None:
        lines.append(f"WARNING {warning}")
    lines += [f"note   {remark}" for remark in plan.remarks]
    proof = "optimal (certified)" if plan.optimal else f"best found; bound {cost_text(plan.bound, plan.unit)}"
    if every := plan.provenance.get("meshes"):
        proof += f", over {every} meshes of the devices" if plan.optimal else f"; proven over meshes: {every}"
    if paddings := plan.provenance.get("paddings"):
        proof += f", over the model as written and {paddings} padding{'' if paddings == '1' else 's'} of it"
    s = plan.seconds
    times = ", ".join(f"{k} {s[k]:.2f} s" for k in ("trace", "tables", "search") if k in s)
    edges = plan.provenance.get("edges", "?")
    under = f"under cost model '{plan.cost_model}', {plan.objective}"
    under += ", and the notes above" if plan.remarks else ""
    lines.append(f"{proof} {under} · {len(plan.nodes)} nodes, {edges} edges · {times}")
    return lines


def _peak_text(plan: PlanData) -> str:
    """What MFU refers to."""
    return "" if plan.peak is None else f" · peak {plan.peak[1] / 1e12:.3g} TFLOP/s ({plan.peak[0]})"


def in_a_line(plan: PlanData) -> str:
    """Return one line that identifies the plan, for the prompt of an interpreter, a log or a debugger."""
    proof = "optimal" if plan.optimal else f"bound {cost_text(plan.bound, plan.unit)}"
    fits = "" if plan.fits else ", does not fit"
    return (
        f"<Plan {plan.model} on {plan.devices} × {plan.machine}, mesh {_mesh_text(plan)}: "
        f"{cost_text(plan.cost, plan.unit)} predicted, {proof}{fits}>"
    )


def padding_text(plan: PlanData) -> str:
    """Return which extents are padded, by how much, and in which parameters and inputs."""

    def one(n: int, wide: int) -> str:
        there = [p for p, t in (*plan.parameters.items(), *plan.inputs.items()) if n in (t.unpadded or ())]
        more = f" and {len(there) - 3} more" if len(there) > 3 else ""
        return f"{n} to {wide} (+{100 * (wide / n - 1):.2g}%) in {', '.join(there[:3])}{more}"

    return " · ".join(one(n, wide) for n, wide in plan.padding.items())


def misfit_text(plan: PlanData) -> str | None:
    """Return why a plan does not fit, and what would; None if it fits."""
    if plan.fits:
        return None
    if plan.misfit is not None:
        return f"it does not fit: {plan.misfit}. This plan is the best without a limit"
    return (
        f"it does not fit: {bytes_text(plan.memory.total + plan.waiting_bytes)} predicted, "
        f"{bytes_text(plan.memory_there)} available. "
        f"--memory-limit machine searches for a plan that fits"
    )


def _shortlist(plan: PlanData) -> list[tuple[str, float]]:
    """Return data parallelism, FSDP, and the best of each other family. If any fits, only those that fit."""
    best: dict[str, tuple[bool, float, str]] = {}
    for name, cost in plan.baselines.items():
        head = name.split("_")[0]
        family = head if head in _FAMILIES else name
        rank = (name in plan.too_large, cost, name)
        best[family] = min(best.get(family, rank), rank)
    return [(name, cost) for _, cost, name in best.values()]


_FAMILIES = {"megatron", "expert", "context"}
"""Baselines of several degrees, of which the best is shown."""


def _elements(t: TensorPlan) -> int:
    n = 1
    for s in t.shape:
        n *= s
    return n


def _split_text(split: Mapping[str, Iterable[str]]) -> str:
    return "  ".join(f"{d}:{'·'.join(axes)}" for d, axes in split.items() if d != "pending") or "-"


_WITH_OPS, _WITH_MOVES = 110, 150
"""The terminal widths from which there is room for the ops, and for each kind of collective."""


def layer_table(plan: PlanData, width: int = _WITH_MOVES) -> RichTable:
    """Return a rich.Table with a row for each node that computes or communicates.

    A narrow table has no column for ops and gives the bytes of all collectives together. Long names are truncated.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    ops, each = width >= _WITH_OPS, width >= _WITH_MOVES
    table.add_column("layer", no_wrap=True, overflow="ellipsis")
    if ops:
        table.add_column("op", overflow="fold")
    table.add_column("split", no_wrap=not ops, overflow="ellipsis")
    for name in ("compute", "comm."):
        table.add_column(name, justify="right", no_wrap=True, min_width=8)
    if each:
        table.add_column("collectives", overflow="fold")
    else:
        table.add_column("sends", justify="right", no_wrap=True, min_width=8)
    sent_by_node: dict[str, dict[str, float]] = {}
    for c in plan.collectives:
        at = sent_by_node.setdefault(c.node, {})
        at[_KINDS[c.kind]] = at.get(_KINDS[c.kind], 0.0) + c.nbytes * c.times
    for n in filter(_is_listed, plan.nodes):
        sent = sent_by_node.get(n.name, {})
        table.add_row(
            n.name + (f" ×{n.times}" if n.times > 1 else ""),
            *([_op_text(n)] if ops else []),
            _split_text(n.split),
            cost_text(n.cost.compute, plan.unit),
            cost_text(n.cost.communication, plan.unit) if n.cost.communication else "",
            _sent_text(sent, each),
        )
    return table


def _is_listed(n: NodePlan) -> bool:
    """Whether a node computes or communicates. Parameters and inputs are listed by how they are stored."""
    moves_only = ("copy", "carry", "cotangent", "gradient", "output")
    return n.op not in ("parameter", "input") and (n.op not in moves_only or bool(n.cost.communication))


def _sent_text(sent: Mapping[str, float], each: bool) -> str:
    if each:
        return "  ".join(f"{k} {bytes_text(b)}" for k, b in sent.items())
    return bytes_text(sum(sent.values())) if sent else ""


def _op_text(n: NodePlan) -> str:
    return n.einsum if n.op in ("matmul", "conv", "attention", "gather", "scatter") else f"{n.op}  {n.einsum}"


def storage_table(plan: PlanData) -> RichTable:
    """Return a rich.Table of parameters, grouped by how they are stored."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("parameters stored")
    table.add_column("count", justify="right")
    table.add_column("a device holds", justify="right")
    table.add_column("which", overflow="fold")
    groups: dict[str, list[tuple[str, TensorPlan]]] = {}
    for path, t in plan.parameters.items():
        axes = [a for dim in t.storage for a in dim]
        groups.setdefault("split over " + "·".join(axes) if axes else "whole on every device", []).append(
            (path, t)
        )
    sizes = plan.mesh.by_name
    for how, members in groups.items():
        held = 0.0
        for _, t in members:
            ways = 1
            for dim in t.storage:
                for a in dim:
                    ways *= sizes[a]
            held += _elements(t) * _itemsize(t.dtype) / ways
        names = ", ".join(p for p, _ in members[:4]) + (
            f" and {len(members) - 4} more" if len(members) > 4 else ""
        )
        table.add_row(how, str(len(members)), bytes_text(held), names)
    return table


def _itemsize(dtype: str) -> int:
    from pase.ir.types import itemsize

    return itemsize(dtype)


def render(plan: PlanData, out: Console) -> None:
    """Print the plan on a rich Console."""
    for line in headline(plan):
        out.print(line, style="bold red" if line.startswith("WARNING") else None)
    out.print()
    out.print(layer_table(plan, out.width))
    out.print()
    out.print(storage_table(plan))


def as_text(plan: PlanData, width: int = 150) -> str:
    """Return the plan as plain text."""
    out = io.StringIO()
    render(plan, console(file=out, width=width, color_system=None))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def as_html(plan: PlanData, width: int = 150) -> str:
    """Return the plan as an HTML fragment for notebooks: what ``render`` prints, in the page's own colors."""
    page = console(file=io.StringIO(), record=True, width=width, force_jupyter=False)
    render(plan, page)
    return page.export_html(
        inline_styles=True, code_format='<pre style="overflow-x:auto;line-height:1.3">{code}</pre>'
    )
