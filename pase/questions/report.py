"""A plan as one page of HTML, without scripts: what was chosen, what it costs, what else there was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from pase.plan.table import bytes_text, cost_text, misfit_text
from pase.plan.types import PlanData, TensorPlan
from pase.questions.explain import Explanation

__all__ = ["report_page"]

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1150px;margin:2em auto;padding:0 1em;color:#1b1f24}
h2{margin-top:2.2em}table{border-collapse:collapse;width:100%}td,th{padding:.25em .7em;border-bottom:1px solid #ddd;
text-align:left;vertical-align:top}td.n,th.n{text-align:right;white-space:nowrap}td.b{width:24%}
.bar{height:.85em;display:inline-block;vertical-align:middle}.compute{background:#4c78a8}.communication{background:#f58518}
.update{background:#54a24b}.other{background:#b5b5b5}.ours{background:#d62728}.warn{color:#b00;font-weight:600}
code{font-size:13px}
.grey{color:#57606a}dl{display:grid;grid-template-columns:max-content 1fr;gap:.2em 1.2em}dd{margin:0}
.key span{margin-right:1.2em}"""


def _bar(parts: Iterable[tuple[str, float]], whole: float) -> str:
    """Parts of the whole as one bar; (class, share)."""
    return "".join(
        f"<span class='bar {kind}' style='width:{100 * value / whole:.2f}%'></span>"
        for kind, value in parts
        if whole > 0 and value > 0
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns whose title ends in '>' are numbers, in '|' bars; cells are HTML already."""
    kinds = ["n" if h.endswith(">") else "b" if h.endswith("|") else "" for h in head]
    out = [
        "<table><tr>",
        *(f"<th class='{k}'>{escape(h.rstrip('>|'))}" for h, k in zip(head, kinds, strict=True)),
    ]
    for row in rows:
        out.append("<tr>" + "".join(f"<td class='{k}'>{c}" for c, k in zip(row, kinds, strict=True)))
    return [*out, "</table>"]


def report_page(e: Explanation) -> str:
    """The page as text; everything that comes from the layout is escaped."""
    plan = e.plan
    mesh = " × ".join(f"{n} {s}" for n, s in zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{escape(plan.model)} on {plan.devices} devices</title><style>{_STYLE}</style>",
        f"<h1>{escape(plan.model)} on {plan.devices} × {escape(plan.machine)}</h1>",
        "<dl>",
        f"<dt>mesh<dd>{escape(mesh)}",
        f"<dt>step<dd>{cost_text(plan.cost, plan.unit)}, predicted by cost model '{escape(plan.cost_model)}'",
        *([f"<dt>speed<dd>{escape(str(plan.throughput))}"] if plan.throughput is not None else []),
        "<dt>certificate<dd>"
        + (
            "optimal under that cost model"
            if plan.optimal
            else f"best found; nothing below {cost_text(plan.bound, plan.unit)} exists"
        ),
        f"<dt>memory<dd>{bytes_text(plan.memory.total)} of {bytes_text(plan.memory_there)} a device"
        + ("" if plan.fits else f" <span class=warn>{escape(misfit_text(plan) or '')}</span>"),
        "</dl>",
        "<p class=key><span><i class='bar compute' style='width:1em'></i> compute</span>"
        "<span><i class='bar communication' style='width:1em'></i> communication</span>"
        "<span><i class='bar update' style='width:1em'></i> update</span></p>",
    ]
    parts += ["<h2>Beside what people do by hand</h2>", *_strategies(plan)]
    parts += ["<h2>Where the time goes</h2>", *_causes(e)]
    parts += ["<h2>Layers</h2>", *_layers(e)]
    parts += ["<h2>Memory on a device</h2>", *_memory(plan)]
    parts += ["<h2>How parameters are stored</h2>", *_storage(plan)]
    if e.remark:
        parts.append(f"<p class=grey>{escape(e.remark)}</p>")
    facts = ", ".join(f"{escape(k)} {escape(v)}" for k, v in plan.provenance.items())
    parts.append(f"<p class=grey>Costs are predictions. Made by: {facts}.</p></html>")
    return "\n".join(parts) + "\n"


def _strategies(plan: PlanData) -> list[str]:
    costs = {"this plan": plan.cost, **plan.baselines}
    most = max(costs.values())
    rows = [
        (
            f"<b>{escape(name)}</b>" if name == "this plan" else escape(name.replace("_", " ")),
            cost_text(cost, plan.unit),
            f"×{cost / plan.cost:.3f}" if plan.cost else "",
            _bar([("ours" if name == "this plan" else "other", cost)], most),
        )
        for name, cost in sorted(costs.items(), key=lambda kv: kv[1])
    ]
    out = _table(["strategy", "step>", "against this>", "|"], rows)
    out += [f"<p class=grey>without {escape(n)}: {escape(why)}</p>" for n, why in plan.skipped.items()]
    if len(plan.tried) > 1:
        tried = sorted(plan.tried, key=lambda t: t.cost)[:8]
        listed = ", ".join(f"{'×'.join(map(str, t.mesh))} {cost_text(t.cost, plan.unit)}" for t in tried)
        out.append(f"<p>Best on each mesh searched ({len(plan.tried)} in all): {listed}.</p>")
    return out


def _causes(e: Explanation) -> list[str]:
    whole = sum(c.cost for c in e.causes) or 1.0
    return _table(
        ["cause", "step>", "share>", "bytes a device>", "|"],
        (
            (
                escape(c.what),
                cost_text(c.cost, e.plan.unit),
                f"{c.cost / whole:.1%}",
                bytes_text(c.nbytes) if c.group == "communication" else "",
                _bar([(c.group, c.cost)], max(x.cost for x in e.causes)),
            )
            for c in e.causes
        ),
    )


def _layers(e: Explanation) -> list[str]:
    plan = e.plan
    shown = sorted((n for n in plan.nodes if n.cost.total), key=lambda n: -n.cost.total)
    most = max((n.cost.total for n in shown), default=0.0)
    rows = []
    for n in shown:
        other = e.next_best.get(n.name)
        split = "  ".join(f"{d}:{'·'.join(axes)}" for d, axes in n.split.items()) or "not split"
        rows.append(
            (
                escape(n.name) + (f" ×{n.times}" if n.times > 1 else ""),
                f"<code>{escape(n.einsum)}</code>",
                escape(split),
                cost_text(n.cost.total, plan.unit),
                ""
                if other is None or not plan.cost
                else "impossible"
                if other == float("inf")
                else f"{max(other / (plan.cost + plan.hidden) - 1, 0.0):+.2%}",
                _bar(
                    [
                        ("compute", n.cost.compute),
                        ("communication", n.cost.communication),
                        ("update", n.cost.update),
                    ],
                    most,
                ),
            )
        )
    note = "split otherwise: how much more the best strategy costs that splits this layer in another way."
    table = _table(["layer", "op", "split", "step>", "split otherwise>", "|"], rows)
    return [*table, f"<p class=grey>{note}</p>"]


def _memory(plan: PlanData) -> list[str]:
    m = plan.memory
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
    most = max(m.total, plan.memory_there)
    rows = [(k, bytes_text(getattr(m, k)), _bar([("other", getattr(m, k))], most)) for k in kinds]
    return _table(
        ["", "bytes>", "|"], [*rows, ("<b>total</b>", bytes_text(m.total), _bar([("ours", m.total)], most))]
    )


def _storage(plan: PlanData) -> list[str]:
    def shape(t: TensorPlan) -> str:
        dims = (
            f"{s}" + (f" / {'·'.join(axes)}" if axes else "")
            for s, axes in zip(t.shape, t.storage, strict=True)
        )
        return escape(" × ".join(dims)) or "scalar"

    return _table(
        ["parameter", "dtype", "shape, and the axes that split it"],
        ((escape(p), escape(t.dtype), shape(t)) for p, t in plan.parameters.items()),
    )
