"""Seconds of a stated strategy's step, composed of its parts' work and collectives, in passes and stages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.compiler.stages.places import ends_sum_s, send_s
from pase.machine import CostModel, Mesh, mesh_from
from pase.plan.error_bar import StepPart, collective_kind
from pase.stated.parts import Part, Parts, Sent
from pase.stated.program import Program
from pase.stated.strategy import Strategy
from pase.stated.timeline import Pipeline, Unit, passes, pipelined, stage_layers

if TYPE_CHECKING:
    from pase.machine.types import CollectiveKind

__all__ = ["StatedStep"]


@dataclass(frozen=True, kw_only=True)
class StatedStep:
    """A strategy's step, composed of its parts. model: prices collectives as single calls of a library."""

    parts: Parts
    s: Strategy
    program: Program
    model: CostModel
    mesh: Mesh
    micro_batches: int

    def collective_s(self, kind: CollectiveKind, axes: tuple[str, ...], nbytes: float) -> float:
        bits = self.mesh.bits(axes)
        return float(self.model.collective(kind, self.mesh, bits, nbytes)) if bits and nbytes else 0.0

    def over_data(
        self, part: Part, kind: CollectiveKind, nbytes: float, where: str = "all", *, recompute: bool = False
    ) -> float:
        """Return the seconds of a collective of a part's parameters over the ranks that share them.

        It is one call for the part, or one for each weight if the program sends weights one by one.

        If parameters are sharded over only some of the ranks (hsdp), gathers and scatters stay within these inner
        ranks, and the sum of their shards crosses the others.

        nbytes: the bytes of one parameter.
        recompute: whether to count only those that are gathered once more between recomputation and backward.
        """
        s, p, total = self.s, self.program, 0.0
        gathers = kind == "all_gather"
        together = [(axes, elements, 1.0) for axes, elements in part.elements.items()]
        for axes, elements, calls in (
            self._not_kept(part) if recompute else part.arrays if p.one_by_one else together
        ):
            if not axes or (gathers and elements < p.stays):
                continue
            if s.data > 1 and s.shard > 1 and "data" in axes and where != "all":
                inner = mesh_from(f"outer={s.data},inner={self.mesh.devices // s.data}", self.mesh.devices)
                # Ranks of a shard group are adjacent, with the stride of tensor and context parallelism.
                wide = mesh_from(
                    f"outer={s.data},inner={s.shard},rest={inner.sizes[1] // s.shard}", self.mesh.devices
                )
                axis = 1 << (1 if where == "inner" else 0)
                size = elements * nbytes / (1 if where == "inner" else s.shard)
                once = float(self.model.collective(kind, wide, axis, size))
            else:
                once = self.collective_s(kind, axes, elements * nbytes)
            total += calls * (once + s.shard * p.host_for_rank_s)
        return total

    def _not_kept(self, part: Part) -> list[tuple[tuple[str, ...], float, float]]:
        """Return the part's arrays that do not stay gathered from recomputation to backward.

        After them come more elements than the program keeps, counted once forward and once back.
        """
        out, after = [], 0.0
        for axes, elements, many in part.arrays[::-1]:
            if 2 * after >= self.program.stays_within:
                out.append((axes, elements, many))
            after += elements * many
        return out

    def copying_s(self, nbytes: float) -> float:
        """Return the seconds of copies in device memory, from the bytes that they read and write."""
        return nbytes / self.model.machine.device.moved_bytes_per_s

    def copied_s(self, part: Part, backward: bool) -> float:
        """Return the seconds of copies in the program's own buffers for gathers and sums of sharded weights."""
        out, back = self.program.copied
        shared = sum(e for axes, e in part.elements.items() if axes)
        recompute = sum(e * many for _, e, many in self._not_kept(part)) if self._regathers(backward) else 0.0
        copied = shared * ((back if backward else 0.0) + out) + recompute * out
        return self.copying_s(copied) if self.s.zero == 3 else 0.0

    def metrics_s(self, part: Part) -> float:
        """Return the seconds for what the program computes from the logits for its log."""
        logits = self.parts.logits if part is self.parts.last else 0.0
        return self.copying_s(logits * self.program.metrics_bytes)

    def added_s(self, part: Part) -> float:
        """Return the mean seconds per micro-batch to add a part's gradients to those of earlier micro-batches."""
        p, m = self.program, self.micro_batches
        if not p.adds_apart or (p.sums_each and self.s.zero >= 2 and self.s.pipeline == 1):
            return 0.0  # the product adds, or only a shard is added
        nbytes = part.parameters * (p.bytes.used + 2 * p.bytes.gradient)
        return self.copying_s(nbytes) * (1 - 1 / m)

    def rearranged_s(self, part: Part, backward: bool) -> float:
        """Return the seconds of copies of what tensor parallelism gathers and scatters; 0 if it is sent in chunks."""
        if not self.program.rearranges or self.s.asynchronous:
            return 0.0
        copied = 0.0
        for c in part.sent:
            if "model" in c.axes and c.kind in ("all_gather", "reduce_scatter"):
                times = float(c.backward == backward) + (
                    c.recompute_runs if backward and not c.backward else 0.0
                )
                copied += 2 * c.nbytes * c.times * times
        return self.copying_s(copied)

    def _regathers(self, backward: bool) -> bool:
        """Whether the pass recomputes and then gathers what did not stay gathered."""
        return backward and self.s.zero == 3 and self.s.remat == "full"

    def gather_s(self, part: Part, backward: bool = False) -> float:
        """Return the seconds to gather a part's weights for a pass, if ZeRO-3 shards them."""
        if self.s.zero < 3:
            return 0.0
        used = self.program.bytes.used
        third = (
            self.over_data(part, "all_gather", used, "inner", recompute=True)
            if self._regathers(backward)
            else 0.0
        )
        return self.over_data(part, "all_gather", used, "inner") + third

    def buckets(self, parts: Sequence[Part]) -> list[list[Part]]:
        """Return for each part, in the order of backward, the buckets that are full after it."""
        how = self.program.buckets
        if how is None or self.s.zero > 1:
            return [[part] for part in parts]
        limit = how.elements(self.s.ranks * self.s.context)
        filling: dict[tuple[str, ...], float] = {}
        out = []
        for part in parts:
            full = []
            for axes, elements, many in reversed(part.arrays):
                filling[axes] = filling.get(axes, 0.0) + elements * many
                if filling[axes] >= limit:
                    full.append(Part(elements={axes: filling.pop(axes)}))
            out.append(full)
        out[-1] += [Part(elements={axes: elements}) for axes, elements in filling.items()]
        return out

    def summed(self, blocks: int, first: bool, last: bool) -> list[Part]:
        """Return what a device sums, or gathers after the update, call by call in the order of backward."""
        later, held = list[Part](), blocks
        if self.program.buckets is not None and self.s.zero <= 1:
            held = math.ceil(blocks / self.s.chunks)
            for i in range(1, self.s.chunks):
                each = (blocks - held) / (self.s.chunks - 1)
                ends = [self.parts.last] * (last and i == 1)
                later.append(_joined([(self.parts.block, each), *((part, 1.0) for part in ends)]))
            last = last and self.s.chunks == 1
        parts = [self.parts.last] * last + [self.parts.block] * held + [self.parts.first] * first
        return later + [bucket for full in self.buckets(parts) for bucket in full]

    def sum_s(self, part: Part) -> float:
        """Return the seconds to sum a part's gradients once."""
        s, b = self.s, self.program.bytes
        if s.zero in (2, 3) and not self.program.sums_whole:
            inner = self.over_data(part, "reduce_scatter", b.summed, "inner")
            return inner + (
                self.over_data(part, "all_reduce", b.summed, "outer") if s.data > 1 < s.shard else 0.0
            )
        if s.zero == 1 and not self.program.sums_whole:
            return self.over_data(part, "reduce_scatter", b.summed)
        return self.over_data(part, "all_reduce", b.summed)

    def sent_s(self, part: Part, backward: bool) -> float:
        """Return the seconds of collectives between products in a pass; backward includes those that it repeats."""
        out, ring, exchange = 0.0, 0.0, 0.0
        in_pieces: list[tuple[Sent, float]] = []
        for c in part.sent:
            now = (0.0 if backward else c.seconds) if not c.backward else (c.seconds if backward else 0.0)
            now += c.seconds * c.recompute_runs if backward and not c.backward else 0.0
            whole = c.kind in ("all_gather", "reduce_scatter")
            if "context" in c.axes and self.program.context == "ring" and whole:
                ring += now
            elif self.program.exchange_overlaps and c.kind == "all_to_all" and "expert" in c.axes:
                exchange += now
            elif self.s.asynchronous and "model" in c.axes and whole:
                in_pieces.append((c, now))
            else:
                out += now
        # A ring's hops overlap with the attention over the keys that have arrived. Its first part needs no hop.
        ways = self.s.context
        hidden = part.attention_s[int(backward)] * (1 - 1 / ways) if ways > 1 else 0.0
        compute = part.backward_s + part.recompute_s if backward else part.forward_s
        out += max(ring - hidden, 0.0) + max(exchange - compute, 0.0)
        return out + self.decomposed_s(in_pieces)

    def decomposed_s(self, sent: Sequence[tuple[Sent, float]]) -> float:
        """Return what collectives that run during products add to a pass. sent: each with its seconds in the pass."""
        how, units = self.program.decomposition, self.model.machine.device.compute_units
        part_after = 1 / self.s.tensor if how.after is None else how.after
        scattered = [(c, now) for c, now in sent if c.kind == "reduce_scatter"]
        after = [
            now * part_after if c.kind == "reduce_scatter" and not c.backward else 0.0 for c, now in sent
        ]
        # Each waits for its own products only, as often as it is repeated with them.
        waited = sum(
            max(now - c.beside_s * now / c.seconds, chunk)
            for (c, now), chunk in zip(sent, after, strict=True)
            if c.seconds
        )
        held = (sum(now for _, now in scattered) - sum(after)) * (how.units / units if units else 0.0)
        added = 0.0
        if how.summed:  # this reads a chunk from each rank and writes one
            nbytes = sum(c.nbytes * c.times * now / c.seconds for c, now in scattered if c.seconds)
            added = self.copying_s(nbytes * (1 + 1 / self.s.tensor))
        return waited + held + added

    def offloaded_s(self, part: Part) -> float:
        """Return the seconds for which the link to the host is busy while a part runs, forward or backward.

        The copies of the offloaded blocks overlap with all blocks alike.
        """
        rate = self.model.machine.device.host_bytes_per_s
        if rate is None or part is not self.parts.block:
            return 0.0
        return part.kept * self.s.offload / self.parts.blocks / rate

    def units(
        self, backward: bool, blocks: int, first: bool, last: bool, *, gathers: bool, sums: bool
    ) -> list[Unit]:
        """Return the units of a pass, in order."""
        out = []
        parts = [self.parts.first] * first + [self.parts.block] * blocks + [self.parts.last] * last
        order = parts[::-1] if backward else parts
        full = self.buckets(order) if sums else [[] for _ in order]
        for part, summed in zip(order, full, strict=True):
            out.append(
                Unit(
                    compute_s=max(self._working_s(part, backward, gathers or sums), self.offloaded_s(part)),
                    sent_s=self.sent_s(part, backward),
                    gather_s=self.gather_s(part, backward) if gathers else 0.0,
                    sum_s=sum(self.sum_s(bucket) for bucket in summed),
                )
            )
        return out

    def _working_s(self, part: Part, backward: bool, copies: bool) -> float:
        """Return the seconds in which the device works on a part in a pass, or waits for launches.

        copies: whether weights are gathered or gradients summed in this pass.
        """
        device = part.backward_s + part.recompute_s if backward else part.forward_s
        device += self.copied_s(part, backward) if copies else 0.0
        device += self.rearranged_s(part, backward)
        device += self.metrics_s(part) + self.added_s(part) if backward else 0.0
        return max(device, part.host_s[int(backward)] - self.sent_s(part, backward))

    @property
    def slow(self) -> float:
        device = self.model.machine.device
        return self.model.machine.collective_units / device.compute_units if device.compute_units else 0.0

    def pass_s(
        self, backward: bool, blocks: int, first: bool, last: bool, *, gathers: bool, sums: bool
    ) -> tuple[float, float]:
        units = self.units(backward, blocks, first, last, gathers=gathers, sums=sums)
        p = self.program
        return passes(
            units,
            self.slow,
            prefetches=p.prefetches[int(backward)],
            sums_overlap=p.sums_overlap,
            sums_queue=p.buckets is not None and self.s.zero <= 1,
        )

    def step(self) -> tuple[dict[str, float], Pipeline | None]:
        return self._staged() if self.s.pipeline > 1 else (self._straight(), None)

    def _straight(self) -> dict[str, float]:
        """Return the seconds of a step without stages: micro-batches one after the other."""
        n, m, p = self.parts.blocks, self.micro_batches, self.program
        zero3 = self.s.zero == 3
        keeps = not p.regathers
        each = {}
        for last_one in (False, True):
            sums = last_one or (p.sums_each and self.s.zero >= 2)
            forward = self.pass_s(False, n, True, True, gathers=zero3, sums=False)
            backward = self.pass_s(True, n, True, True, gathers=zero3 and not keeps, sums=sums)
            each[last_one] = forward, backward
        (f, fx), (b, bx) = each[False]
        (g, gx), (c, cx) = each[True]
        exposed = (m - 1) * (fx + bx) + gx + cx
        sent = sum(self.sent_s(part, back) * k for part, k in self._counted(n) for back in (False, True))
        total = (m - 1) * (f + b) + g + c
        causes = self._causes(total, exposed, m * sent)
        if self.s.offload:
            block = self.parts.block
            needed = [self._working_s(block, back, zero3) for back in (False, True)]
            causes["copies to the host"] = m * n * sum(max(self.offloaded_s(block) - s, 0.0) for s in needed)
            causes["compute"] -= causes["copies to the host"]
        return causes | self._update(n, True, True)

    def _counted(self, blocks: int) -> list[tuple[Part, int]]:
        return [(self.parts.first, 1), (self.parts.block, blocks), (self.parts.last, 1)]

    def _causes(self, total: float, exposed: float, sent: float) -> dict[str, float]:
        return {"compute": total - exposed - sent, "between products": sent, "weights and gradients": exposed}

    def _update(self, blocks: int, first: bool, last: bool) -> dict[str, float]:
        """Return the optimizer's update on a rank's shard, and the first micro-batch's own work on the new weights.

        With ZeRO-1 and 2, the new weights are gathered.
        """
        parts = [(self.parts.block, blocks), (self.parts.first, float(first)), (self.parts.last, float(last))]
        s, p = self.s, self.program
        ways = s.shard * s.context if s.zero else 1
        seconds = sum((part.update_s / ways + part.once_s) * k for part, k in parts)
        if p.executor.update_bytes:
            copied = sum(part.parameters * k for part, k in parts) * p.executor.update_bytes / ways
            seconds += self.copying_s(copied)
        whole = sum(part.parameters * k for part, k in parts) * p.bytes.gradient
        seconds += self.copying_s(whole * p.whole_passes)
        gathered = 0.0
        if s.zero in (1, 2):
            each = [
                self.over_data(bucket, "all_gather", p.bytes.used, "inner")
                for bucket in self.summed(blocks, first, last)
            ]
            gathered = sum(each)
            if p.prefetches[0]:  # overlaps with the next step's forward, except for the first weights
                forward = sum(part.forward_s * k for part, k in parts)
                gathered = max(gathered - forward, each[-1])
        return {"update": seconds, "new weights": gathered}

    def _staged(self) -> tuple[dict[str, float], Pipeline]:
        """Return a pipelined step. Weights are gathered once. Gradients are summed once, after the last backward."""
        s, p, m = self.s, self.program, self.micro_batches
        layers = stage_layers(self.parts.blocks, s.pipeline, p.stage_ends, self.parts.layers_before)
        ends = [(n, i == 0, i == len(layers) - 1) for i, n in enumerate(layers)]
        forward, backward = (
            [self.pass_s(back, *end, gathers=False, sums=False)[0] for end in ends] for back in (False, True)
        )
        schedule = s.schedule or ("interleaved" if s.chunks > 1 else "1f1b")
        pipe = pipelined(
            forward,
            backward,
            m,
            s.chunks,
            self.send_s(),
            schedule,
            sends_overlap=p.sends_overlap and schedule == "interleaved",
        )
        slowest = max(f + b for f, b in zip(forward, backward, strict=True))
        after = [
            (self._sums_after_s(*end, window), self._update(*end))
            for end, window in zip(ends, backward, strict=True)
        ]
        sums, update = max(after, key=lambda stage: stage[0] + sum(stage[1].values()))
        n = max(layers)
        gathers = n * self.gather_s(self.parts.block)
        gathers = max(gathers - forward[0], self.gather_s(self.parts.block)) if p.prefetches[0] else gathers
        sent = m * n * sum(self.sent_s(self.parts.block, back) for back in (False, True))
        seconds = {
            "compute": m * slowest - sent,
            "between products": sent,
            "pipeline": pipe.step_s - m * slowest,
            "weights and gradients": sums + self.tied_s() + gathers,
        }
        return seconds | update, pipe

    def _sums_after_s(self, blocks: int, first: bool, last: bool, backward_s: float) -> float:
        """Return the seconds by which a stage's sums of gradients outlast the last micro-batch's backward."""
        each = [self.sum_s(bucket) for bucket in self.summed(blocks, first, last)]
        return max(sum(each) - (backward_s if self.program.sums_overlap else 0.0), each[-1])

    def send_s(self) -> float:
        """Return the seconds to send one micro-batch's activations to the next stage once."""
        s = self.s
        split = s.tensor if self.program.sends_parts and not s.sequence else 1
        whole = self.parts.block.entry
        sent = send_s(self.model, s.pipeline, self.mesh.devices, whole / split)
        return sent + (self.collective_s("all_gather", ("model",), whole) if split > 1 else 0.0)

    def tied_s(self) -> float:
        """Return the seconds to sum tied gradients over the first and the last stage, after both are computed."""
        nbytes = self.parts.tied.parameters * self.program.bytes.summed
        return ends_sum_s(self.model, self.s.pipeline, self.mesh.devices, nbytes)

    def error_parts(self, seconds: Mapping[str, float]) -> Iterator[StepPart]:
        """Yield the step by what errors of its price have in common. seconds: by cause, from ``step``."""
        parts = self._counted(self.parts.blocks)
        yield from _as_long([_scaled(w, k) for part, k in parts for w in part.spent], seconds["compute"])
        sent = [
            StepPart(
                kind=collective_kind(c.nbytes),
                shape=(c.kind, c.axes, c.nbytes),
                seconds=k * c.seconds * (1 + c.recompute_runs),
            )
            for part, k in parts
            for c in part.sent
        ]
        yield from _as_long(sent, seconds["between products"])
        weights = seconds["weights and gradients"] + seconds["new weights"]
        yield StepPart(kind="large collective", shape=("weights",), seconds=weights)
        yield StepPart(
            kind="large collective", shape=("host",), seconds=seconds.get("copies to the host", 0.0)
        )
        yield StepPart(kind="light", shape=("update",), seconds=seconds["update"], family="parameter")

    @property
    def kernels_s(self) -> dict[str, float]:
        """The seconds of a step in a device's kernels, by kind of work, with what backward repeats."""
        out: defaultdict[str, float] = defaultdict(float)
        for part, k in self._counted(self.parts.blocks):
            for w in part.spent:
                out[w.kind] += self.micro_batches * k / self.s.pipeline * w.seconds
        return dict(out)

    @property
    def recompute_s(self) -> float:
        """The seconds of a step in which a device computes again what it did not keep."""
        again = sum(part.recompute_s * k for part, k in self._counted(self.parts.blocks))
        return self.micro_batches * again / self.s.pipeline

    def collectives_s(self) -> dict[str, float]:
        """Return the seconds of every collective of a step, hidden or not, by purpose."""
        m, n = self.micro_batches, self.parts.blocks / self.s.pipeline
        parts = [(self.parts.block, n), (self.parts.first, 1.0), (self.parts.last, 1.0)]
        out: dict[str, float] = {}
        for part, k in parts:
            for c in part.sent:
                name = f"{c.kind} over {'·'.join(c.axes)}"
                out[name] = out.get(name, 0.0) + m * k * c.seconds * (1 + c.recompute_runs)
            passes_ = (False, True) if self.program.regathers else (False,)
            micro_batches = 1 if self.s.pipeline > 1 else m
            gathers = sum(self.gather_s(part, back) for back in passes_) * micro_batches
            if gathers:
                out["gathers of weights"] = out.get("gathers of weights", 0.0) + k * gathers
        sums = sum(self.sum_s(bucket) for bucket in self.summed(math.ceil(n), True, True))
        if sums:
            often = micro_batches if self.program.sums_each and self.s.zero >= 2 else 1
            out["sums of gradients"] = often * sums
        if self.s.pipeline > 1 and (tied := self.tied_s()):
            out["sums of tied gradients"] = tied
        return out


def _scaled(part: StepPart, by: float) -> StepPart:
    return replace(part, seconds=part.seconds * by)


def _as_long(parts: Sequence[StepPart], seconds: float) -> Iterator[StepPart]:
    """Yield the parts, scaled so that they take this long together."""
    total = sum(p.seconds for p in parts)
    yield from (_scaled(p, seconds / total) for p in parts if total)


def _joined(parts: Sequence[tuple[Part, float]]) -> Part:
    """Return the elements of so many of each part together."""
    elements: dict[tuple[str, ...], float] = {}
    for part, many in parts:
        for axes, n in part.elements.items():
            elements[axes] = elements.get(axes, 0.0) + n * many
    return Part(elements=elements)
