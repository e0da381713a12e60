"""Raises version 1 loops of frozen graphs to While nodes.

A loop in version 1 control flow is a cycle of Enter, Merge, Switch, NextIteration and Exit nodes. A version 1
conditional (Switch, Merge) needs no raising: both of its branches are lowered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pase.errors import PaseError
from pase.frontends.tf.graph import TfBody, TfNode, ordered

__all__ = ["raise_loops"]

_DEEPEST = 20


@dataclass(frozen=True)
class _Name:
    name: str


@dataclass(frozen=True)
class _Functions:
    """An attribute that names a function, with the fields of an AttrValue proto."""

    func: _Name
    list: _Name = field(default_factory=lambda: _Name(""))


def raise_loops(nodes: Mapping[str, TfNode], made: dict[str, TfBody]) -> dict[str, TfNode]:
    """The graph with a While node for every frame. The bodies of the loops are added to ``made``.

    Inner loops are raised first, because the nodes of an outer loop can be ordered only after that.
    """
    out = dict(nodes)
    frames: dict[str, list[TfNode]] = {}
    for n in nodes.values():
        if n.op in ("Enter", "RefEnter"):
            frames.setdefault(_frame(n), []).append(n)
    failed: PaseError | None = None
    for _ in range(_DEEPEST):
        waiting: dict[str, list[TfNode]] = {}
        for frame, enters in frames.items():
            try:
                out |= _raised(out, frame, enters, made)
            except PaseError as e:
                waiting[frame], failed = enters, e
        if not waiting:
            return out
        if len(waiting) == len(frames):
            break
        frames = waiting
    assert failed is not None
    raise failed


def _frame(n: TfNode) -> str:
    return n.attr["frame_name"].s.decode("utf-8", "replace") if "frame_name" in n.attr else ""


def _raised(
    nodes: Mapping[str, TfNode], frame: str, enters: list[TfNode], made: dict[str, TfBody]
) -> dict[str, TfNode]:
    """The nodes that replace one frame: a While, and an Identity for each of the frame's Exits."""
    where = f"loop '{frame}'"
    by_name = {n.name: n for n in enters}
    merges: list[tuple[TfNode, TfNode, TfNode]] = []  # (Merge, its Enter, its NextIteration)
    readers: dict[str, list[TfNode]] = {}
    for n in nodes.values():
        for ref in n.inputs:
            readers.setdefault(ref.rpartition(":")[0], []).append(n)
        if n.op not in ("Merge", "RefMerge") or len(n.inputs) != 2:
            continue
        sources = [nodes.get(r.rpartition(":")[0]) for r in n.inputs]
        first = next((s for s in sources if s is not None and s.name in by_name), None)
        again = next(
            (s for s in sources if s is not None and s.op in ("NextIteration", "RefNextIteration")), None
        )
        if first is not None and again is not None:
            merges.append((n, first, again))
    if not merges:
        raise PaseError("it has no loop variables", where=where, fix="check that the file is complete")
    varying = {e.name for _, e, _ in merges}
    fixed = [e for e in enters if e.name not in varying]
    condition: str | None = None
    inside: list[str] = []
    exits: dict[str, TfNode] = {}
    for k, (merge, _, _) in enumerate(merges):
        switch = next((r for r in readers.get(merge.name, ()) if r.op in ("Switch", "RefSwitch")), None)
        inside.append(f"{switch.name if switch else merge.name + '/none'}:1")
        if switch is None:
            continue
        predicate = nodes.get(switch.inputs[1].rpartition(":")[0]) if len(switch.inputs) > 1 else None
        if predicate is not None and predicate.op == "LoopCond" and predicate.inputs:
            condition = predicate.inputs[0]
        for r in readers.get(switch.name, ()):
            if r.op in ("Exit", "RefExit"):
                exits[r.name] = TfNode(
                    name=r.name, op="Identity", inputs=(f"{frame}/raised:{k}",), attr=r.attr
                )
    if condition is None:
        raise PaseError("it has no condition", where=where, fix="check that the file is complete")
    constants = [f"{e.name}:0" for e in fixed]
    outer = [e for _, e, _ in merges] + fixed
    if any(not e.inputs for e in outer) or any(not again.inputs for _, _, again in merges):
        raise PaseError(
            "it has a variable without a value", where=where, fix="check that the file is complete"
        )
    names = f"{frame}/cond", f"{frame}/body"
    args = [f"{m.name}:0" for m, _, _ in merges] + constants
    made[names[0]] = TfBody(
        name=names[0], nodes=ordered(nodes, [condition], args, where), args=tuple(args), outputs=(condition,)
    )
    results = [again.inputs[0] for _, _, again in merges] + constants
    made[names[1]] = TfBody(
        name=names[1],
        nodes=ordered(nodes, results, inside + constants, where),
        args=(*inside, *constants),
        outputs=tuple(results),
    )
    attr = {"cond": _Functions(_Name(names[0])), "body": _Functions(_Name(names[1]))}
    loop = TfNode(name=f"{frame}/raised", op="While", inputs=tuple(e.inputs[0] for e in outer), attr=attr)
    return {loop.name: loop, **exits}
