"""layout.json: a plan as a versioned file with a JSON Schema, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pase.errors import PaseError
from pase.files.atomic import write_atomically
from pase.ir.blocks import Block
from pase.machine import Mesh
from pase.memory.account import Memory
from pase.plan.accesses import Digits, EquationLayouts, distinct
from pase.plan.types import NodePlan, PlanData, TensorPlan, Tried
from pase.tables.itemize import Collective, NodeCost

__all__ = ["SCHEMA", "diff", "from_json", "load", "save", "schema", "to_json"]

SCHEMA = "pase.layout/1"
_MAX_BYTES = 512 << 20


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema of layout.json."""
    text = resources.files("pase.plan").joinpath("layout-1.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def to_json(plan: PlanData) -> dict[str, Any]:
    """The plan as the JSON object that ``from_json`` reads."""

    def tensor(t: TensorPlan) -> dict[str, Any]:
        out = {"shape": t.shape, "dtype": t.dtype, "storage": t.storage, "used_as": t.used_as}
        return out if t.state is None else out | {"state": t.state}

    by_kind: dict[str, float] = {}
    for c in plan.collectives:
        by_kind[c.kind] = by_kind.get(c.kind, 0.0) + c.cost
    out = {
        "schema": SCHEMA,
        "model": plan.model,
        "devices": plan.devices,
        "machine": {"name": plan.machine, "digest": plan.machine_digest, "memory_bytes": plan.device_memory},
        "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        "optimizer": plan.optimizer,
        "parameters": {path: tensor(t) for path, t in plan.parameters.items()},
        "inputs": {path: tensor(t) for path, t in plan.inputs.items()},
        "strategy": [
            {
                "node": n.name, "op": n.op, "einsum": n.einsum, "sizes": n.sizes, "split": n.split,
                "times": n.times, "source": n.source,
            }
            for n in plan.nodes
        ],
        "reshards": [
            {"at": key.partition("|")[0], "tensor": key.partition("|")[2], "layouts": layouts}
            | ({"gradient": plan.gradient[key]} if key in plan.gradient else {})
            for key, layouts in plan.read.items()
        ],
        "layouts": plan.define,
        "gradients": {name: p for name, p in plan.gradient.items() if "|" not in name},
        "collectives": [
            {
                "kind": c.kind, "tensor": c.tensor, "axes": c.axes, "bytes": c.nbytes, "times": c.times,
                "phase": c.phase, "node": c.node, "source": c.source, "cost": c.cost,
            }
            for c in plan.collectives
        ],
        "cost": {
            "unit": plan.unit, "model": plan.cost_model, "total": plan.cost, "bound": plan.bound,
            "optimal": plan.optimal, "by_node": {n.name: asdict(n.cost) for n in plan.nodes}, "by_kind": by_kind,
            "baselines": plan.baselines, "skipped": plan.skipped,
            "meshes": [{"mesh": t.mesh, "cost": t.cost} for t in plan.tried],
        },
        "memory": asdict(plan.memory),
        "accumulate": plan.accumulate,
        "remat": [asdict(b) for b in plan.remat],
        "graph_digest": plan.graph_digest,
        "seconds": plan.seconds,
        "provenance": plan.provenance,
    }  # fmt: skip
    if plan.accesses:
        out["accesses"] = _accesses_to_json(plan.accesses)
    if plan.buckets is not None:
        out["bucket_plan"] = plan.buckets
    plain: dict[str, Any] = json.loads(json.dumps(out))
    return plain


def from_json(data: Any, where: str = "layout") -> PlanData:
    """Read the object; PaseError names the place of what is wrong. ``where`` names it in messages."""
    import jsonschema

    version = data.get("schema") if isinstance(data, dict) else None
    if version != SCHEMA:
        raise PaseError(
            f"{where}: schema is {version!r}, and this pase reads '{SCHEMA}'; "
            f"use the version of pase that wrote it, or compile again"
        )
    error = jsonschema.Draft202012Validator(schema()).iter_errors(data)
    first = next(iter(sorted(error, key=lambda e: list(map(str, e.absolute_path)))), None)
    if first is not None:
        place = "/".join(map(str, first.absolute_path)) or "the top"
        raise PaseError(f"{where}: at {place}: {first.message[:300]}")
    known = len(data.get("accesses", {}).get("layouts", ()))
    for at, e in data.get("accesses", {}).get("equations", {}).items():
        if max((*e["reads"].values(), *e["writes"].values()), default=-1) >= known:
            raise PaseError(f"{where}: at accesses/equations/{at}: there are {known} layouts, counted from 0")
    plan = _plan(data)
    _check(plan, where)
    if plan.buckets is not None:
        from pase.plan.buckets import read_buckets

        read_buckets(plan, plan.buckets, f"{where}: at bucket_plan")
    return plan


def _placement(p: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axes) for axes in p)


