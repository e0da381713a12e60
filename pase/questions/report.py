"""Makes the HTML report of a plan: the choice and its reasons, the model and devices, the step, and alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pase.files.json_values import JsonObject
from pase.files.quantities import rounded_text
from pase.ir.blocks import hoisted_text
from pase.ir.precision import rate_words
from pase.memory.account import MemoryKind
from pase.pages.charts import Roof, WorkPoint, areas, roofline
from pase.pages.parts import bar, cards, key, table
from pase.pages.shell import Section, page
from pase.pages.streams import timeline_mount
from pase.plan.answer import answer, axes_text, mesh_text, name_in_words, split_text, step_text
from pase.plan.step_memory import StepMemory, step_memory
from pase.plan.table import bytes_text, cost_text, devices_text, layer_rows, misfit_text
from pase.plan.types import PlanData, TensorPlan
from pase.questions.explain import Cause, Explanation, whole_time
from pase.questions.reasons import reasons
from pase.questions.report_data import explorer_data, priced_step
from pase.questions.report_pipeline import drawn_schedule, stages_table
from pase.questions.scale_page import whole_runs
from pase.questions.sensitivity import Swing
from pase.questions.training_run import TrainingRun

__all__ = ["report_page"]

_PARTS = [("compute", "compute"), ("communication", "communication"), ("update", "update")]
_HELD: dict[MemoryKind, str] = {
    "parameters": "compute",
    "optimizer": "update",
    "gradients": "communication",
    "activations": "activations",
}
_KINDS = [*_HELD.items(), ("buffers", "other")]


def report_page(
    e: Explanation, swings: list[Swing] | None = None, date: str = "", run: TrainingRun | None = None
) -> str:
    """The page as text. Everything that comes from the layout is escaped.

    swings: the plan's costs if the machine's figures are wrong, from ``pase.questions.sensitivity.swings``.
    date: the day on which the page is made, for its title.
    run: what a whole training run takes under the plan.
    """
    plan = e.plan
    runs = {} if run is None else {(plan.machine, plan.devices + plan.idle): run}
    step, note = _step(plan)
    timelines = {} if step is None else {"step": step}
    drawn = "" if step is None else timeline_mount("step")
    explorer = (
        "<div data-explorer><p>A script draws the model here; the tables below have the same data.</p></div>"
    )
    sections = [
        Section(anchor="strategies", title="Strategies", body=_strategies(plan)),
        *([Section(anchor="run", title="The whole run", body=whole_runs(runs))] if runs else []),
        Section(anchor="time", title="Where the time goes", body=_causes(e)),
        Section(
            anchor="model", title="Model and devices", body=_about_model(plan) + explorer, on_paper=False
        ),
        Section(
            anchor="timeline",
            title="The step",
            body=f"<p>{note}</p>{drawn}{stages_table(plan)}",
            on_paper=plan.pipeline is not None,
        ),
        Section(anchor="roofline", title="Roofline", body=_roofline(e)),
        Section(anchor="memory", title="Memory", body=_memory(plan)),
        *([Section(anchor="sensitivity", title="Sensitivity", body=_swings(e, swings))] if swings else []),
        Section(anchor="layers", title="Layers", body=_layers(e), on_paper=False),
        Section(anchor="storage", title="Parameters", body=_storage(plan), on_paper=False),
        Section(anchor="certificate", title="Certificate", body=_certificate(plan)),
    ]
    return page(
        title=f"{plan.model} on {_devices(e)}" + (f", {date}" if date else ""),
        lead=_lead(e),
        sections=sections,
        foot="<p>All figures are predictions of a cost model, not measurements.</p>"
        "<p class='paper'>The page on a screen also has the model as a graph, the timeline, all layers and all "
        "parameters.</p>",
        widgets=("timeline", "explorer"),
        data={**explorer_data(e), "timelines": timelines},
    )


def _lead(e: Explanation) -> str:
    plan = e.plan
    mesh = mesh_text(plan.mesh)
    if plan.pipeline is not None:
        mesh += f", in {plan.pipeline.degree} pipeline ranks"
    proof = "optimal" if plan.optimal else f"at most {_gap(plan)} above the best"
    speed = plan.throughput
    figures = [
        ("step", step_text(plan), f"predicted by cost model {escape(plan.cost_model)}"),
        (
            "exposed communication",
            cost_text(plan.exposed, plan.unit),
            f"of {cost_text(plan.communication, plan.unit)}"
            + (", the rest overlaps compute" if plan.hidden else ""),
        ),
        ("mesh", escape(mesh), escape(_devices(e))),
        (
            "memory of a device",
            bytes_text(plan.memory.total),
            f"of {bytes_text(plan.memory_there)}" + ("" if plan.fits else ": does not fit"),
        ),
        ("certificate", proof, "under this cost model"),
    ]
    if speed is not None:
        figures.insert(1, ("speed", f"{speed.mfu:.1%} MFU", escape(str(speed).partition(" · ")[2])))
    misfit = misfit_text(plan)
    warning = "" if misfit is None else f"<p class='warn'>{escape(misfit)}</p>"
    remark = f"<p class='soft'>{escape(e.remark)}</p>" if e.remark else ""
    style = {True: "warn", False: "soft"}
    warning += "".join(f"<p class='{style[r.doubtful]}'>{escape(str(r))}</p>" for r in plan.noted)
    why = "".join(f"<li>{escape(reason)}" for reason in reasons(e))
    verdict = f"<p class='verdict'>{escape(answer(plan))}</p>"
    return f"{verdict}{cards(figures)}{warning}<h2>Why this split</h2><ul>{why}</ul>{remark}"


def _devices(e: Explanation) -> str:
    """The devices by the names and the nodes that people know: 32 NVIDIA H100 SXM5 80GB (4 nodes of 8)."""
    plan = e.plan
    if e.machine is None:
        return f"{devices_text(plan)} of {plan.machine}"
    each, nodes = e.machine.levels[0].ways, ""
    if each and plan.devices % each == 0:
        count = plan.devices // each
        nodes = f" ({count:,} node{'s' * (count > 1)} of {each})"
    used = f"{plan.devices:,}" + (f" of {plan.devices + plan.idle:,}" if plan.idle else "")
    return f"{used} {e.machine.device.name}{nodes}"


_FIRST_STRATEGIES = 5


def _gap(plan: PlanData) -> str:
    return f"{plan.cost / plan.bound - 1:.2%}" if plan.bound > 0 else "an unknown part"


def _strategies(plan: PlanData) -> str:
    costs = sorted({"this plan": plan.cost, **plan.baselines}.items(), key=lambda kv: kv[1])

    def listed(label: str, some: Sequence[tuple[str, float]]) -> str:
        most = max(cost for _, cost in some)
        rows = [
            (
                f"<b>{escape(name)}</b>" if name == "this plan" else escape(name_in_words(name)),
                cost_text(cost, plan.unit),
                f"×{cost / plan.cost:.3g}" if plan.cost else "",
                bytes_text(plan.memory.total if name == "this plan" else plan.baseline_memory[name])
                + (" <span class='warn'>too much</span>" if name in plan.too_large else "")
                if plan.baseline_memory and (name == "this plan" or name in plan.baseline_memory)
                else "",
                bar([("ours" if name == "this plan" else "other", cost)], most),
            )
            for name, cost in some
        ]
        return table(label, ["strategy", "step>", "to this>", "memory>", "|"], rows)

    at = next(k for k, (name, _) in enumerate(costs) if name == "this plan")
    first = costs[: max(_FIRST_STRATEGIES, at) + 1]
    out = listed("Strategies compared", first)
    if rest := costs[len(first) :]:
        out += f"<details><summary>{len(rest)} slower strategies</summary>"
        out += f"{listed('Slower strategies', rest)}</details>"
    if plan.skipped:
        why = "".join(f"<li>{escape(name_in_words(n))}: {escape(w)}" for n, w in plan.skipped.items())
        out += f"<details><summary>{len(plan.skipped)} that do not apply</summary><ul>{why}</ul></details>"
    if len(plan.tried) > 1:
        tried = sorted(plan.tried, key=lambda t: t.cost)[:8]
        best = ", ".join(f"{'×'.join(map(str, t.mesh))} {cost_text(t.cost, plan.unit)}" for t in tried)
        out += f"<p>The best meshes of the {len(plan.tried)} that were searched: {best}.</p>"
    return out


def _causes(e: Explanation) -> str:
    whole = whole_time(e.causes)
    most = max((c.cost for c in e.causes), default=0.0)
    head = ["cause", "time>", "share>", "bytes a device>", "|"]

    def listed(label: str, some: Sequence[Cause]) -> str:
        rows = (
            (
                escape(c.what),
                cost_text(c.cost, e.plan.unit),
                f"{c.cost / whole:.1%}" if c.cost > 0 else "",
                bytes_text(c.nbytes) if c.group == "communication" and c.cost > 0 else "",
                bar([(c.group, c.cost)], most),
            )
            for c in some
        )
        return table(label, head, rows)

    small = [c for c in e.causes if 0 <= c.cost < 1e-3 * whole]
    out = key(_PARTS) + listed("Where the time goes", [c for c in e.causes if c not in small])
    if small:
        together = cost_text(sum(c.cost for c in small), e.plan.unit)
        out += f"<details><summary>{len(small)} more, {together} together</summary>"
        out += f"{listed('Small causes', small)}</details>"
    return out


def _about_model(plan: PlanData) -> str:
    text = (
        "<p>Click a block to unfold it, or a layer to see how it is split. The map shows what each device holds. Lines "
        "on the left join a tensor's producer to its readers; they are orange if data moves between devices.</p>"
    )
    if plan.pipeline is not None:
        text += (
            "<p>The layers' costs are averages over the ranks. The map has a band for each rank, which shows the "
            "rank's stage that has the layer.</p>"
        )
    if not any(n.reads for n in plan.nodes):
        text += (
            "<p>This layout was written before layouts had the model's graph. Compile it again to see it.</p>"
        )
    return text


def _step(plan: PlanData) -> tuple[JsonObject | None, str]:
    """Returns (the step for the timeline widget, a text that explains it). The step is None if costs are not in
    seconds."""
    from pase.plan.buckets import schedule_of
    from pase.schedule.gantt import drawn_iteration
    from pase.schedule.simulate import evaluate

    if plan.unit != "s":
        return None, f"Costs are in {escape(plan.unit)}, not in seconds, so there is no timeline."
    if plan.pipeline is not None:
        said = f"A pipeline of {escape(str(plan.pipeline))}: bubble {plan.pipeline.bubble:.1%} of the step."
        return drawn_schedule(plan), f"{said} Each row is a rank and shows its micro-batches over time."
    scheduled = schedule_of(plan)
    if scheduled is None:
        return priced_step(plan), "The step as it is priced: its parts run one after another."
    problem, buckets = scheduled
    done = evaluate(problem, buckets)
    return drawn_iteration(problem, done), (
        f"The steady step, in which the collectives of parameters follow the bucket plan '{escape(done.policy)}' and "
        f"overlap compute. Simulated message by message, it takes {cost_text(done.iteration_s, 's')}; the plan's price "
        f"is {cost_text(plan.cost, 's')}, " + ("also with overlap." if plan.hidden else "without overlap.")
    )


_MOST_POINTS = 400


def _roofline(e: Explanation) -> str:
    plan = e.plan
    if plan.unit != "s":
        return f"<p>Costs are in {escape(plan.unit)}, not in seconds, so there is no roofline.</p>"
    points, types = [], set[tuple[str, str]]()
    whole = plan.compute or 1.0
    for i, n in enumerate(plan.nodes):
        for w in n.work:
            if not (w.flops and w.nbytes and w.times and w.cost):
                continue
            rate = w.flops * w.times / w.cost
            types.add((w.dtype, w.kind))
            points.append(
                WorkPoint(
                    intensity=w.flops / w.nbytes,
                    rate=rate,
                    share=w.cost / whole,
                    colour={"forward": "compute", "backward": "backward", "update": "update"}[w.phase],
                    title=f"{n.name}, {w.phase}, {w.kind} {rate_words(w.dtype)}: "
                    f"{rounded_text(rate / 1e12)} TFLOP/s at "
                    f"{rounded_text(w.flops / w.nbytes)} FLOP per byte, {w.cost / whole:.2%} of the time",
                    node=i,
                )
            )
    if not points:
        return (
            "<p>This layout was written before layouts had each layer's work. Compile it again to see it.</p>"
        )
    left_out = max(len(points) - _MOST_POINTS, 0)
    points = sorted(points, key=lambda p: -p.share)[:_MOST_POINTS]
    roofs = []
    if e.machine is not None:
        device = e.machine.device
        named: dict[float, str] = {}  # one roof for each rate
        for dtype, kind in sorted(types):
            only = " in attention" if device.peak_of(kind, dtype) != device.peak(dtype) else ""
            named.setdefault(device.peak_of(kind, dtype), f"peak of {rate_words(dtype)}{only}")
        roofs = [
            Roof(name=name, rate=rate, bandwidth=device.memory_bandwidth_bytes_per_s)
            for rate, name in named.items()
        ]
    text = (
        "<p>Each point is a layer's work in one pass, as the cost model predicts it. The area of a point is its share "
        "of the time. Memory bandwidth limits points below the slope, and arithmetic limits points below the flat "
        "roof. Click a point to see its layer.</p>"
    )
    if left_out:
        text += f"<p class='soft'>The {_MOST_POINTS} longest points are drawn; {left_out} others are not.</p>"
    colours = [("compute", "forward"), ("backward", "backward"), ("update", "update"), ("ours", "roofs")]
    rows = ((escape(p.title), f"{p.share:.1%}") for p in points[:12])
    listed = table("The longest work", ["the longest", "share>"], rows)
    return (
        text
        + roofline(points, roofs)
        + key(colours)
        + f"<details><summary>As text</summary>{listed}</details>"
    )


def _memory(plan: PlanData) -> str:
    m, course = plan.memory, step_memory(plan)
    most = max(m.total, plan.memory_there)
    rows = [(k, bytes_text(getattr(m, k)), bar([(c, getattr(m, k))], most)) for k, c in _KINDS]
    rows += [("<b>total</b>", bytes_text(m.total), bar([("ours", m.total)], most))]
    rows += [("a device may hold", bytes_text(plan.memory_there), bar([("other", plan.memory_there)], most))]
    counted = table("Memory on a device", ["", "bytes>", "|"], rows)
    return counted if course is None else counted + _course(plan, course)


def _course(plan: PlanData, course: StepMemory) -> str:
    scale = float(1 << 30) if plan.memory.total >= 1 << 28 else float(1 << 20)
    layers: list[tuple[str, str, list[float]]]
    layers = [(k, c, [v / scale for v in course.held[k]]) for k, c in _HELD.items()]
    layers.append(("buffers", "other", [plan.memory.buffers / scale] * len(course.times)))
    limits = [("counted: each kind at its peak", plan.memory.total / scale)]
    if plan.memory_there < 3 * plan.memory.total:
        limits.append(("a device may hold", plan.memory_there / scale))
    text = (
        f"<p>Memory over the step, by kind. The peak is about {bytes_text(course.peak + plan.memory.buffers)}. The "
        f"figure that is compared with the limit is the sum of each kind's peak, {bytes_text(plan.memory.total)}.</p>"
    )
    chart = areas(
        course.times,
        layers,
        limits,
        label="Memory of a device over the step, by kind",
        value="GiB" if scale == 1 << 30 else "MiB",
        end=f"end of backward, {cost_text(course.times[-1], plan.unit)}",
    )
    return text + chart + key((c, k) for k, c in _KINDS)


def _swings(e: Explanation, swings: list[Swing]) -> str:
    base = e.plan.cost
    most = max(s.ours for s in swings)
    rows = (
        (
            f"{escape(s.quantity)} ×{s.factor:g}",
            cost_text(s.ours, e.plan.unit),
            f"{s.ours / base - 1:+.1%}" if base else "",
            f"{s.ours / s.best - 1:.2%}" if s.best > 0 else "",
            bar([("ours", s.ours)], most),
        )
        for s in swings
    )
    text = (
        "<p>The step of the same split on a machine with one figure changed, and how much more it costs than the best "
        "split of the same mesh there. If the last number is small, the choice does not depend on the figure. "
        "<code>pase compare --vary</code> searches all meshes.</p>"
    )
    head = ["the machine's", "step>", "to this plan>", "above the best there>", "|"]
    return text + table("Sensitivity", head, rows)


_MOST_LAYERS = 12


def _layers(e: Explanation) -> str:
    plan = e.plan
    shown = sorted((r for r in layer_rows(plan.nodes, plan.mesh) if r.total), key=lambda r: -r.total)
    most = max((r.total for r in shown), default=0.0)
    rows = []
    for r in shown:
        first = r.nodes[0]
        split = split_text(first.split.items(), plan.mesh) or "not split"
        parts = [("compute", r.compute), ("communication", r.communication), ("update", r.update)]
        rows.append(
            (
                escape(r.title),
                f"<code>{escape(first.einsum)}</code>",
                escape(split),
                cost_text(r.total, plan.unit),
                *([_otherwise(e, first.name)] if e.next_best else []),
                bar(parts, most),
            )
        )
    note = "other split: how much more the best strategy costs that splits this layer differently."
    head = ["layer", "op", "split", "step>", *(["other split>"] if e.next_best else []), "|"]
    out = key(_PARTS) + table("The most expensive layers", head, rows[:_MOST_LAYERS])
    if len(rows) > _MOST_LAYERS:
        rest = table("The other layers", head, rows[_MOST_LAYERS:])
        out += f"<details><summary>{len(rows) - _MOST_LAYERS} more layers</summary>{rest}</details>"
    return f"{out}<p class='soft'>{note}</p>" if e.next_best else out


def _otherwise(e: Explanation, layer: str) -> str:
    other, whole = e.next_best.get(layer), e.plan.cost
    if other is None or not whole:
        return ""
    return "impossible" if other == float("inf") else f"{max(other / whole - 1, 0.0):+.2%}"


def _storage(plan: PlanData) -> str:
    def shape(t: TensorPlan) -> str:
        dims = (
            f"{s}" + (f" / {axes_text(axes, plan.mesh)}" if axes else "")
            for s, axes in zip(t.shape, t.storage, strict=True)
        )
        return escape(" × ".join(dims)) or "scalar"

    head = ["parameter", "dtype", "shape, and the axes that split it"]
    rows = [(escape(p), escape(t.dtype), shape(t)) for p, t in plan.parameters.items()]
    listed = table("Parameters", head, rows)
    if len(rows) <= _MOST_LAYERS:
        return listed
    return f"<details><summary>{len(rows)} parameters</summary>{listed}</details>"


def _certificate(plan: PlanData) -> str:
    if plan.optimal:
        proof = f"It is proven that no allowed strategy costs less than {cost_text(plan.cost, plan.unit)}"
    else:
        proof = (
            f"The best strategy found costs {cost_text(plan.cost, plan.unit)}. It is proven that none costs less than "
            f"{cost_text(plan.bound, plan.unit)}, so it is at most {_gap(plan)} above the best"
        )
    how = (
        f"{proof}, under cost model '{escape(plan.cost_model)}' with {escape(plan.objective)}, over the meshes that "
        f"were searched."
    )
    facts = {
        "machine": f"{plan.machine}, digest {plan.machine_digest}",
        "model's graph": f"digest {plan.graph_digest}",
        "optimizer": plan.optimizer,
        "micro-batches": str(plan.accumulate),
        "hoisted, once a step": ", ".join(hoisted_text(plan.once)) or "no collectives of parameters",
        "gathered again for backward": "parameters" if plan.gathers_again else "nothing",
        **plan.provenance,
        **{f"seconds: {k}": f"{v:.3f}" for k, v in plan.seconds.items()},
    }
    rows = ((escape(k), escape(v)) for k, v in facts.items())
    return f"<p>{how}</p>" + table("Origin", ["what", "value"], rows)
