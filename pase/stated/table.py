"""A priced strategy as text for people."""

from __future__ import annotations

from collections import defaultdict

from pase.plan.answer import step_text
from pase.plan.table import bytes_text, cost_text
from pase.plan.types import PlanData
from pase.stated.price import Priced

__all__ = ["as_lines", "difference", "difference_text", "like_search_text", "signed", "unsearched_text"]

_LONG_BUBBLE = 0.2
"""The fraction of a step above which its bubble is worth a hint."""


def like_search_text(p: Priced, row: str, plan: PlanData) -> str:
    """Return one line: what the search's price of the same split is, and how that program differs."""
    recomputed = (
        f"{len(plan.remat)} blocks recomputed" if plan.remat else "recomputation as the model marks it"
    )
    batches = f"{plan.accumulate} micro-batch{'es' * (plan.accumulate > 1)}"
    return (
        f"search {step_text(plan)} in {bytes_text(plan.memory.total)}, as the row {row} of 'pase compare': {batches}, "
        f"{recomputed}, no work of a framework's own. The price above has {p.micro_batches} of {p.strategy.micro} "
        f"examples a rank, remat={p.strategy.remat} and executor {p.program}"
    )


def unsearched_text(row: str) -> str:
    """Return one line: why the search's price of the same split, a row of ``pase compare``, is another."""
    return (
        f"search 'pase compare' prices this split as {row}, with micro-batches of its own, recomputation as the model "
        "marks it and no work of a framework's own; --like-search gives that price and what makes the difference"
    )


def difference(p: Priced, plan: PlanData) -> dict[str, float]:
    """Return by how many seconds the price's step is longer than the search's, by cause; they add up."""
    there: defaultdict[str, float] = defaultdict(float)
    for n in plan.nodes:
        for w in n.work:
            there["update" if w.phase == "update" else _WORDS.get(w.kind, "products")] += w.cost
    here = defaultdict(float, update=p.seconds["update"])
    for kind, seconds in p.kernels_s.items():
        here[_WORDS.get(kind, "products")] += seconds
    here["the framework's copies and launches"] = p.seconds["compute"] - sum(p.kernels_s.values())
    out = {k: here[k] - there[k] for k in {**here, **there}}
    return out | {"communication that is waited for": p.step_s - plan.cost - sum(out.values())}


_WORDS = {"attention": "attention", "light": "other ops", "memory": "other ops"}


def difference_text(p: Priced, plan: PlanData) -> str:
    """Return one line: what each part of the difference between two prices of a split costs."""
    again = sum(w.cost * w.late for n in plan.nodes for w in n.work)
    parts = " · ".join(f"{k} {signed(v)}" for k, v in difference(p, plan).items() if abs(v) > 1e-3 * p.step_s)
    return (
        f"       {signed(p.step_s - plan.cost)} here: {parts}; of the compute, {cost_text(again, 's')} there and "
        f"{cost_text(p.recompute_s, 's')} here are recomputation"
    )


def signed(seconds: float) -> str:
    """
    >>> signed(1.5), signed(-0.02)
    ('+1.50 s', '-20 ms')
    """
    return f"{'-' if seconds < 0 else '+'}{cost_text(abs(seconds), 's')}"


def as_lines(name: str, p: Priced) -> list[str]:
    """Return the lines: headline, where the time goes, collectives, memory."""
    mesh = " ".join(f"{k}={v}" for k, v in zip(p.mesh.names, p.mesh.sizes, strict=True))
    s = p.strategy
    batches = "micro-batch" if p.micro_batches == 1 else "micro-batches"
    lines = [
        f"{name} as {s} on {s.devices} devices of {p.machine}, executor '{p.program}': predicted, not searched",
        f"step   {cost_text(p.step_s, 's')}{'' if p.bar is None else f' {p.bar}'}   {p.throughput}",
        "       " + " · ".join(f"{k} {cost_text(v, 's')}" for k, v in p.seconds.items() if v > 0),
        f"runs   {p.micro_batches} {batches} of {s.micro} on each of {s.ranks} data-parallel ranks, "
        f"recomputation {s.remat}; a stage's mesh {mesh}",
    ]
    if p.pipeline is not None:
        lines.append(
            f"stages {s.pipeline} of {s.chunks} chunks: bubble {p.pipeline.bubble:.1%} of the step, the first rank "
            f"holds {p.pipeline.in_flight:.3g} micro-batches"
        )
        if s.chunks == 1 and p.pipeline.bubble > _LONG_BUBBLE:
            lines.append("       more chunks (vp=2, 4, …) shorten the bubble")
    if p.added:
        lines.append(f"adds   {' · '.join((*p.added, f'executor {p.program}'))}")
    if p.collectives_s:
        sent = " · ".join(f"{k} {cost_text(v, 's')}" for k, v in p.collectives_s.items())
        lines.append(f"sends  {sent} (including hidden ones)")
    m = p.memory
    kinds = ("parameters", "gradients", "optimizer", "activations", "gathered", "logits")
    lines.append(
        f"memory {bytes_text(m.total - m.reserve)} of {bytes_text(p.device_memory - m.reserve)} on the {m.rank} "
        f"stage's devices   "
        + " · ".join(f"{k} {bytes_text(getattr(m, k))}" for k in kinds if getattr(m, k) >= 1)
    )
    if not p.fits:
        lines.append("WARNING it does not fit")
    lines += [f"note   {remark}" for remark in p.noted]
    return lines
