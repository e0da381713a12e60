"""A plan in a sentence: how the model is split, the step, the memory, and whether a common strategy would do."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

from pase.files.quantities import bytes_text, cost_text
from pase.machine import Mesh
from pase.plan.error_bar import interval
from pase.plan.types import PlanData, TensorPlan
from pase.tables.axis_layout import Placement

__all__ = [
    "answer",
    "axes_text",
    "family",
    "gap_text",
    "meanings",
    "mesh_text",
    "name_in_words",
    "split_text",
    "step_text",
    "strategy_in_words",
]

Meaning = Literal["data", "sequence", "model", "spare"]

_STEMS: tuple[Meaning, ...] = ("data", "sequence", "model", "spare")
_SHARDED = 0.9
"""The part of the data-parallel ways over which parameters must be stored, on average, for the plan to be FSDP."""
_EQUAL, _CLOSE = 0.0005, 0.02
"""The gains below which a common strategy is as fast, and below which it is the simpler choice."""
_ASIDE = ("all_devices", "any_program", "no_padding", "no stages")
"""Entries of ``PlanData.baselines`` that are plans of the search, not common strategies."""


def answer(plan: PlanData) -> str:
    """Return the first line of a plan's text."""
    memory = plan.memory.total + plan.waiting_bytes
    held = f"{bytes_text(memory)} of {bytes_text(plan.memory_there)} a device"
    step = f"{step_text(plan)} a step"
    parts = [strategy_in_words(plan), f"{step}, {held}" if plan.fits else f"{step}, DOES NOT FIT: {held}"]
    if plan.fits and (said := _verdict(plan)):
        parts.append(said)
    return "; ".join(parts)


def step_text(plan: PlanData) -> str:
    """Return the predicted step, with how far it may be off if that is known for the machine."""
    bar = interval(plan)
    return cost_text(plan.cost, plan.unit) + ("" if bar is None else f" {bar}")


def strategy_in_words(plan: PlanData) -> str:
    """Return how the model is split, in the terms that people use."""
    if plan.devices == 1:
        return "one device" + _recomputation(plan)
    means, sizes = meanings(plan), plan.mesh.by_name
    ways = {m: math.prod(sizes[a] for a in sizes if means[a] == m) for m in _STEMS}
    data = ways["data"] * ways["sequence"]
    parts = []
    if (p := plan.pipeline) is not None:
        chunks = f" of {p.chunks} chunks" if p.chunks > 1 else ""
        parts.append(f"{p.degree} pipeline stages{chunks} ({p.schedule})")
    if data > 1:
        over = f"{data} devices" if data == plan.devices else str(data)
        kind, aside = _data_parallel(plan, {a for a in sizes if means[a] in ("data", "sequence")}, over)
        asides = [aside, f"the sequence over {ways['sequence']}" if ways["sequence"] > 1 else ""]
        said = ", ".join(filter(None, asides))
        parts.append(f"{kind} ({said})" if said else kind)
    if ways["model"] > 1:
        parts.append(f"model parallelism over {ways['model']}")
    if ways["spare"] > 1:
        parts.append(f"{ways['spare']} devices that do the same")
    return " × ".join(parts) + _recomputation(plan)


def _recomputation(plan: PlanData) -> str:
    if plan.pipeline is not None:
        return ""
    said = f", {plan.accumulate} micro-batches" if plan.accumulate > 1 else ""
    return said + (f", {len(plan.remat)} blocks recomputed" if plan.remat else "")


def meanings(plan: PlanData) -> dict[str, Meaning]:
    """Return for each mesh axis what it splits in most of the compute."""
    used: dict[str, Counter[Meaning]] = {a: Counter() for a in plan.mesh.names}
    for n in plan.nodes:
        for dim, axes in n.split.items() if n.op not in ("parameter", "input") else ():
            for a in axes:
                used[a][_MEANS.get(dim, "model")] += n.cost.compute  # type: ignore[assignment]
    return {a: seen.most_common(1)[0][0] if seen else "spare" for a, seen in used.items()}


_MEANS: dict[str, Meaning] = {"b": "data", "s": "sequence"}
"""The names that ``pase.ir.named`` gives to the dims of the batch and of the sequence."""


