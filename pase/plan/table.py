"""A plan as a table for people: a headline, a row per layer, and how parameters are stored."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.files.quantities import bytes_text, cost_text, rounded_text
from pase.files.terminal import console
from pase.ir.blocks import gathering_again_text, hoisted_text, recompute_text
from pase.ir.precision import rate_words
from pase.plan.answer import answer, axes_text, family, gap_text, mesh_text, split_text, step_text
from pase.plan.pipeline import lines as stage_lines
from pase.plan.types import NodePlan, PlanData, TensorPlan

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from pase.files.terminal import Console
    from pase.machine import Mesh

__all__ = [
    "LayerRow",
    "as_html",
    "as_text",
    "bytes_text",
    "cost_text",
    "devices_text",
    "headline",
    "in_a_line",
    "layer_rows",
    "layer_table",
    "misfit_text",
    "padding_text",
    "render",
    "storage_table",
]


_KINDS = {
    "all_reduce": "AR",
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_to_all": "A2A",
    "permute": "CP",
}


def devices_text(plan: PlanData) -> str:
    """Return how many devices the plan uses, and of how many if it leaves some idle."""
    offered = plan.devices + plan.idle
    used = f"{plan.devices} of " if plan.idle else ""
    return f"{used}{offered} device{'s' * (offered > 1)}"


def _batch(plan: PlanData) -> list[str]:
    """Return the arrays of the batch: the inputs without numbers and without the variables of modules, if there are
    others."""
    arrays = [path for path, t in plan.inputs.items() if t.shape]
    names = {path.partition(".")[0] for path in arrays}
    of_modules = "other_variables" if "other_variables" in names else "variables"
    return [path for path in arrays if path.partition(".")[0] != of_modules] or arrays


def headline(plan: PlanData) -> list[str]:
    """Return the lines above the table: the plan in a sentence, model, mesh, predicted step, memory, certificate."""
    count = sum(t.elements for t in plan.trained.values())
    scale = f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
    batch = ", ".join(f"{path} {'×'.join(map(str, plan.inputs[path].shape))}" for path in _batch(plan)[:3])
    lines = [
        answer(plan),
        f"{plan.model} · {scale} parameters · {batch} · {devices_text(plan)} of {plan.machine}",
    ]
    tried = sorted(plan.tried, key=lambda t: t.cost)
    others = [t for t in tried if t.mesh != plan.mesh.sizes and t.cost > plan.cost * (1 + 1e-9)][:2]
    runners = ", ".join(f"{'×'.join(map(str, t.mesh))} +{(t.cost / plan.cost - 1):.1%}" for t in others)
    ties = sum(t.cost <= plan.cost * (1 + 1e-9) for t in tried) - 1
    note = f"best of {len(tried)} meshes" if len(tried) > 1 else "mesh as given"
    note += f"; {ties} more cost the same" if ties > 0 else ""
    note += f"; runners-up {runners}" if runners else ""
    lines.append(f"mesh   {mesh_text(plan.mesh)}    {note}")
    against = " · ".join(
        f"{name.replace('_', ' ')} {cost_text(cost, plan.unit)}"
        + (f" (×{cost / plan.cost:.2f})" if plan.cost else "")
        + (", does not fit" if name in plan.too_large else "")
        for name, cost in _shortlist(plan)
    )
    lines.append(
        f"step   {step_text(plan)} predicted   "
        f"compute {cost_text(plan.compute, plan.unit)} · communication {cost_text(plan.communication, plan.unit)}"
        + (f", {cost_text(plan.exposed, plan.unit)} of it exposed" if plan.hidden else "")
        + (f" · {against}" if against else "")
    )
    if plan.throughput is not None:
        lines.append(f"speed  {plan.throughput}{_peak_text(plan)}")
    lines += stage_lines(plan)
    if plan.padding:
        lines.append(f"padded {padding_text(plan)}")
    how = [f"{plan.accumulate} micro-batches, gradients summed"] if plan.accumulate > 1 else []
    how += [f"{part} in backward" for part in recompute_text(plan.remat)]
    if not plan.remat and any(n.recomputed_in for n in plan.nodes):
        how.append("regions that the model marks are recomputed in backward")
    how += hoisted_text(plan.once)
    how += gathering_again_text(plan.gathers_again)
    if plan.pipeline is None and how:
        lines.append(f"runs   {' · '.join(how)}")
    m = plan.memory
    lines.append(
        f"memory {bytes_text(m.total)} of {bytes_text(plan.memory_there)} a device at its peak   parameters "
        f"{bytes_text(m.parameters)}{_stored_as(plan)} · gradients {bytes_text(m.gradients)} · "
        f"optimizer {bytes_text(m.optimizer)} · activations {bytes_text(m.activations)} · "
        f"buffers {bytes_text(m.buffers)}"
    )
    if plan.waiting_bytes:
        lines.append(f"       and {bytes_text(plan.waiting_bytes)} of gradients that wait for later steps")
    if (warning := misfit_text(plan)) is not None:
        lines.append(f"WARNING {warning}")
    lines += [f"note   {remark}" for remark in plan.remarks]
    lines.append(_certificate(plan))
    return lines


def _certificate(plan: PlanData) -> str:
    """What is proven, under which assumptions, and what it took."""
    proof = "optimal (certified)" if plan.optimal else gap_text(plan.cost, plan.bound, plan.unit)
    if every := plan.provenance.get("meshes"):
        proof += f", over {every} meshes of the devices" if plan.optimal else f"; proven over meshes: {every}"
    if paddings := plan.provenance.get("paddings"):
        proof += f", over the model as written and {paddings} padding{'' if paddings == '1' else 's'} of it"
    s = plan.seconds
    times = ", ".join(f"{k} {s[k]:.2f} s" for k in ("trace", "tables", "search") if k in s)
    edges = plan.provenance.get("edges", "?")
    under = f"under cost model '{plan.cost_model}', {plan.objective}"
    under += ", and the notes above" if plan.remarks else ""
    return " · ".join(
        [f"{proof} {under}", f"{len(plan.nodes)} nodes, {edges} edges", *([times] if times else [])]
    )


def _peak_text(plan: PlanData) -> str:
    """What MFU refers to."""
    if plan.peak is None:
        return ""
    dtype, flops = plan.peak
    return f" · peak {rounded_text(flops / 1e12)} TFLOP/s ({rate_words(dtype)})"


def in_a_line(plan: PlanData) -> str:
    """Return one line that identifies the plan, for the prompt of an interpreter, a log or a debugger."""
    proof = "optimal" if plan.optimal else f"bound {cost_text(plan.bound, plan.unit)}"
    fits = "" if plan.fits else ", does not fit"
    return (
        f"<Plan {plan.model} on {plan.devices} × {plan.machine}, mesh {mesh_text(plan.mesh)}: "
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
        rank = (name in plan.too_large, cost, name)
        best[family(name)] = min(best.get(family(name), rank), rank)
    return [(name, cost) for _, cost, name in best.values()]


def _split_text(n: NodePlan, mesh: Mesh) -> str:
    """Return dim:axes of what is split. A dim whose name is only a count (z243) is given by its size."""
    names = {d: str(size) if _COUNTED.fullmatch(d) else d for d, size in n.sizes.items()}
    return split_text(((names.get(d, d), axes) for d, axes in n.split.items()), mesh) or "-"


_COUNTED = re.compile(r"[a-z]\d{2,}")


def _stored_as(plan: PlanData) -> str:
    """Return the dtype of most of the parameters' elements, as a part of the memory's line."""
    held = Counter[str]()
    for t in plan.parameters.values():
        held[t.dtype] += t.elements
    return f" of {held.most_common(1)[0][0]}" if held else ""


_WITH_OPS, _WITH_MOVES = 110, 150
"""The terminal widths from which there is room for the ops, and for each kind of collective."""
_MOST_LINES = 40
"""The lines of a plan's text, unless all are asked for."""


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """Nodes that are alike: equal layers that the program writes out, or one layer. Costs are sums."""

    name: str
    nodes: tuple[NodePlan, ...]

    @property
    def times(self) -> int:
        return sum(n.times for n in self.nodes)

    @property
    def title(self) -> str:
        """The name, and how often such a layer runs in a step."""
        return self.name + (f" ×{self.times}" if self.times > 1 else "")

    @property
    def total(self) -> float:
        return sum(n.cost.total for n in self.nodes)

    @property
    def compute(self) -> float:
        return sum(n.cost.compute for n in self.nodes)

    @property
    def communication(self) -> float:
        return sum(n.cost.communication for n in self.nodes)

    @property
    def update(self) -> float:
        return sum(n.cost.update for n in self.nodes)


