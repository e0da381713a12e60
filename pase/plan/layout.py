"""Reads and writes layout.json: a plan as a versioned file with a JSON Schema.

The plan is converted to and from ``LayoutForm``, whose fields are the file's. Files with the keys of earlier versions
are converted first. ``diff`` compares the layouts of two plans.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from msgspec import UNSET

from pase.errors import PaseError
from pase.files.atomic import write_atomically
from pase.files.codec import convert, form_of, json_schema, read_json, to_tree, value_of
from pase.files.json_values import Json, JsonObject
from pase.ir import Place, Remark
from pase.machine import Mesh
from pase.plan.accesses import EquationLayouts, Reading, distinct
from pase.plan.answer import mesh_text, strategy_in_words
from pase.plan.constraints import Route
from pase.plan.layout_form import (
    SCHEMA,
    AccessesForm,
    CollectiveForm,
    CostForm,
    EquationForm,
    LayoutForm,
    MachineForm,
    NodeForm,
    ReshardForm,
    TensorForm,
    problems,
)
from pase.plan.types import NodePlan, PlanData, TensorPlan
from pase.tables.axis_layout import AxisLayout, Digit
from pase.tables.itemize import Collective, NodeCost

__all__ = ["SCHEMA", "diff", "from_json", "load", "made_schema", "save", "schema", "to_json"]

_MAX_BYTES = 512 << 20


def made_schema() -> JsonObject:
    """Return the JSON Schema of layout.json, generated from ``LayoutForm``. The committed file must equal it."""
    return json_schema(LayoutForm, "pase.layout/1: how every layer of a model is split over the devices")


@cache
def schema() -> JsonObject:
    """Return the published JSON Schema of layout.json."""
    text = resources.files("pase.plan").joinpath("layout-1.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def to_json(plan: PlanData) -> JsonObject:
    """Return the plan as the JSON object that ``from_json`` reads."""
    tree: JsonObject = to_tree(_form_of(plan))
    return tree


def _form_of(plan: PlanData) -> LayoutForm:
    return form_of(
        plan,
        LayoutForm,
        schema=SCHEMA,
        machine=MachineForm(name=plan.machine, digest=plan.machine_digest, memory_bytes=plan.device_memory),
        mesh=plan.mesh.by_name,
        parameters={path: form_of(t, TensorForm) for path, t in plan.parameters.items()},
        inputs={path: form_of(t, TensorForm) for path, t in plan.inputs.items()},
        strategy=tuple(form_of(n, NodeForm, node=n.name) for n in plan.nodes),
        reshards=tuple(
            form_of(route, ReshardForm, at=str(reading.at), tensor=reading.tensor)
            for reading, route in plan.read.items()
        ),
        layouts={name: route.layouts for name, route in plan.define.items() if route.layouts},
        gradients={name: r.gradient for name, r in plan.define.items() if r.gradient is not None},
        collectives=tuple(form_of(c, CollectiveForm) for c in plan.collectives),
        cost=_cost_form(plan),
        throughput=UNSET if plan.throughput is None else plan.throughput,
        remarks=plan.noted or UNSET,
        accesses=_accesses_form(plan.accesses) if plan.accesses else UNSET,
        bucket_plan=UNSET if plan.buckets is None else dict(plan.buckets),
    )


def _cost_form(plan: PlanData) -> CostForm:
    by_kind: dict[str, float] = {}
    for c in plan.collectives:
        by_kind[c.kind] = by_kind.get(c.kind, 0.0) + c.cost
    return form_of(
        plan,
        CostForm,
        model=plan.cost_model,
        total=plan.cost,
        by_node={n.name: n.cost for n in plan.nodes},
        by_kind=by_kind,
        meshes=plan.tried,
    )


def _accesses_form(accesses: Mapping[Place, EquationLayouts]) -> AccessesForm:
    """Return the distinct layouts, and for each equation the layouts in which it reads and writes, as indices."""
    index: dict[AxisLayout, int] = {layout: i for i, layout in enumerate(distinct(accesses))}

    def numbered(layouts: Mapping[str, AxisLayout]) -> dict[str, int]:
        return {t: index[d] for t, d in layouts.items()}

    equations = {
        str(at): EquationForm(reads=numbered(e.reads), writes=numbered(e.writes))
        for at, e in accesses.items()
    }
    layouts = tuple(tuple(s if isinstance(s, Digit) else None for s in layout) for layout in index)
    return AccessesForm(layouts=layouts, equations=equations)


def from_json(data: Json, where: str = "layout") -> PlanData:
    """Read a plan from its JSON object. Raises PaseError that names the place of a fault.

    where: names the object in messages.
    """
    version = data.get("schema") if isinstance(data, dict) else None
    if version != SCHEMA:
        raise PaseError(
            f"schema is {version!r}, but this version of pase reads {SCHEMA!r}",
            where=where,
            fix="use the version of pase that wrote it, or compile again",
        )
    form = convert(_renewed(data), LayoutForm, where)
    for fault in problems(form):
        raise PaseError(fault.what, where=f"{where}: at {fault.place}")
    plan = _plan_of(form)
    if plan.buckets is not None:
        from pase.plan.buckets import read_buckets

        read_buckets(plan, plan.buckets, f"{where}: at bucket_plan")
    return plan


def _renamed(value: Json, former: Mapping[str, str]) -> Json:
    """Return the object with its former keys renamed; anything else as it is."""
    return {former.get(k, k): v for k, v in value.items()} if isinstance(value, dict) else value


def _replaced(value: Json, key: str, former: Json, now: Json) -> Json:
    """Return the object with a former value of one key replaced; anything else as it is."""
    return value | {key: now} if isinstance(value, dict) and value.get(key) == former else value


def _renewed(data: Json) -> Json:
    """Return the layout with the keys and words that this version writes, in place of those of earlier versions."""

    def block(value: Json) -> Json:
        return _renamed(value, {"again": "recompute"})

    def blocks(value: Json) -> Json:
        return [block(v) for v in value] if isinstance(value, list) else value

    def stage(value: Json) -> Json:
        return _replaced(_renamed(value, {"again_s": "recompute_s"}), "weights", "once", "hoisted")

    def pipeline(value: Json) -> Json:
        return within(
            _renamed(value, {"again": "recompute", "narrow": "cut_points"}),
            {"stages": stage, "recompute": blocks, "replicas": with_pipeline},
        )

    def with_pipeline(value: Json) -> Json:
        """The plan, or one of its replicas."""
        if isinstance(value, dict) and "pipeline" in value:
            return value | {"pipeline": pipeline(value["pipeline"])}
        return value

    def within(value: Json, lists: Mapping[str, Callable[[Json], Json]]) -> Json:
        if not isinstance(value, dict):
            return value
        return {
            k: [lists[k](x) for x in v] if k in lists and isinstance(v, list) else v for k, v in value.items()
        }

    plan = within(
        _renamed(data, {"beside": "overlap"}),
        {
            "strategy": lambda node: _renamed(node, {"kept_again": "kept_for_recompute"}),
            "remat": block,
            "remarks": lambda remark: _replaced(remark, "kind", "turns", "trip_count"),
        },
    )
    return with_pipeline(plan)


def _plan_of(form: LayoutForm) -> PlanData:
    cost = form.cost
    return value_of(
        form,
        PlanData,
        machine=form.machine.name,
        machine_digest=form.machine.digest,
        device_memory=form.machine.memory_bytes,
        cost_model=cost.model,
        unit=cost.unit,
        mesh=Mesh(names=tuple(form.mesh), sizes=tuple(form.mesh.values())),
        nodes=tuple(_node_of(n, cost) for n in form.strategy),
        parameters={path: value_of(t, TensorPlan) for path, t in form.parameters.items()},
        inputs={path: value_of(t, TensorPlan) for path, t in form.inputs.items()},
        define={
            name: Route(form.layouts.get(name, ()), form.gradients.get(name))
            for name in dict.fromkeys((*form.layouts, *form.gradients))
        },
        read={Reading(Place.parse(r.at), r.tensor): value_of(r, Route) for r in form.reshards},
        copies=_copies_by_name(form.layouts) if form.copies is UNSET else form.copies,
        collectives=tuple(value_of(c, Collective) for c in form.collectives),
        baseline_memory=cost.baseline_memory,
        cost=cost.total,
        optimal=cost.optimal,
        bound=cost.bound,
        baselines=cost.baselines,
        skipped=cost.skipped,
        tried=cost.meshes,
        noted=_noted_of(form),
        accesses=UNSET if form.accesses is UNSET else _accesses_of(form.accesses),
        buckets=form.bucket_plan,
    )


def _noted_of(form: LayoutForm) -> tuple[Remark, ...]:
    """Return the remarks. Layouts of earlier versions have them as lines of their provenance."""
    if form.remarks is not UNSET:
        return form.remarks
    return tuple(Remark("assumed", line) for line in form.provenance.get("remarks", "").splitlines())


def _node_of(n: NodeForm, cost: CostForm) -> NodePlan:
    no_cost = NodeCost(compute=0.0, communication=0.0, update=0.0)
    return value_of(n, NodePlan, name=n.node, cost=cost.by_node.get(n.node, no_cost))


def _copies_by_name(tensors: Iterable[str]) -> dict[str, str]:
    """Return ``copies`` (copy -> the tensor that it copies) from the names, for files written before the field existed.

    In those files, the copies of t27 are named t27c, t27c1, …
    """
    return {t: m[1] for t in tensors if (m := re.fullmatch(r"(t\d+)c\d*", t))}


def _accesses_of(form: AccessesForm) -> dict[Place, EquationLayouts]:
    layouts = tuple(map(AxisLayout, form.layouts))

    def layouts_by_tensor(numbers: Mapping[str, int]) -> dict[str, AxisLayout]:
        return {t: layouts[i] for t, i in numbers.items()}

    return {
        Place.parse(at): EquationLayouts(reads=layouts_by_tensor(e.reads), writes=layouts_by_tensor(e.writes))
        for at, e in form.equations.items()
    }


def save(plan: PlanData, path: str | Path) -> None:
    """Write layout.json. An interrupted write leaves no partial file."""
    write_atomically(path, json.dumps(to_json(plan), indent=1) + "\n")


def load(path: str | Path) -> PlanData:
    """Read a layout.json. Raises PaseError if it is missing, corrupt, too large, or of another version."""
    return from_json(read_json(path, "a layout", _MAX_BYTES), str(path))


def diff(a: PlanData, b: PlanData) -> list[str]:
    """Return the differences between two plans' layouts in words. Tensors and nodes that change alike share a line."""
    out = []
    variants = (a.accumulate, a.remat, a.padding) != (
        b.accumulate,
        b.remat,
        b.padding,
    )  # of one model's graph
    for what, was, now, other in (
        ("model", a.model, b.model, False),
        ("the model's graph has changed", a.graph_digest, b.graph_digest, variants or a.model != b.model),
        ("devices", a.devices, b.devices, False),
        ("devices left idle", a.idle, b.idle, False),
        ("machine", a.machine, b.machine, False),
        ("the machine's figures have changed", a.machine_digest, b.machine_digest, a.machine != b.machine),
        ("split", strategy_in_words(a), strategy_in_words(b), False),
    ):
        if was != now and not other:  # another line says why the digests differ
            out.append(f"{what}: {was} -> {now}")
    for what in ("optimizer", "cost_model", "accumulate", "remat", "once", "gathers_again", "padding"):
        if getattr(a, what) != getattr(b, what):
            out.append(
                f"{_TITLES.get(what, what)}: {_variant(getattr(a, what))} -> {_variant(getattr(b, what))}"
            )
    mesh_a, mesh_b = (p.mesh.by_name for p in (a, b))
    if mesh_a != mesh_b:
        out.append(f"mesh: {mesh_text(a.mesh)} -> {mesh_text(b.mesh)}")
    for what, left, right in (
        ("parameter", *_stored(a.parameters, b.parameters)),
        ("input", *_stored(a.inputs, b.inputs)),
        ("node", a.strategy, b.strategy),
    ):
        alike: dict[str, list[str]] = {}
        for name in dict.fromkeys((*left, *right)):
            x, y = left.get(name), right.get(name)
            old, new = _in_words(x, mesh_a), _in_words(y, mesh_b)
            if old == new and x != y:
                old, new = _by_axes(x, mesh_a), _by_axes(y, mesh_b)
            if old != new:
                alike.setdefault(f"{old} -> {new}", []).append(name)
        for change, names in alike.items():
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            out.append(f"{what} {', '.join(names[:_MOST_NAMES])}{more}: {change}")
    return out


