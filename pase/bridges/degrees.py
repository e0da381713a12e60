"""Replays a traced run at another degree of tensor or pipeline parallelism, from its own kernels matched by shape.

The plan's graph of the model lists the matrix products of a device at the degree that ran and at the requested degree.
Each measured product is matched to the first list by the sizes of its operands and its position; the second list gives
its new shape. If a kernel of that shape was measured (in this run, or in other traces given for this purpose), its time
is used. Otherwise the measured time is scaled by the cost model's roofline for the two shapes, and the report says how
much of the time was scaled. Stages consist of the measured tasks of their layers (``pase.replay.changes.restage``).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pase.errors import Infeasible, PaseError
from pase.files.json_values import JsonObject
from pase.pipeline.registry import schedule
from pase.pipeline.types import Kind
from pase.replay.changes.restage import StageAction, StageTransfer, staged
from pase.replay.changes.rewrite import Rewrite, Rewritten
from pase.replay.graph import DataflowGraph, launching_calls
from pase.replay.simulation.collective_cost import WireLine, collective_line
from pase.replay.simulation.insert import Inserted, insert_after
from pase.replay.simulation.sections import (
    OpShape,
    ProductKey,
    Sections,
    StepPhase,
    op_shapes,
    product_of,
    sections,
)
from pase.replay.simulation.simulate import subgraph
from pase.replay.types import COLLECTIVE, GPU_KINDS, OPERATIONS, Timeline, on_stream
from pase.stated.ops import StatedOps, stated_ops
from pase.stated.timeline import stage_layers
from pase.tables.itemize import LocalWork

__all__ = ["KernelTimes", "by_stages", "by_tensor", "kernel_times", "loaded_kernel_times"]

Kernel = tuple[str, tuple[int, ...]]
"""The shape of a kernel: (name, elements of its largest operand). A matrix product has the name "product" and the
elements of its three arrays, whichever op runs it."""
KernelTimes = Mapping[Kernel, float]
"""Median measured time of each kernel shape, in ns."""
_PRODUCT = "product"
_PHASE = {"forward": StepPhase.FORWARD, "backward": StepPhase.BACKWARD}
_DISCIPLINE = "1f1b"
_FUSED = (2, 3, 4)
"""How many products of one operand a framework may run as a single one, such as queries, keys and values."""
_HALVES = ("bf16", "f16", "half", "fp16")


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A product of a micro-batch as it ran (``now``) and at the requested degree (``then``).

    node: the plan's node. together: how many of the plan's products ran as one. heads: for attention that ran as
    separate matrix products, the number of heads in the micro-batch, summed over its examples; else 0.
    """

    node: str
    now: LocalWork
    then: LocalWork
    together: int = 1
    heads: int = 0

    def key(self, work: LocalWork) -> ProductKey:
        """The product's key, as in ``product_of``."""
        a, b, c = sorted(self.sizes(work))
        return a, b, c

    def sizes(self, work: LocalWork) -> tuple[int, int, int]:
        """Returns the elements of both operands and of the result."""
        assert work.mnk is not None
        m, n, k = (round(x) for x in work.mnk)
        many = round(self.heads * work.flops / self.now.flops) if self.heads else 1
        return many * m * k, many * self.together * k * n, many * self.together * m * n

    @property
    def roofline(self) -> float:
        """The cost model's ratio of the time at the requested degree to the time as it ran."""
        a, b = self.now.cost / self.now.times, self.then.cost / self.then.times
        return b / a if a > 0 else 1.0


# ---- stages