def layer_rows(nodes: Iterable[NodePlan], mesh: Mesh) -> list[LayerRow]:
    """Return the nodes of a plan, those together whose names differ by numbers only.

    They also have the same op, sizes and split. A name gets a ``*`` for numbers that differ.
    """
    alike: dict[tuple[object, ...], list[NodePlan]] = {}
    for n in nodes:
        alike.setdefault(_shape_of(n, mesh), []).append(n)
    return [LayerRow(name=_common(same), nodes=tuple(same)) for same in alike.values()]


def _shape_of(n: NodePlan, mesh: Mesh) -> tuple[object, ...]:
    """Return what equal layers have in common. Dims count by position, because each layer has names of its own. Axes
    count as they are shown.
    """
    place = {dim: str(i) for i, dim in enumerate(n.sizes)}
    einsum = _WORD.sub(lambda m: place.get(m[0], m[0]), n.einsum)
    split = tuple((place.get(d, d), axes_text(axes, mesh)) for d, axes in n.split.items())
    return _NUMBER.sub("*", _COUNTER.sub("", n.name)), n.op, einsum, tuple(n.sizes.values()), split


_WORD = re.compile(r"\w+")
_NUMBER, _COUNTER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])"), re.compile(r"~\d+$")
"""A number in a path such as blocks.3.wq, and the count that tells nodes of one name apart."""