_MOST_NAMES = 3
_TITLES = {
    "accumulate": "micro-batches",
    "remat": "recomputed",
    "once": "hoisted collectives",
    "gathers_again": "gathered again for backward",
    "cost_model": "cost model",
}


def _stored(
    a: Mapping[str, TensorPlan], b: Mapping[str, TensorPlan]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return how both plans store each tensor, by path, and its optimizer state if that differs in either of them."""

    def of(tensors: Mapping[str, TensorPlan]) -> dict[str, Any]:
        states = {k: t.state or t.storage for k, t in tensors.items() if k in apart}
        return {k: t.storage for k, t in tensors.items()} | {f"{k} (its state)": s for k, s in states.items()}

    apart = {k for tensors in (a, b) for k, t in tensors.items() if t.state is not None}
    return of(a), of(b)


def _variant(x: Any) -> str:
    """Return the value of an option as text. ``remat`` is a tuple of blocks, ``padding`` has sizes of dims."""
    if isinstance(x, Mapping):
        return ", ".join(f"{size} as {padded}" for size, padded in x.items()) or "none"
    return f"{len(x)} blocks" if isinstance(x, tuple) else str(x)


def _in_words(
    x: Mapping[str, Sequence[str]] | Sequence[Sequence[str]] | None, sizes: Mapping[str, int]
) -> str:
    """Return a layout as the number of parts of each dim: "dim 0 over 8", "b over 32"."""
    return _said(x, lambda axes: str(math.prod(sizes[a] for a in axes)))


def _by_axes(
    x: Mapping[str, Sequence[str]] | Sequence[Sequence[str]] | None, sizes: Mapping[str, int]
) -> str:
    """Return a layout as the axes that split each dim: "dim 0 over data=8"."""
    return _said(x, lambda axes: "·".join(f"{a}={sizes[a]}" for a in axes))


def _said(
    x: Mapping[str, Sequence[str]] | Sequence[Sequence[str]] | None, over: Callable[[Sequence[str]], str]
) -> str:
    if x is None:
        return "absent"
    dims = x.items() if isinstance(x, Mapping) else ((f"dim {k}", axes) for k, axes in enumerate(x))
    return ", ".join(f"{d} over {over(axes)}" for d, axes in dims if axes) or "whole on every device"