def by_stages(stages: int, wire_bytes_per_s: float | None = None) -> Rewrite:
    """Returns the rewrite that splits the run into pipeline stages, each on its own device.

    Stages get equal numbers of layers. Micro-batches stay the same and run in the 1F1B order. Raises Infeasible if the
    trace does not show micro-batches and layers, or has fewer layers than stages.
    """
    if stages < 1:
        raise PaseError(
            f"{stages} is not a positive number",
            where=f"what-if stages={stages}",
            fix="give at least 1 stage",
        )

    def change(t: Timeline, g: DataflowGraph) -> Rewritten:
        s = sections(t, g)
        if s.layers < stages:
            raise Infeasible(
                f"the matrix products of the trace repeat {s.layers} times in a micro-batch, so there are only "
                f"{s.layers} layers to divide",
                where=f"what-if stages={stages}",
                fix=f"give at most {s.layers} stages",
            )
        layers = stage_layers(s.layers, stages)
        orders: list[list[StageAction]] = [
            [(StepPhase.FORWARD if a.kind is Kind.FORWARD else StepPhase.BACKWARD, a.micro) for a in order]
            for order in schedule(_DISCIPLINE, stages, s.micro_batches).orders
        ]
        sent = _transfer(g, s, wire_bytes_per_s)
        note = (
            f"{s.layers} layers as {'+'.join(map(str, layers))}, {s.micro_batches} micro-batches ({_DISCIPLINE}), "
            f"{sent.nbytes / 2**20:.3g} MiB to the next stage in {sent.duration_ns / 1e6:.3f} ms"
        )
        if s.micro_batches < stages:
            note += "; with fewer micro-batches than stages, most stages idle: accumulate gradients over more"
        return Rewritten(graph=staged(g, s, orders, layers, sent), note=note, detail={"method": "stages"})

    return change


def _transfer(g: DataflowGraph, s: Sections, wire_bytes_per_s: float | None) -> StageTransfer:
    """Returns what a layer sends to the next one, with its time from the link's bandwidth or the run's collectives."""
    second = [i for i in s.order.tolist() if i in s.product and s.phase[i] == StepPhase.FORWARD]
    second = [i for i in second if s.layer[i] == min(1, s.layers - 1)]
    shape = s.shapes[second[0]]
    operands = shape.product or shape.operands
    x = operands[0] if shape.product or shape.name == "aten::mm" or len(operands) < 3 else operands[1]
    width = shape.itemsize or (2 if any(w in g.task_name(second[0]) for w in _HALVES) else 4)
    nbytes = width * math.prod(x)
    if wire_bytes_per_s:
        return StageTransfer(nbytes=nbytes, duration_ns=nbytes / wire_bytes_per_s * 1e9)
    line = collective_line(g)
    if line is None:
        raise Infeasible(
            "the time of a transfer between stages is unknown, because the run has no all-reduce of known size",
            fix="give the link's bandwidth, such as --wire 100GB/s",
        )
    return StageTransfer(nbytes=nbytes, duration_ns=line.step_ns + nbytes * line.ns_per_wire_byte)


# ---- tensor parallelism


def kernel_times(sources: Iterable[tuple[Timeline, DataflowGraph]]) -> KernelTimes:
    """Returns the median times of the kernels measured in any of the runs, by shape."""
    return _medians((g, op_shapes(t, g)) for t, g in sources)


def _medians(sources: Iterable[tuple[DataflowGraph, Mapping[int, OpShape]]]) -> dict[Kernel, float]:
    found: dict[Kernel, list[float]] = defaultdict(list)
    for g, shapes in sources:
        for i, s in shapes.items():
            found[_kernel(s)].append(float(g.duration_ns[i]))
    return {k: float(np.median(v)) for k, v in found.items()}


def _kernel(s: OpShape) -> Kernel:
    key = product_of(s)
    return (s.name, (s.elements,)) if key is None else (_PRODUCT, key)


def by_tensor(
    ways: int,
    *,
    model: str,
    ran: str = "tp=1",
    machine: str | None = None,
    measured: KernelTimes | None = None,
) -> Rewrite:
    """Returns the rewrite that runs the model with tensor parallelism over ``ways`` devices.

    model: the model, with the batch of one micro-batch on one rank.
    ran: the strategy that the run used.
    measured: kernel times from other runs on this kind of device.

    Raises Infeasible if the run is not of that model, or if the model cannot be split that way.
    """
    if ways < 1:
        raise PaseError(
            f"{ways} is not a positive number", where=f"what-if tensor={ways}", fix="give at least 1 device"
        )
    others = [p for p in ran.split(",") if p and not p.startswith("tp=")]
    now = stated_ops(model, ran, machine)
    then = stated_ops(model, ",".join([f"tp={ways}", *others]), machine)

    def change(t: Timeline, g: DataflowGraph) -> Rewritten:
        # All ranks would run the same program, so only the first one is replayed.
        g = subgraph(g, g.rank == g.ranks[0])
        s = sections(t, g)
        return _Retensored(g, s, now, then, ways, measured or {}).changed()

    return change


