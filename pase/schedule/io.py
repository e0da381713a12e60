"""Problems and bucket plans as versioned JSON, checked against the schemas beside this file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pase.errors import PaseError
from pase.schedule.plan import BucketPlan, Message, Piece, Update, check_plan
from pase.schedule.types import Block, Curve, Link, ScheduleProblem, Transfer, problem_from_times

__all__ = [
    "PLAN_SCHEMA",
    "PROBLEM_SCHEMA",
    "links_from_json",
    "plan_from_json",
    "plan_to_json",
    "problem_from_json",
    "problem_to_json",
    "schema",
]

PROBLEM_SCHEMA = "pase.schedule.problem/1"
PLAN_SCHEMA = "pase.schedule.bucket_plan/1"


@cache
def schema(name: str) -> dict[str, Any]:
    """The JSON Schema called "problem" or "bucket_plan"."""
    loaded: dict[str, Any] = json.loads(
        (Path(__file__).parent / "schemas" / f"{name}.schema.json").read_text()
    )
    return loaded


def _validate(data: Any, name: str, version: str, where: str) -> None:
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    if not isinstance(data, dict):
        raise PaseError(f"{where}: expected a JSON object, got {type(data).__name__}")
    if data.get("schema") != version:
        raise PaseError(f"{where}: schema is {data.get('schema')!r}; this version of pase reads {version!r}")
    error = best_match(Draft202012Validator(schema(name)).iter_errors(data))
    if error is not None:
        place = "/".join(str(p) for p in error.absolute_path) or "top level"
        message = error.message if len(error.message) < 300 else error.message[:300] + " …"
        raise PaseError(f"{where}, at {place}: {message}")


def _curve_to_json(c: Curve) -> dict[str, Any]:
    if len(c.bytes_) == 1 and c.bytes_[0] == 0:
        return {"alpha_s": c.seconds[0], "beta_s_per_byte": c.tail_s_per_byte}
    return {"bytes": list(c.bytes_), "seconds": list(c.seconds), "tail_s_per_byte": c.tail_s_per_byte}


def _curve_from_json(d: dict[str, Any]) -> Curve:
    if "alpha_s" in d:
        return Curve.alpha_beta(alpha_s=d["alpha_s"], beta_s_per_byte=d["beta_s_per_byte"])
    if "tail_s_per_byte" in d:
        return Curve(
            bytes_=tuple(map(float, d["bytes"])),
            seconds=tuple(map(float, d["seconds"])),
            tail_s_per_byte=float(d["tail_s_per_byte"]),
        )
    if len(d["bytes"]) != len(d["seconds"]):
        raise PaseError(f"a cost curve has {len(d['bytes'])} bytes but {len(d['seconds'])} seconds")
    return Curve.table(d["bytes"], d["seconds"])


def problem_to_json(p: ScheduleProblem) -> dict[str, Any]:
    """The problem as a JSON object of schema "pase.schedule.problem/1"."""
    tensors = []
    for t in p.tensors:
        d: dict[str, Any] = {
            "name": t.name,
            "bytes": t.nbytes,
            "ready_after": t.ready_after,
            "needed_before": t.needed_before,
            "lag": t.lag,
            "axes": t.axes,
            "kind": t.kind,
            "dtype": t.dtype,
        }
        if t.follows:
            d["follows"] = list(t.follows)
        tensors.append(d)
    return {
        "schema": PROBLEM_SCHEMA,
        "name": p.name,
        "source": p.source,
        "dataflow": p.dataflow,
        "blocks": [
            {"name": b.name, "phase": b.phase, "seconds": b.seconds}
            | ({"after": list(b.after)} if b.after is not None else {})
            for b in p.blocks
        ],
        "tensors": tensors,
        "links": [_link_to_json(link) for link in p.links],
    }


def _link_to_json(link: Link) -> dict[str, Any]:
    d: dict[str, Any] = {"name": link.name, "curve": _curve_to_json(link.curve)}
    if link.by_axes:
        d["by_axes"] = {k: _curve_to_json(c) for k, c in link.by_axes.items()}
    if link.axes is not None:
        d["axes"] = list(link.axes)
    return d


def _links_from_json(data: list[dict[str, Any]]) -> tuple[Link, ...]:
    return tuple(
        Link(
            name=d["name"],
            curve=_curve_from_json(d["curve"]),
            by_axes={k: _curve_from_json(c) for k, c in d.get("by_axes", {}).items()},
            axes=None if d.get("axes") is None else tuple(d["axes"]),
        )
        for d in data
    )


def problem_from_json(data: Any, *, where: str = "problem") -> ScheduleProblem:
    """Read a problem; ``where`` names the file in errors."""
    _validate(data, "problem", PROBLEM_SCHEMA, where)
    try:
        links = _links_from_json(data["links"])
        if "blocks" not in data:
            return _from_times(data, links)
        for i, d in enumerate(data["tensors"]):
            if "ready_s" in d or "next_use_s" in d:
                raise PaseError(
                    f"tensors/{i} '{d['name']}' gives times, but the problem gives blocks: use ready_after and "
                    f"needed_before, or leave out blocks and give forward_s and backward_s"
                )
        return ScheduleProblem(
            name=data["name"],
            blocks=tuple(
                Block(
                    name=d.get("name", f"{d['phase']} {i}"),
                    phase=d["phase"],
                    seconds=float(d["seconds"]),
                    after=None if "after" not in d else tuple(d["after"]),
                )
                for i, d in enumerate(data["blocks"])
            ),
            tensors=tuple(
                Transfer(
                    name=d["name"],
                    nbytes=d["bytes"],
                    ready_after=d.get("ready_after"),
                    needed_before=d.get("needed_before"),
                    lag=d.get("lag", 1),
                    axes=d.get("axes", ""),
                    kind=d.get("kind", "all_reduce"),
                    dtype=d.get("dtype", "float32"),
                    follows=tuple(d.get("follows", ())),
                )
                for d in data["tensors"]
            ),
            links=links,
            dataflow=data.get("dataflow", False),
            source=data.get("source", ""),
        )
    except PaseError as e:
        raise PaseError(f"{where}: {e}") from e


def _from_times(data: dict[str, Any], links: tuple[Link, ...]) -> ScheduleProblem:
    rows = []
    for i, d in enumerate(data["tensors"]):
        if "ready_s" not in d or "next_use_s" not in d:
            raise PaseError(
                f"tensors/{i} '{d['name']}' needs ready_s and next_use_s, as the problem has no blocks"
            )
        rows.append((d["name"], d["bytes"], float(d["ready_s"]), float(d["next_use_s"])))
    axes = {d.get("axes", "") for d in data["tensors"]}
    if len(axes) > 1:
        raise PaseError(
            f"tensors given by times must share their axes, got {sorted(axes)}; give blocks instead"
        )
    return problem_from_times(
        name=data["name"],
        forward_s=float(data["forward_s"]),
        backward_s=float(data["backward_s"]),
        tensors=rows,
        links=links,
        axes=axes.pop() if axes else "",
        source=data.get("source", ""),
    )


def plan_to_json(
    problem: ScheduleProblem,
    plan: BucketPlan,
    *,
    evaluation: dict[str, Any] | None = None,
    starts_s: Any = None,
    link_costs: bool = False,
) -> dict[str, Any]:
    """The plan as a JSON object of schema "pase.schedule.bucket_plan/1": names, not indices.

    link_costs: with the links' cost curves, so that `links_from_json` finds what it was made for.
    """
    messages = []
    for i, m in enumerate(plan.messages):
        d: dict[str, Any] = {
            "link": problem.links[m.link].name,
            "bytes": m.nbytes,
            "update": m.update,
            "pieces": [
                {"tensor": problem.tensors[p.tensor].name, "offset": p.offset, "bytes": p.nbytes}
                for p in m.pieces
            ],
        }
        if m.hold_s:
            d["hold_s"] = m.hold_s
        if m.iteration:
            d["iteration"] = m.iteration
        if m.phase:
            d["phase"] = m.phase
        if starts_s is not None:
            d["start_s"] = float(starts_s[i])
        messages.append(d)
    out = {
        "schema": PLAN_SCHEMA,
        "problem": problem.name,
        "policy": plan.policy,
        "dispatch": plan.dispatch,
        "credit_bytes": plan.credit_bytes,
        "barrier": plan.barrier,
        "links": [link.name for link in problem.links],
        "period": plan.period,
        "updates": [{"first": u.first, "last": u.last, "at": u.at} for u in plan.updates],
        "messages": messages,
        "detail": plan.detail,
    }
    if evaluation is not None:
        out["evaluation"] = evaluation
    if link_costs:
        out["link_costs"] = [_link_to_json(link) for link in problem.links]
    return out


def links_from_json(data: Any, *, where: str = "bucket plan") -> tuple[Link, ...]:
    """The links that a bucket plan was made for; empty where it does not say."""
    _validate(data, "bucket_plan", PLAN_SCHEMA, where)
    try:
        return _links_from_json(data.get("link_costs", []))
    except PaseError as e:
        raise PaseError(f"{where}: {e}") from e


def plan_from_json(data: Any, problem: ScheduleProblem, *, where: str = "bucket plan") -> BucketPlan:
    """Read a plan made for that problem; names that the problem lacks, or has twice, are an error."""
    _validate(data, "bucket_plan", PLAN_SCHEMA, where)
    links = {link.name: i for i, link in enumerate(problem.links)}
    tensors: dict[str, int] = {}
    for i, t in enumerate(problem.tensors):
        if t.name in tensors:
            raise PaseError(f"{where}: problem '{problem.name}' has two tensors named '{t.name}'")
        tensors[t.name] = i
    messages = []
    for i, m in enumerate(data["messages"]):
        if m["link"] not in links:
            raise PaseError(f"{where}, at messages/{i}: no link '{m['link']}' in problem '{problem.name}'")
        for p in m["pieces"]:
            if p["tensor"] not in tensors:
                raise PaseError(
                    f"{where}, at messages/{i}: no tensor '{p['tensor']}' in problem '{problem.name}'"
                )
        messages.append(
            Message(
                pieces=tuple(
                    Piece(tensor=tensors[p["tensor"]], offset=p["offset"], nbytes=p["bytes"])
                    for p in m["pieces"]
                ),
                link=links[m["link"]],
                update=m.get("update", 0),
                hold_s=m.get("hold_s", 0.0),
                iteration=m.get("iteration", 0),
                phase=m.get("phase"),
            )
        )
    plan = BucketPlan(
        policy=data["policy"],
        messages=tuple(messages),
        dispatch=data["dispatch"],
        credit_bytes=data.get("credit_bytes", 1),
        barrier=data.get("barrier", False),
        period=data["period"],
        updates=tuple(Update(**u) for u in data["updates"]),
        detail=data.get("detail", {}),
    )
    try:
        check_plan(problem, plan)
    except PaseError as e:
        raise PaseError(f"{where}: {e}") from e
    return plan
