"""Explains in sentences why a plan splits a model as it does, from its layers, its meshes and other priced plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pase.ir.types import PRODUCTS
from pase.plan.answer import axes_text, name_in_words
from pase.plan.table import bytes_text, cost_text
from pase.plan.types import NodePlan, PlanData
from pase.questions.explain import Explanation

__all__ = ["reasons"]

_TIE = 1e-9


def reasons(e: Explanation) -> list[str]:
    """What an expert would say about the plan's figures, most important first."""
    return [
        *_axes(e.plan),
        *_storage(e.plan),
        *_communication(e),
        *_meshes(e.plan),
        *_best_baseline(e.plan),
        *_next_best(e),
    ]


def _axes(plan: PlanData) -> Iterator[str]:
    """What each mesh axis splits, weighted by the products' time. Axes that split the same dims share a sentence."""
    heavy = [n for n in plan.nodes if n.op in PRODUCTS]
    whole = sum(n.cost.compute for n in heavy)
    alike: dict[tuple[str, str], list[str]] = {}
    for axis in plan.mesh.names if whole else ():
        time: dict[str, float] = {}
        for n in heavy:
            dim = next((d for d, axes in n.split.items() if axis in axes), "")
            time[dim] = time.get(dim, 0.0) + n.cost.compute
        dim, most = max(time.items(), key=lambda kv: kv[1])
        alike.setdefault((dim, f"{most / whole:.0%}"), []).append(axis)
    size = plan.mesh.by_name
    for (dim, share), axes in alike.items():
        ways = math.prod(size[a] for a in axes)
        what = _dim_words(dim, heavy) if dim else "Nothing"
        over = f"{axes_text(axes, plan.mesh)}, {ways} ways,"
        yield f"{what} is split over {over} in products that take {share} of the time of all products."


_DIMS = {"b": "b (the batch)", "s": "s (the sequence)"}


def _dim_words(dim: str, products: Sequence[NodePlan]) -> str:
    """The dim of that letter, with what it is or, for dims of a layer's own, the layer that takes longest."""
    if dim in _DIMS:
        return f"Dimension {_DIMS[dim]}"
    longest = max((n for n in products if n.split.get(dim)), key=lambda n: n.cost.compute)
    return f"Dimension {dim} (size {longest.sizes[dim]:,} in {longest.name})"


def _storage(plan: PlanData) -> Iterator[str]:
    split = sum(any(t.storage) for t in plan.parameters.values())
    state = sum(t.state is not None and any(t.state) for t in plan.parameters.values())
    if not plan.parameters:
        return
    kept = bytes_text(plan.memory.parameters)
    text = f"{split} of {len(plan.parameters)} parameters are sharded; a device holds {kept} of parameters."
    if state:
        text += f" For {state}, gradient and optimizer state are sharded further than the parameter, as in ZeRO-2."
    yield text


def _communication(e: Explanation) -> Iterator[str]:
    plan = e.plan
    sent = [c for c in e.causes if c.group == "communication" and c.cost > 0]
    if not sent or not plan.cost:
        yield "Nothing is sent between devices."
        return
    yield (
        f"Exposed communication is {plan.exposed / plan.cost:.1%} of the step, {cost_text(plan.exposed, plan.unit)}"
        + (
            f" of {cost_text(plan.communication, plan.unit)}; the rest overlaps compute"
            if plan.hidden
            else ""
        )
        + f". The largest cause: {sent[0].what}, {cost_text(sent[0].cost, plan.unit)}."
    )


def _meshes(plan: PlanData) -> Iterator[str]:
    others = sorted(
        (t for t in plan.tried if t.mesh != plan.mesh.sizes and t.cost > plan.cost * (1 + _TIE)),
        key=lambda t: t.cost,
    )
    if others and plan.cost:
        mesh, more = "×".join(map(str, others[0].mesh)), others[0].cost / plan.cost - 1
        yield f"Of {len(plan.tried)} meshes searched, the next best ({mesh}) {_more_text(more)}."


def _best_baseline(plan: PlanData) -> Iterator[str]:
    """The best baseline: among those that fit in memory, or among all if none fits."""
    if not plan.baselines or not plan.cost:
        return
    fitting = {n: c for n, c in plan.baselines.items() if n not in plan.too_large}
    cost, name = min((c, n) for n, c in (fitting or plan.baselines).items())
    ways = _more_text(cost / plan.cost - 1)
    yield f"The best baseline, {name_in_words(name)}, {ways}."


def _more_text(more: float) -> str:
    """
    >>> _more_text(0.1234), _more_text(0.00002), _more_text(0.0), _more_text(4.118)
    ('costs 12.34% more', 'costs less than 0.01% more', 'is as good', 'costs 5.1 times as much')
    """
    if more <= _TIE:
        return "is as good"
    if more >= 1:
        return f"costs {1 + more:.2g} times as much"
    return f"costs {more:.2%} more" if more >= 0.0001 else "costs less than 0.01% more"


def _next_best(e: Explanation) -> Iterator[str]:
    base = e.plan.cost
    finite = {n: c / base - 1 for n, c in e.next_best.items() if base and c != float("inf")}
    if not finite:
        return
    near, far = min(finite, key=lambda n: finite[n]), max(finite, key=lambda n: finite[n])
    yield (
        f"Of the {len(finite)} layers that were tried, {near} has the closest alternative: the best plan that splits "
        f"it differently {_more_text(finite[near])}."
    )
    if len(finite) > 1:
        yield f"The split of {far} matters most: any other split costs at least {finite[far]:.1%} more."