class _Retensored:
    """Builds the measured graph with every kernel at another degree of tensor parallelism."""

    def __init__(
        self,
        g: DataflowGraph,
        s: Sections,
        now: StatedOps,
        then: StatedOps,
        ways: int,
        measured: KernelTimes,
    ) -> None:
        self.g, self.s, self.now, self.then, self.ways = g, s, now, then, ways
        self.duration = g.duration_ns.copy()
        self.pair = self._matched()
        self.measured = {**measured, **_medians([(g, s.shapes)])}

    def changed(self) -> Rewritten:
        g = self.g
        scaled_ns = total_ns = 0.0
        for i, p in self.pair.items():
            shape = p.key(p.then)
            same = shape == p.key(p.now)
            known = float(g.duration_ns[i]) if same else self.measured.get((_PRODUCT, shape))
            self.duration[i] = g.duration_ns[i] * p.roofline if known is None else known
            total_ns += self.duration[i]
            scaled_ns += self.duration[i] if known is None else 0.0
        light = self._light()
        update = self._update()
        inserted, moved = self._collectives()
        out = insert_after(replace(g, duration_ns=self.duration), inserted)
        share = scaled_ns / total_ns if total_ns else 0.0
        note = (
            f"{len(self.pair)} products matched by shape; of their {total_ns / 1e6:.2f} ms "
            + (
                f"{share:.0%} were never measured at their new shape and are scaled by the roofline"
                if share
                else "all"
            )
            + (" are measured at their new shape" if not share else "")
            + f"; {light} other kernels scaled with their operands, update ×{update:.3g}; {moved}"
        )
        detail: JsonObject = {"method": "shapes", "scaled_by_roofline": float(share)}
        return Rewritten(graph=out, note=note, detail=detail)

    def _matched(self) -> dict[int, _Pair]:
        """Returns measured product → the plan's product. Raises Infeasible if the two lists differ."""
        s = self.s
        out: dict[int, _Pair] = {}
        for phase in (StepPhase.FORWARD, StepPhase.BACKWARD):
            in_order = self._products_in_order(phase)
            for micro in range(s.micro_batches):
                mine = [
                    i
                    for i in s.order.tolist()
                    if i in s.product and s.phase[i] == phase and s.micro[i] == micro
                ]
                seen: Counter[ProductKey] = Counter()
                for i in mine:
                    if (attends := self._attends(phase, s.product[i])) is not None:
                        out[i] = attends
                        continue
                    listed = in_order.get(s.product[i]) or self._as_one(in_order, s.product[i])
                    if seen[s.product[i]] >= len(listed):
                        self._refuse(i, phase, Counter(s.product[j] for j in mine), in_order)
                    out[i] = listed[seen[s.product[i]]]
                    seen[s.product[i]] += 1
        return out

    def _products_in_order(self, phase: StepPhase) -> dict[ProductKey, list[_Pair]]:
        """Returns shape → the plan's products of that shape, in the order in which they run."""
        layered: dict[ProductKey, list[tuple[int, _Pair]]] = defaultdict(list)
        names = list(self.now.work)
        for name in names if phase == StepPhase.FORWARD else names[::-1]:
            for a, b in zip(self.now.work[name], self.then.work[name], strict=True):
                if a.kind == "matmul" and _PHASE.get(a.phase) == phase and a.mnk is not None:
                    p = _Pair(node=name, now=a, then=b)
                    layered[p.key(a)].append((round(a.times), p))
        out: dict[ProductKey, list[_Pair]] = {}
        for key, pairs in layered.items():
            # Products of one shape in a loop over layers alternate. Products outside the loop come before or after it.
            most = max(n for n, _ in pairs)
            out[key] = [p for iteration in range(most) for n, p in pairs if iteration < n]
        return out

    def _as_one(self, in_order: dict[ProductKey, list[_Pair]], key: ProductKey) -> list[_Pair]:
        """Returns the plan's products of one operand that the framework ran as a single product of this shape."""
        for pairs in in_order.values():
            for n in _FUSED:
                p = replace(pairs[0], together=n)
                if p.key(p.now) == key and p.now.phase == "forward" and len(pairs) >= n:
                    return [p] * (len(pairs) // n)
        if any(p.now.phase == "backward" for pairs in in_order.values() for p in pairs):
            # Both gradients of a product involve the same three arrays, so they have the key of the forward product.
            return [
                p for p in self._as_one(self._products_in_order(StepPhase.FORWARD), key) for _ in range(2)
            ]
        return []

    def _attends(self, phase: StepPhase, key: ProductKey) -> _Pair | None:
        """Returns the plan's attention of which this is a matrix product (scores, or scores times values), if any.

        The product's size gives the number of heads, because programs may batch them differently.
        """
        for name, work in self.now.work.items():
            for a, b in zip(work, self.then.work[name], strict=True):
                if a.kind != "attention" or _PHASE.get(a.phase) != phase or a.mnk is None:
                    continue
                q, k, width = (round(x) for x in a.mnk)
                heads, rest = divmod(max(key), max(q * width, k * width, q * k))
                p = _Pair(node=name, now=a, then=b, heads=heads)
                if heads and not rest and p.key(a) == key:
                    return p
        return None

    def _refuse(
        self, i: int, phase: StepPhase, counts: Counter[ProductKey], in_order: dict[ProductKey, list[_Pair]]
    ) -> None:
        shape, key = self.s.shapes[i], self.s.product[i]
        planned = ", ".join(f"{len(v)} of {_extents(v[0].now)}" for v in list(in_order.values())[:4])
        raise Infeasible(
            f"a micro-batch of the run has {counts[key]} {phase.name.lower()} products {shape.name} of "
            f"{shape.operands}, but the plan of the model ({self.now.strategy}) has {len(in_order.get(key, ()))}; it "
            f"has {planned}",
            where="--model",
            fix="give the model with the run's own sizes and the batch of one micro-batch of a rank",
        )

    def _light(self) -> int:
        """Scales each kernel that is not a product like the product before or after it. Returns how many changed."""
        s, g = self.s, self.g
        attention = {p: self._attention(p) for p in ("forward", "backward")}
        heads = _ways(self.now.strategy) / self.ways
        kernels = [
            i
            for i in s.order.tolist()
            if g.kind[i] in GPU_KINDS and g.kind[i] != COLLECTIVE and int(g.device[i]) == s.compute
        ]
        following: dict[int, _Pair] = {}
        ahead: _Pair | None = None
        for i in reversed(kernels):
            ahead = self.pair.get(i, ahead)
            if ahead is not None:
                following[i] = ahead
        changed, behind = 0, None
        for i in kernels:
            if i in self.pair:
                behind = self.pair[i]
                continue
            shape = s.shapes.get(i)
            if shape is None or s.phase[i] == StepPhase.UPDATE:
                continue
            attends = "attention" in shape.name
            if attends:
                ratio = attention["forward" if s.phase[i] == StepPhase.FORWARD else "backward"]
            else:
                ratio = _share(shape.elements, behind, following.get(i))
            # Tensor parallelism splits the head dim of attention's operands, and the hidden dim of other operands.
            fewer = round(shape.elements * (heads if attends else ratio))
            known = self.measured.get((shape.name, (fewer,))) if fewer != shape.elements else None
            self.duration[i] = g.duration_ns[i] * ratio if known is None else known
            changed += ratio != 1.0
        return changed

    def _attention(self, phase: str) -> float:
        cost = [
            sum(w.cost for v in o.work.values() for w in v if w.kind == "attention" and w.phase == phase)
            for o in (self.now, self.then)
        ]
        return cost[1] / cost[0] if cost[0] > 0 else 1.0

    def _update(self) -> float:
        """Scales the update's kernels and the gradient collectives by the parameter bytes per device.

        Returns the ratio.
        """
        s, g = self.s, self.g
        a, b = (o.nbytes(of_parameters=True, phase="update") for o in (self.now, self.then))
        ratio = b / a if a else 1.0
        update = (s.phase == StepPhase.UPDATE) & on_stream(g.kind)
        self.duration[update] = g.duration_ns[update] * ratio
        line = collective_line(g)
        for i in np.flatnonzero((g.kind == COLLECTIVE) & ~self._between_now()).tolist():
            fixed = self._fixed_ns(i, line)
            self.duration[i] = fixed + (g.duration_ns[i] - fixed) * ratio
        return ratio

    def _between_now(self) -> np.ndarray:
        """Returns a mask of the measured collectives between products, recognized by kind and size."""
        g = self.g
        sizes = {(OPERATIONS.index(c.kind), c.nbytes) for c in self.now.between}
        return np.array([(int(o), int(b)) in sizes for o, b in zip(g.operation, g.nbytes, strict=True)]) & (
            g.kind == COLLECTIVE
        )

    def _collectives(self) -> tuple[dict[int, list[Inserted]], str]:
        """Scales the run's collectives between products, or returns those to insert if it has none; and a note."""
        g = self.g
        mine = np.flatnonzero(self._between_now())
        if self.now.between and not len(mine):
            raise Infeasible(
                f"the plan of the model ({self.now.strategy}) has an {self.now.between[0].kind} of "
                f"{self.now.between[0].nbytes:,} bytes between products, but the run has none of that size",
                where="--ran",
                fix="give the strategy that the run used",
            )
        line = collective_line(g)
        if len(mine):
            old = max(int(g.ways[mine].max()), 2)
            part, steps = (1 - 1 / self.ways) / (1 - 1 / old), (self.ways - 1) / (old - 1)
            for i in mine.tolist():
                fixed = self._fixed_ns(i, line)
                self.duration[i] = fixed * steps + (g.duration_ns[i] - fixed) * part
            if self.ways == 1:
                self._not_launched(mine.tolist())
            return {}, f"{len(mine)} collectives between products over {self.ways} ranks instead of {old}"
        out: dict[int, list[Inserted]] = defaultdict(list)
        for c in self.then.between:
            ns = 1e9 * c.cost / c.times if line is None else line.all_reduce_ns(c.nbytes, self.ways)
            if line is not None and c.kind != "all_reduce":
                ns /= 2  # once around the ring; an all-reduce goes around twice
            new = Inserted(
                name=f"{c.kind} between products",
                duration_ns=ns,
                nbytes=c.nbytes,
                operation=OPERATIONS.index(c.kind),
                ways=self.ways,
            )
            for i in self._places(c.source if c.phase == "forward" else c.node, _PHASE[c.phase], c.times):
                out[i].append(new)
        n = sum(map(len, out.values()))
        by = "the run's own all-reduces" if line else "the cost model"
        return dict(
            out
        ), f"{n} collectives between products, priced by {by}" if n else "none between products"

    def _fixed_ns(self, i: int, line: WireLine | None) -> float:
        """Returns the part of a measured collective's time that does not grow with its bytes."""
        steps = max(int(self.g.ways[i]) - 1, 1)
        return min(line.step_ns * steps, float(self.g.duration_ns[i])) if line else 0.0

    def _not_launched(self, gone: list[int]) -> None:
        """Removes the host's time for launching tasks that no longer run."""
        g, call_of = self.g, launching_calls(self.g)
        for i in gone:
            if i in call_of:
                self.duration[call_of[i]] = 0.0
                self.duration[g.before_on_thread.get(call_of[i], call_of[i])] = 0.0

    def _places(self, node: str, phase: StepPhase, times: int) -> list[int]:
        """Returns the measured products of a node, or the last product of each layer and micro-batch if it has none."""
        s = self.s
        mine = [i for i, p in self.pair.items() if p.node == node and s.phase[i] == phase]
        if mine and phase == StepPhase.BACKWARD:
            # A product has two gradient products. The collective goes after the second one, when both have run.
            mine = mine[1::2] if len(mine) == 2 * times * s.micro_batches else mine
        if mine:
            return mine
        last: dict[tuple[int, int], int] = {}
        for i in self.pair:
            if s.phase[i] == phase:
                last[int(s.micro[i]), int(s.layer[i])] = i
        return list(last.values())


def _share(elements: int, behind: _Pair | None, ahead: _Pair | None) -> float:
    """Returns the scale factor of an array with this many elements.

    It is matched to the result of the product before its use, or to the first operand of the product after it.
    """
    if behind is not None and behind.sizes(behind.now)[2] == elements:
        return behind.sizes(behind.then)[2] / elements
    if ahead is not None and ahead.sizes(ahead.now)[0] == elements:
        return ahead.sizes(ahead.then)[0] / elements
    return 1.0


def _ways(strategy: str) -> int:
    """Returns the degree of tensor parallelism in a strategy."""
    return next((int(p[3:]) for p in strategy.split(",") if p.startswith("tp=")), 1)


def _extents(w: LocalWork) -> str:
    return "×".join(f"{x:g}" for x in w.mnk or ())


def loaded_kernel_times(paths: Iterable[Path]) -> KernelTimes:
    """Returns the kernel times measured in traces of other runs on this kind of device."""
    from pase.replay import align, estimate, load, measure

    made = []
    for path in paths:
        m = measure(align(load(path)))
        made.append((m.timeline, estimate(m, m.steady())))
    return kernel_times(made)
