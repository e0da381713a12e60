"""The memory of a device during a step, by kind, computed from what each node of a plan keeps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pase.memory.account import MemoryKind
from pase.plan.types import NodePlan, PlanData

__all__ = ["StepMemory", "step_memory"]


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The memory of a device over a step.

    times: the times of the corners, in the plan's unit.
    forward: the time when backward begins.
    held: kind -> bytes at each corner; it is linear between corners.
    """

    times: tuple[float, ...]
    forward: float
    held: Mapping[MemoryKind, tuple[float, ...]]

    @property
    def peak(self) -> float:
        """The peak in bytes."""
        return max(sum(v[i] for v in self.held.values()) for i in range(len(self.times)))


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Nodes that run one after another, or in a loop if they are repeated, with their total cost and kept bytes.

    gradients: those that they complete. early: those that are there from the end of forward.
    recompute: region that is recomputed -> what these nodes keep of it.
    """

    forward: float
    backward: float
    activations: float
    gradients: float
    early: float
    recompute: Mapping[int, float]


def step_memory(plan: PlanData) -> StepMemory | None:
    """Return the memory of a device over a step.

    None if the plan does not say what its nodes keep, or if these bytes do not make up the plan's peak. The plan then
    counts differently, for example for a compiler that fuses products (``pase.memory.course``).

    Activations grow during forward and are freed during backward. A program that is not trained, or is a whole step,
    has only forward here. A gradient exists from the backward of the first node that reads its parameter. That of a
    loop on several devices, or of summed micro-batches, exists from the end of forward (``pase.memory.backward``). What
    a rematerialized region keeps is there from the begin of the region's backward, for each node until its own.
    Temporary buffers of ops are not included. Communication that overlaps with compute shortens everything in
    proportion.
    """
    m = plan.memory
    sums = {k: float(sum(n.keeps.get(k, 0) for n in plan.nodes)) for k in _KINDS}
    slack = len(plan.nodes) + 1  # each node's bytes are rounded
    most_recompute = sum(n.kept_for_recompute for n in plan.nodes)
    alike = all(abs(sums[k] - getattr(m, k)) <= slack for k in ("parameters", "optimizer"))
    less = m.gradients <= sums["gradients"] + slack
    less = less and m.activations <= sums["activations"] + most_recompute + slack
    if not (alike and less and any(sums.values())):
        return None
    runs = _runs(plan)
    times, held = [0.0], {k: [0.0] for k in _KINDS}
    held["parameters"], held["optimizer"] = [sums["parameters"]], [sums["optimizer"]]
    trained = sums["gradients"] > 0
    for r in runs:
        _corner(times, held, r.forward + (0.0 if trained else r.backward), activations=r.activations)
    forward = times[-1]
    if early := sum(r.early for r in runs) if trained else 0.0:
        _corner(times, held, 0.0, gradients=early)
    again: Counter[int] = Counter()
    for r in runs:
        again.update(r.recompute)
    for r in reversed(runs) if trained else ():
        if begun := sum(again.pop(region, 0.0) for region in r.recompute):
            _corner(times, held, 0.0, activations=begun)
        _corner(times, held, r.backward, activations=-r.activations, gradients=r.gradients)
        if over := sum(r.recompute.values()):
            _corner(times, held, 0.0, activations=-over)
    shorter = 1 - plan.hidden / times[-1] if times[-1] > plan.hidden else 1.0
    return StepMemory(
        times=tuple(shorter * t for t in times),
        forward=shorter * forward,
        held={k: tuple(v) for k, v in held.items()},
    )


_KINDS: tuple[MemoryKind, ...] = ("parameters", "optimizer", "gradients", "activations")


def _corner(times: list[float], held: dict[MemoryKind, list[float]], after: float, **more: float) -> None:
    times.append(times[-1] + after)
    for kind, values in held.items():
        values.append(max(values[-1] + more.get(kind, 0.0), 0.0))


def _runs(plan: PlanData) -> list[_Stretch]:
    """Return the plan's nodes in stretches."""
    gradient = _gradients(plan.nodes)
    sent: dict[str, list[float]] = {}
    for c in plan.collectives:
        sent.setdefault(c.node, [0.0, 0.0])[c.phase != "forward"] += c.cost
    sooner = plan.devices > 1 or plan.accumulate > 1
    working = [n for n in plan.nodes if n.op != "parameter"]
    out = []
    carried = 0.0
    for times, members in itertools.groupby(working, key=lambda n: n.times):
        together = [*members]
        for nodes in [together] if times > 1 else [[n] for n in together]:
            kept = float(sum(n.keeps.get("activations", 0) for n in nodes))
            if nodes[0].op == "carry":  # made in each iteration of the loop that follows
                carried, kept = carried + kept, 0.0
            elif times > 1:
                carried, kept = 0.0, carried + kept
            made = sum(gradient.get(n.name, 0.0) for n in nodes)
            early = made if times > 1 and sooner else 0.0
            out.append(
                _Stretch(
                    forward=sum(_cost(n, True) + sent.get(n.name, (0.0, 0.0))[0] for n in nodes),
                    backward=sum(_cost(n, False) + sent.get(n.name, (0.0, 0.0))[1] for n in nodes),
                    activations=kept,
                    gradients=made - early,
                    early=early,
                    recompute=_recomputed(nodes),
                )
            )
    if carried:  # by loops with a single iteration
        out.append(
            _Stretch(forward=0.0, backward=0.0, activations=carried, gradients=0.0, early=0.0, recompute={})
        )
    return out


def _recomputed(nodes: Sequence[NodePlan]) -> Counter[int]:
    """Return what nodes keep of each region that is recomputed."""
    out: Counter[int] = Counter()
    for n in nodes:
        if n.kept_for_recompute:
            out[n.recomputed_in] += n.kept_for_recompute
    return out


def _cost(n: NodePlan, forward: bool) -> float:
    return sum(w.cost for w in n.work if (w.phase == "forward") == forward)


def _gradients(nodes: Sequence[NodePlan]) -> dict[str, float]:
    """Return the bytes of gradients that each node's backward completes: those of parameters that it reads first."""
    out: dict[str, float] = {}
    of = {n.name: n for n in nodes}
    seen: set[str] = set()
    for n in nodes:
        for r in n.reads:
            if of[r].op == "parameter" and r not in seen:
                seen.add(r)
                out[n.name] = out.get(n.name, 0.0) + of[r].keeps.get("gradients", 0)
    return out