def _plan(d: Mapping[str, Any]) -> PlanData:
    def tensor(t: Mapping[str, Any]) -> TensorPlan:
        return TensorPlan(
            shape=tuple(t["shape"]), dtype=t["dtype"], storage=_placement(t["storage"]),
            used_as=tuple(map(_placement, t["used_as"])), state=_placement(t["state"]) if "state" in t else None,
        )  # fmt: skip

    cost = d["cost"]
    return PlanData(
        model=d["model"], devices=d["devices"], machine=d["machine"]["name"], machine_digest=d["machine"]["digest"],
        device_memory=d["machine"]["memory_bytes"], cost_model=cost["model"], unit=cost["unit"],
        optimizer=d["optimizer"], mesh=Mesh(names=tuple(d["mesh"]), sizes=tuple(d["mesh"].values())),
        nodes=tuple(
            NodePlan(
                name=n["node"], op=n["op"], einsum=n["einsum"], sizes=n["sizes"],
                split={k: tuple(v) for k, v in n["split"].items()}, times=n["times"], source=n["source"],
                cost=NodeCost(**cost["by_node"].get(n["node"], {"compute": 0.0, "communication": 0.0, "update": 0.0})),
            )
            for n in d["strategy"]
        ),
        parameters={k: tensor(t) for k, t in d["parameters"].items()},
        inputs={k: tensor(t) for k, t in d["inputs"].items()},
        define={k: tuple(map(_placement, v)) for k, v in d["layouts"].items()},
        read={f"{r['at']}|{r['tensor']}": tuple(map(_placement, r["layouts"])) for r in d["reshards"]},
        gradient={f"{r['at']}|{r['tensor']}": _placement(r["gradient"]) for r in d["reshards"] if "gradient" in r}
        | {name: _placement(p) for name, p in d.get("gradients", {}).items()},
        collectives=tuple(
            Collective(
                kind=c["kind"], tensor=c["tensor"], axes=tuple(c["axes"]), nbytes=c["bytes"], times=c["times"],
                phase=c["phase"], node=c["node"], source=c["source"], cost=c["cost"],
            )
            for c in d["collectives"]
        ),
        accumulate=d.get("accumulate", 1), remat=tuple(Block(**b) for b in d.get("remat", ())),
        memory=Memory(**d["memory"]), cost=cost["total"], optimal=cost["optimal"], bound=cost["bound"],
        baselines=cost["baselines"], skipped=cost["skipped"],
        tried=tuple(Tried(mesh=tuple(t["mesh"]), cost=t["cost"]) for t in cost["meshes"]),
        seconds=d["seconds"], graph_digest=d["graph_digest"], provenance=d["provenance"],
        accesses=_accesses_from_json(d["accesses"]) if "accesses" in d else {}, buckets=d.get("bucket_plan"),
    )  # fmt: skip


def _accesses_to_json(accesses: Mapping[str, EquationLayouts]) -> dict[str, Any]:
    """Each layout once, and per equation which of them its tensors are read and written in."""
    number = {layout: i for i, layout in enumerate(distinct(accesses))}
    return {
        "layouts": list(number),
        "equations": {
            at: {"reads": {t: number[d] for t, d in e.reads.items()},
                 "writes": {t: number[d] for t, d in e.writes.items()}}
            for at, e in accesses.items()
        },
    }  # fmt: skip


def _accesses_from_json(d: Mapping[str, Any]) -> dict[str, EquationLayouts]:
    layouts: list[Digits] = [tuple(None if x is None else (x[0], x[1]) for x in row) for row in d["layouts"]]
    return {
        at: EquationLayouts(
            reads={t: layouts[i] for t, i in e["reads"].items()},
            writes={t: layouts[i] for t, i in e["writes"].items()},
        )
        for at, e in d["equations"].items()
    }