def _data_parallel(plan: PlanData, axes: Collection[str], over: str) -> tuple[str, str]:
    """Return which kind of data parallelism it is, and of which parameters this is not true.

    axes: those that split the batch. over: the devices, as text.
    """
    mine = plan.trained
    results = _gathered_as_results(plan, axes)
    gathered = {path: t for path, t in mine.items() if path in results or not _used_split(t, axes)}
    whole, others = (sum(t.elements for t in found.values()) for found in (mine, gathered))
    if (
        2 * others < whole
    ):  # what is never gathered makes no FSDP: tables that are split by column, for instance
        state = {path: t for path, t in plan.parameters.items() if path not in mine}
        kind, aside = _data_parallel(replace(plan, parameters={**gathered, **state}), axes, over)
        said = f"{1 - others / whole:.0%} of the parameters split where they are used"
        return kind, f"{said}, of the others {aside}" if aside else said
    tensors = mine.values()
    ways = math.prod(plan.mesh.by_name[a] for a in axes)
    stored = _shards(plan, axes, [(t, t.storage) for t in tensors])
    if stored >= _SHARDED * ways:
        return f"FSDP over {over}", ""
    plain = f"data parallelism over {over}"
    if stored > 1.5:
        most, share = _usual_shards(plan, axes)
        how = "most" if share > 0.5 else f"{share:.0%} of the"
        return f"FSDP over {over}", f"{how} parameters" + (f" over {most}" if most != ways else "")
    if _shards(plan, axes, [(t, t.state or t.storage) for t in plan.parameters.values()]) > 1.5:
        return f"{plain} with optimizer state sharded (ZeRO-2)", ""
    return plain, ""


def _used_split(t: TensorPlan, axes: Collection[str]) -> bool:
    """Whether a parameter is stored split along some of these axes and gathered along none of them."""
    own = {a for split in t.storage for a in split if a in axes}
    uses = t.used_as or (t.storage,)
    return bool(own) and all(own <= {a for split in used for a in split} for used in uses)


def _gathered_as_results(plan: PlanData, axes: Collection[str]) -> set[str]:
    """Return the parameters of which a node without other data makes something that is gathered along some of these
    axes: a weight divided by its norm is gathered after the division."""
    sent = {c.source for c in plan.collectives if c.kind == "all_gather" and set(c.axes) & set(axes)}
    made_of = {n.name: {n.name} for n in plan.nodes if n.op == "parameter"}
    for n in plan.nodes:  # makers come before their readers
        if n.reads and all(r in made_of for r in n.reads):
            made_of[n.name] = set[str]().union(*(made_of[r] for r in n.reads))
    of_nodes = (of for name, of in made_of.items() if name in sent and name not in of)
    return set[str]().union(*of_nodes)


def _shards(plan: PlanData, axes: Collection[str], stored: Iterable[tuple[TensorPlan, Placement]]) -> float:
    """Return over how many devices along these axes parameters are stored, on average over what a device holds."""
    sizes = plan.mesh.by_name
    whole = held = 0.0
    for t, placement in stored:
        whole += t.elements
        held += t.elements / math.prod(sizes[a] for split in placement for a in split if a in axes)
    return whole / held if held else 1.0


def _usual_shards(plan: PlanData, axes: Collection[str]) -> tuple[int, float]:
    """Return over how many devices along these axes most sharded elements are stored, and their share of all."""
    sizes, found = plan.mesh.by_name, Counter[int]()
    for t in plan.trained.values():
        found[math.prod(sizes[a] for split in t.storage for a in split if a in axes)] += t.elements
    ways = max((w for w in found if w > 1), key=lambda w: found[w])
    return ways, found[ways] / found.total()


def family(name: str) -> str:
    """Return the family of a baseline: those of several degrees are one.

    >>> family("megatron_sp_fsdp_16x2"), family("zero2"), family("megatron_tp8_pp4_dp2")
    ('megatron', 'zero2', 'megatron with stages')
    """
    head = name.split("_")[0]
    if re.search(r"_pp\d", name):
        return f"{head} with stages"
    return head if head in ("megatron", "expert", "context", "hsdp") else name


def name_in_words(name: str) -> str:
    """Return a baseline's name as people say it.

    >>> name_in_words("fsdp"), name_in_words("megatron_sp_fsdp_16x2"), name_in_words("hsdp_4x8")
    ('plain FSDP', 'Megatron 16×2 (sp, fsdp)', 'HSDP 4×8')
    >>> name_in_words("megatron_tp8_pp4_dp2")
    'Megatron TP 8 · PP 4 · DP 2'
    """
    if name in _IN_WORDS:
        return _IN_WORDS[name]
    head, *rest = name.split("_")
    if all(re.fullmatch(r"(tp|pp|dp)\d+", p) for p in rest) and rest:
        return f"{_IN_WORDS.get(head, head)} {' · '.join(f'{p[:2].upper()} {p[2:]}' for p in rest)}"
    head = _IN_WORDS.get(head, head)
    degrees = [p.replace("x", "×") for p in rest if re.fullmatch(r"\d+(x\d+)*", p)]
    kinds = [p for p in rest if not re.fullmatch(r"\d+(x\d+)*", p)]
    return " ".join([head, *degrees]) + (f" ({', '.join(kinds)})" if kinds else "")


_IN_WORDS = {
    "data_parallel": "plain data parallelism",
    "zero2": "plain ZeRO-2",
    "fsdp": "plain FSDP",
    "owt": "one weird trick",
    "hsdp": "HSDP",
    "megatron": "Megatron",
    "expert": "expert parallelism",
    "context": "context parallelism",
}