def _common(nodes: Sequence[NodePlan]) -> str:
    """Return the name of nodes that are alike, with a ``*`` for each number in which they differ."""
    names = [n.name if len(nodes) == 1 else _COUNTER.sub("", n.name) for n in nodes]
    found = [_NUMBER.findall(name) for name in names]
    numbers = iter([at[0] if len(set(at)) == 1 else "*" for at in zip(*found, strict=True)])
    return _NUMBER.sub(lambda _: next(numbers), names[0])


def layer_table(plan: PlanData, width: int = _WITH_MOVES, most: int | None = None) -> RichTable:
    """Return a rich.Table with a row for each node, or for equal ones, that compute or communicate.

    A narrow table gives the bytes of all collectives together. Long names are truncated.

    most: the number of rows; the costliest are shown, in the model's order, without ops. None for all of them, with ops
        if there is room.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    ops = most is None and width >= _WITH_OPS
    each = width >= (_WITH_MOVES if ops else _WITH_OPS)
    table.add_column("layer", no_wrap=True, overflow="ellipsis")
    if ops:
        table.add_column("op", overflow="fold")
    table.add_column("split", no_wrap=not ops, overflow="ellipsis")
    for name in ("compute", "comm."):
        table.add_column(name, justify="right", no_wrap=True, min_width=8)
    if each:
        table.add_column(
            "collectives", overflow="fold" if most is None else "ellipsis", no_wrap=most is not None
        )
    else:
        table.add_column("sends", justify="right", no_wrap=True, min_width=8)
    sent_by_node: dict[str, dict[str, float]] = {}
    for c in plan.collectives:
        at = sent_by_node.setdefault(c.node, {})
        at[_KINDS[c.kind]] = at.get(_KINDS[c.kind], 0.0) + c.nbytes * c.times
    rows = layer_rows(filter(_is_listed, plan.nodes), plan.mesh)
    shown = rows if most is None or len(rows) <= most else _costliest(rows, most - 1)
    for row in shown:
        first, sent = row.nodes[0], Counter[str]()
        for n in row.nodes:
            sent.update(sent_by_node.get(n.name, {}))
        table.add_row(
            row.title,
            *([_op_text(first)] if ops else []),
            _split_text(first, plan.mesh),
            cost_text(row.compute, plan.unit),
            cost_text(row.communication, plan.unit) if row.communication else "",
            _sent_text(sent, each),
        )
    if left := [row for row in rows if row not in shown]:
        table.add_row(
            f"{sum(len(row.nodes) for row in left)} more",
            *([""] if ops else []),
            "--all lists them",
            cost_text(sum(row.compute for row in left), plan.unit),
            cost_text(sum(row.communication for row in left), plan.unit),
            "",
        )
    _add_updates(table, plan, rows, sent_by_node, each=each, ops=ops)
    return table


def _add_updates(
    table: RichTable,
    plan: PlanData,
    rows: Sequence[LayerRow],
    sent_by_node: Mapping[str, Mapping[str, float]],
    *,
    each: bool,
    ops: bool,
) -> None:
    """Add the row of what no layer has: casts of parameters, the optimizer's update, and what inputs and parameters
    send themselves. With it, the rows add up to the plan's compute and communication.
    """
    listed = {n.name for row in rows for n in row.nodes}
    rest = [n for n in plan.nodes if n.name not in listed]
    compute = sum(n.cost.compute for n in rest) + sum(n.cost.update for n in plan.nodes)
    communication = sum(n.cost.communication for n in rest)
    if not compute and not communication:
        return
    sent = Counter[str]()
    for name in sent_by_node.keys() - listed:
        sent.update(sent_by_node[name])
    table.add_row(
        "parameters, updates",
        *([""] if ops else []),
        "",
        cost_text(compute, plan.unit),
        cost_text(communication, plan.unit) if communication else "",
        _sent_text(sent, each),
    )


def _costliest(rows: Sequence[LayerRow], most: int) -> list[LayerRow]:
    """Return the rows that cost the most, in their order."""
    ranked = sorted(rows, key=lambda row: -(row.compute + row.communication))[: max(most, 1)]
    return [row for row in rows if row in ranked]


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
        how = f"split over {axes_text(axes, plan.mesh)}" if axes else "whole on every device"
        groups.setdefault(how, []).append((path, t))
    for how, members in groups.items():
        held = {path: t.local_bytes(plan.mesh) for path, t in members}
        largest = sorted(held, key=lambda path: -held[path])
        names = ", ".join(largest[:4]) + (f" and {len(largest) - 4} more" if len(largest) > 4 else "")
        table.add_row(how, str(len(members)), bytes_text(sum(held.values())), names)
    return table


def render(plan: PlanData, out: Console, every_layer: bool = False) -> None:
    """Print the plan on a rich Console, in at most 40 lines if these are not wrapped, or with every layer."""
    lines = headline(plan)
    for i, line in enumerate(lines):
        bold = "bold red" if line.startswith("WARNING") else "bold" if i == 0 else None
        out.print(line, style=bold)
    stored = storage_table(plan)
    wrapped = sum(1 + len(line) // (out.width - 10) for line in lines)
    most = max(_MOST_LINES - wrapped - stored.row_count - 6, _LEAST_ROWS)
    out.print()
    out.print(layer_table(plan, out.width, None if every_layer else most))
    if any(n.split for n in plan.nodes if _is_listed(n)):
        out.print(_LEGEND)
    out.print()
    out.print(stored)


_LEGEND = "split is dim:mesh axes; b is the batch, s the sequence, other letters are dims of the row's own op"
_LEAST_ROWS = 5


def as_text(plan: PlanData, width: int = 150, every_layer: bool = False) -> str:
    """Return the plan as plain text, in about 40 lines or with every layer."""
    out = io.StringIO()
    render(plan, console(file=out, width=width, color_system=None), every_layer)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def as_html(plan: PlanData, width: int = 150) -> str:
    """Return the plan as an HTML fragment for notebooks: what ``render`` prints, in the page's own colors."""
    page = console(file=io.StringIO(), record=True, width=width, force_jupyter=False)
    render(plan, page)
    return page.export_html(
        inline_styles=True, code_format='<pre style="overflow-x:auto;line-height:1.3">{code}</pre>'
    )