def _check(plan: PlanData, where: str) -> None:
    """What a schema cannot say: axes exist, a tensor uses an axis once, shards divide."""
    size = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    if plan.mesh.devices != plan.devices:
        raise PaseError(f"{where}: at mesh: {size} is not {plan.devices} devices")

    def check(place: str, layout: Sequence[Sequence[str]], shape: Sequence[int] | None = None) -> None:
        used = [a for axes in layout for a in axes]
        for a in used:
            if a not in size:
                raise PaseError(
                    f"{where}: at {place}: mesh axis '{a}' does not exist; the mesh has {', '.join(size)}"
                )
        if len(set(used)) != len(used):
            raise PaseError(f"{where}: at {place}: a mesh axis is used twice in {[list(x) for x in layout]}")
        if shape is not None:
            if len(layout) != len(shape):
                raise PaseError(
                    f"{where}: at {place}: a layout of {len(layout)} dims for shape {list(shape)}"
                )
            for extent, axes in zip(shape, layout, strict=True):
                ways = 1
                for a in axes:
                    ways *= size[a]
                if extent % ways:
                    raise PaseError(
                        f"{where}: at {place}: a dim of {extent} elements in {ways} shards is uneven"
                    )

    for kind, tensors in (("parameters", plan.parameters), ("inputs", plan.inputs)):
        for path, t in tensors.items():
            check(f"{kind}/{path}/storage", t.storage, t.shape)
            if t.state is not None:
                check(f"{kind}/{path}/state", t.state, t.shape)
    for n in plan.nodes:
        check(f"strategy/{n.name}/split", list(n.split.values()))
    for name, layouts in plan.define.items():
        for layout in layouts:
            check(f"layouts/{name}", layout)
    for name, layout in plan.gradient.items():
        check(f"gradients/{name}", layout)
    for key, layouts in plan.read.items():
        for layout in (*layouts, *([plan.gradient[key]] if key in plan.gradient else [])):
            check(f"reshards/{key}", layout)


def save(plan: PlanData, path: str | Path) -> None:
    write_atomically(path, json.dumps(to_json(plan), indent=1) + "\n")


def load(path: str | Path) -> PlanData:
    """Read a layout.json; PaseError where it is missing, corrupt, of another version, or too large to be one."""
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise PaseError(f"{path}: {path.stat().st_size} bytes; a layout has at most {_MAX_BYTES}")
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise PaseError(f"cannot read {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise PaseError(f"{path} is not text: a layout is JSON, in UTF-8") from e
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as e:
        raise PaseError(f"{path} is not JSON: {e}; was it cut off? compile it again") from e
    return from_json(data, str(path))


def diff(a: PlanData, b: PlanData) -> list[str]:
    """What differs between two plans' layouts, one line each."""
    out = []
    for what in ("accumulate", "remat"):
        if getattr(a, what) != getattr(b, what):
            out.append(f"{what}: {_variant(getattr(a, what))} -> {_variant(getattr(b, what))}")
    mesh_a, mesh_b = (dict(zip(p.mesh.names, p.mesh.sizes, strict=True)) for p in (a, b))
    if mesh_a != mesh_b:
        out.append(f"mesh: {mesh_a} -> {mesh_b}")
    for what, left, right in (
        ("parameter", _stored(a.parameters), _stored(b.parameters)),
        ("input", _stored(a.inputs), _stored(b.inputs)),
        ("node", a.strategy, b.strategy),
    ):
        for name in dict.fromkeys((*left, *right)):
            x, y = left.get(name), right.get(name)
            if x != y:
                out.append(f"{what} {name}: {_short(x)} -> {_short(y)}")
    return out


def _stored(tensors: Mapping[str, TensorPlan]) -> Mapping[str, Any]:
    return {
        k + what: layout
        for k, t in tensors.items()
        for what, layout in (("", t.storage), (" (its state)", t.state))
        if layout is not None
    }


def _variant(x: Any) -> str:
    return str(x) if isinstance(x, int) else f"{len(x)} blocks"


def _short(x: Any) -> str:
    if x is None:
        return "absent"
    if isinstance(x, Mapping):
        return " ".join(f"{d}:{'·'.join(axes)}" for d, axes in x.items()) or "replicated"
    return "[" + ", ".join("·".join(axes) or "-" for axes in x) + "]"