def _verdict(plan: PlanData) -> str:
    """Compare the plan with the fastest common strategy that fits. On one device there is nothing to compare."""
    if plan.devices == 1:
        return ""
    fitting = {k: v for k, v in plan.baselines.items() if k not in plan.too_large and k not in _ASIDE}
    if not fitting:
        return (
            "no common strategy fits" if plan.baselines and set(plan.baselines) <= set(plan.too_large) else ""
        )
    simple = [k for k in ("data_parallel", "fsdp", "zero2") if k in fitting]
    least = min(fitting.values())
    name = next(
        (k for k in simple if fitting[k] <= least * (1 + _EQUAL)), min(fitting, key=fitting.__getitem__)
    )
    gain = fitting[name] / plan.cost - 1 if plan.cost else 0.0
    called = name_in_words(name)
    best = plan.baselines.get("any_program")
    if best is not None and plan.cost:  # a target was named, which may not run the simpler programs
        return f"{_against(gain, called)}, {_against(best / plan.cost - 1, 'any program')}"
    if gain < -_EQUAL:
        return f"{called} is {-gain:.1%} faster"
    if gain < _EQUAL:
        return f"{called} is as fast: take that"
    if gain < _CLOSE:
        return f"{gain:.1%} faster than {called}: take {called} unless that matters"
    return f"{gain:.0%} faster than {called}" if gain < 1 else f"{1 + gain:.1f} times as fast as {called}"


def _against(gain: float, other: str) -> str:
    """
    >>> _against(0.013, "plain FSDP"), _against(-0.2, "any program"), _against(0.0, "plain FSDP")
    ('1.3% faster than plain FSDP', '20.0% slower than any program', 'as fast as plain FSDP')
    """
    return (
        f"as fast as {other}"
        if abs(gain) < _EQUAL
        else f"{abs(gain):.1%} {'faster' if gain > 0 else 'slower'} than {other}"
    )


def gap_text(cost: float, bound: float, unit: str) -> str:
    """Return how far an answer may be from the best.

    >>> gap_text(10.0, 9.9, "s"), gap_text(10.0, 0.0, "s")
    ('best found; at most 1.0% from the best (bound 9.90 s)', 'best found; no bound')
    """
    if bound <= 0:
        return "best found; no bound"
    gap = cost / bound - 1
    less = f"{gap:.1%}" if gap >= 0.0005 else "0.05%"
    return f"best found; at most {less} from the best (bound {cost_text(bound, unit)})"


def mesh_text(mesh: Mesh) -> str:
    """Return the mesh with the axes of one meaning together.

    >>> mesh_text(Mesh(names=("data", "data2", "model"), sizes=(2, 4, 8)))
    'data=8 (2×4)  model=8'
    """
    parts = []
    for stem, axes in _groups(mesh).items():
        sizes = [mesh.by_name[a] for a in axes]
        apart = f" ({'×'.join(map(str, sizes))})" if len(sizes) > 1 else ""
        parts.append(f"{stem}={math.prod(sizes)}{apart}")
    return "  ".join(parts)


def axes_text(axes: Sequence[str], mesh: Mesh) -> str:
    """Return some axes by the names that ``mesh_text`` gives them, with how much of a name's ways are meant if not all.

    >>> mesh = Mesh(names=("data", "data2", "model"), sizes=(2, 4, 8))
    >>> axes_text(("data", "data2", "model"), mesh), axes_text(("data2",), mesh)
    ('data·model', 'data (4 of 8)')
    """
    groups, sizes = _groups(mesh), mesh.by_name
    stems = {a: stem for stem, all_ in groups.items() for a in all_}
    parts = []
    for stem, together in groupby(axes, key=stems.__getitem__):
        ways, of = (math.prod(sizes[a] for a in some) for some in (together, groups[stem]))
        parts.append(stem if ways == of else f"{stem} ({ways} of {of})")
    return "·".join(parts)


def split_text(split: Iterable[tuple[str, Sequence[str]]], mesh: Mesh) -> str:
    """Return dim:axes of what is split. split: dims and their axes. Partial sums that wait (``pending``) are left out.

    >>> mesh = Mesh(names=("data", "data2", "model"), sizes=(2, 4, 8))
    >>> split_text([("b", ("data", "data2")), ("h", ("data2", "model")), ("pending", ("model",))], mesh)
    'b:data  h:data (4 of 8)·model'
    """
    return "  ".join(f"{d}:{axes_text(axes, mesh)}" for d, axes in split if d != _WAITS)


_WAITS = "pending"
"""The name of a node's dim that is no dim of a tensor: its axes hold partial sums."""


def _groups(mesh: Mesh) -> dict[str, list[str]]:
    """Return the axes by the name that pase numbered them under: data, data2 and data3 are data."""
    groups: dict[str, list[str]] = {}
    for a in mesh.names:
        stem = a.rstrip("0123456789")
        groups.setdefault(stem if stem in _STEMS and stem in mesh.names else a, []).append(a)
    return groups
