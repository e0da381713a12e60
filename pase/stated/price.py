"""The price of a stated strategy: seconds and bytes of a step as a program runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pase.errors import Infeasible
from pase.ir import Graph
from pase.machine import CostModel, Machine, Mesh, mesh_from
from pase.plan.throughput import StepWork, Throughput, step_work
from pase.stated.parts import Part, Parts, parts_of
from pase.stated.place import place
from pase.stated.program import Program
from pase.stated.strategy import Strategy
from pase.stated.timeline import Pipeline, Unit, passes, pipelined

__all__ = ["Priced", "RankMemory", "price_strategy", "stage_layers"]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on the rank that holds most. gathered: weights while they are whole; logits: at the loss; reserve: what the
    program's libraries and allocator take."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    logits: float
    reserve: float
    rank: str

    @property
    def total(self) -> float:
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.gathered + self.logits
            + self.reserve
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Priced:
    """What a stated strategy takes. seconds: by cause, and they add up to step_s; moved: by kind of collective, seconds of
    all of them in a step of one rank, hidden ones too."""

    strategy: Strategy
    program: str
    machine: str
    mesh: Mesh
    micro_batches: int
    step_s: float
    seconds: Mapping[str, float]
    moved: Mapping[str, float]
    memory: RankMemory
    device_memory: int
    work: StepWork
    pipeline: Pipeline | None

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.device_memory

    @property
    def throughput(self) -> Throughput:
        return self.work.at(self.step_s, self.strategy.devices)

    def to_json(self) -> dict[str, Any]:
        """As ``pase price --json`` prints it."""
        t, m, p = self.throughput, self.memory, self.pipeline
        return {
            "strategy": str(self.strategy),
            "executor": self.program,
            "machine": self.machine,
            "devices": self.strategy.devices,
            "mesh": dict(zip(self.mesh.names, self.mesh.sizes, strict=True)),
            "micro_batches": self.micro_batches,
            "step_s": self.step_s,
            "mfu": t.mfu,
            "tflops_per_device": t.tflops_per_device,
            "tokens_per_s_per_device": t.tokens_per_s_per_device,
            "examples_per_s_per_device": t.examples_per_s_per_device,
            "seconds": dict(self.seconds),
            "collectives_s": dict(self.moved),
            "memory_bytes": m.total,
            "memory": {k: getattr(m, k) for k in m.__dataclass_fields__},
            "device_memory": self.device_memory,
            "fits": self.fits,
            "pipeline": None if p is None else {"bubble": p.bubble, "in_flight": p.in_flight},
        }


def price_strategy(
    graph: Graph, s: Strategy, program: Program, model: CostModel, examples: int, share: float = 1.0
) -> Priced:
    """Price a strategy on a graph whose batch is one micro-batch of all data-parallel ranks (x 1/share).

    examples: of the whole batch. Infeasible where the model cannot be split so, with the reason.
    """
    micro = s.micro or 1
    m = examples // (s.ranks * micro)
    if m * s.ranks * micro != examples:
        raise Infeasible(
            f"a batch of {examples} is not whole micro-batches of {micro} on {s.ranks} data-parallel ranks"
        )
    placed = place(graph, s, model)
    parts = parts_of(graph, placed, s, program, model, share)
    run = _Run(parts=parts, s=s, program=program, model=model, mesh=placed.mesh, micro_batches=m)
    seconds, pipeline = run.step()
    work = step_work(graph, model.machine)
    part = examples / (work.examples or examples)
    work = StepWork(
        flops=work.flops * part, at_peak_s=work.at_peak_s * part, examples=examples,
        tokens=None if work.tokens is None else round(work.tokens * part),
    )  # fmt: skip
    if s.precision == "fp8":
        work = replace(work, at_peak_s=_fp8_peak_s(graph, work, model.machine, part))
    return Priced(
        strategy=s, program=program.name, machine=model.machine.name, mesh=placed.mesh, micro_batches=m,
        step_s=sum(seconds.values()), seconds=seconds, moved=run.moved(), memory=run.memory(pipeline),
        device_memory=model.machine.device.memory_bytes, work=work, pipeline=pipeline,
    )  # fmt: skip


def _fp8_peak_s(graph: Graph, work: StepWork, machine: Machine, part: float) -> float:
    """With the blocks' products with weights at fp8's peak."""
    from pase.plan.throughput import model_flops
    from pase.stated.program import weight_products

    out = 0.0
    for n in graph.nodes:
        alone = replace(graph, nodes=(n,))
        eighth = weight_products(graph, n) and any(op.times != 1 for op in n.ops)
        for dtype, flops in model_flops(alone):
            out += flops / machine.device.peak("float8_e4m3fn" if eighth else dtype)
    return out * part


def stage_layers(blocks: int, stages: int) -> list[int]:
    """Blocks of each stage: equal where that divides; else embedding and loss count as a block each, as Llama-3 and
    Megatron's account options have it; else the last stages have one less.

    >>> stage_layers(32, 4), stage_layers(126, 8), stage_layers(61, 16)[-4:]
    ([8, 8, 8, 8], [15, 16, 16, 16, 16, 16, 16, 15], [4, 4, 3, 3])
    """
    if blocks % stages == 0:
        return [blocks // stages] * stages
    if (blocks + 2) % stages == 0:
        each = (blocks + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    each, more = divmod(blocks, stages)
    return [each + (i < more) for i in range(stages)]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The parts, put together."""

    parts: Parts
    s: Strategy
    program: Program
    model: CostModel
    mesh: Mesh
    micro_batches: int

    # -- seconds --

    def collective_s(self, kind: Any, axes: tuple[str, ...], nbytes: float) -> float:
        bits = sum(1 << i for i, name in enumerate(self.mesh.names) if name in axes)
        return float(self.model.collective(kind, self.mesh, bits, nbytes)) if bits and nbytes else 0.0

    def over_data(self, part: Part, kind: Any, nbytes: float, where: str = "all") -> float:
        """A collective of a part's parameters over the ranks that share them; nbytes: of one parameter.

        Where parameters are split over a part of the ranks (hsdp), gathers and scatters stay within the inner ones and
        the sum of their shards crosses the others.
        """
        s, total = self.s, 0.0
        for axes, elements in part.elements.items():
            if not axes:
                continue
            if s.data > 1 and s.shard > 1 and "data" in axes and where != "all":
                inner = mesh_from(f"outer={s.data},inner={self.mesh.devices // s.data}", self.mesh.devices)
                # Ranks of a shard group are next to one another, strided by tensor and context parallelism.
                wide = mesh_from(
                    f"outer={s.data},inner={s.shard},rest={inner.sizes[1] // s.shard}", self.mesh.devices
                )
                axis = 1 << (1 if where == "inner" else 0)
                size = elements * nbytes / (1 if where == "inner" else s.shard)
                total += float(self.model.collective(kind, wide, axis, size))
            else:
                total += self.collective_s(kind, axes, elements * nbytes)
        return total

    def gather_s(self, part: Part) -> float:
        """Of a part's weights, once, where ZeRO-3 splits them."""
        return (
            self.over_data(part, "all_gather", self.program.bytes.used, "inner") if self.s.zero == 3 else 0.0
        )

    def sum_s(self, part: Part) -> float:
        """Of a part's gradients, once."""
        s, b = self.s, self.program.bytes
        if s.zero in (2, 3):
            inner = self.over_data(part, "reduce_scatter", b.summed, "inner")
            return inner + (
                self.over_data(part, "all_reduce", b.summed, "outer") if s.data > 1 < s.shard else 0.0
            )
        if s.zero == 1:
            return self.over_data(part, "reduce_scatter", b.summed)
        return self.over_data(part, "all_reduce", b.summed)

    def sent_s(self, part: Part, backward: bool) -> float:
        """What collectives between products take of one pass, what recomputation repeats in backward."""
        out, ring = 0.0, 0.0
        for c in part.sent:
            now = (0.0 if backward else c.seconds) if not c.backward else (c.seconds if backward else 0.0)
            now += c.seconds * c.runs_again if backward and not c.backward else 0.0
            if (
                "context" in c.axes
                and self.program.context == "ring"
                and c.kind in ("all_gather", "reduce_scatter")
            ):
                ring += now
            else:
                out += now
        # A ring's hops run beside the attention of the keys that are there; its first part needs no hop.
        ways = self.s.context
        hidden = part.attention_s[int(backward)] * (1 - 1 / ways) if ways > 1 else 0.0
        out += max(ring - hidden, 0.0)
        if self.s.asynchronous:
            compute = part.backward_s + part.again_s if backward else part.forward_s
            out = max(out - compute, out / max(self.s.tensor, 1))
        return out

    def units(
        self, backward: bool, blocks: int, first: bool, last: bool, *, gathers: bool, sums: bool
    ) -> list[Unit]:
        """The units of a pass in their order."""
        out = []
        parts = [self.parts.first] * first + [self.parts.block] * blocks + [self.parts.last] * last
        for part in parts:
            device = part.backward_s + part.again_s if backward else part.forward_s
            sent = self.sent_s(part, backward)
            launched = part.host_s[int(backward)]
            out.append(
                Unit(
                    compute_s=max(device, launched - sent), sent_s=sent,
                    gather_s=self.gather_s(part) if gathers else 0.0, sum_s=self.sum_s(part) if sums else 0.0,
                )
            )  # fmt: skip
        return out[::-1] if backward else out

    @property
    def slow(self) -> float:
        device = self.model.machine.device
        return self.model.machine.collective_units / device.compute_units if device.compute_units else 0.0

    def pass_s(
        self, backward: bool, blocks: int, first: bool, last: bool, *, gathers: bool, sums: bool
    ) -> tuple[float, float]:
        units = self.units(backward, blocks, first, last, gathers=gathers, sums=sums)
        p = self.program
        return passes(units, self.slow, prefetches=p.prefetches, sums_beside=p.sums_beside)

    def step(self) -> tuple[dict[str, float], Pipeline | None]:
        return self._staged() if self.s.pipeline > 1 else (self._straight(), None)

    def _straight(self) -> dict[str, float]:
        """A step without stages: micro-batches one after the other."""
        n, m, p = self.parts.blocks, self.micro_batches, self.program
        zero3 = self.s.zero == 3
        keeps = not p.gathers_again
        each = {}
        for last_one in (False, True):
            sums = last_one or (p.sums_each and self.s.zero >= 2)
            forward = self.pass_s(False, n, True, True, gathers=zero3, sums=False)
            backward = self.pass_s(True, n, True, True, gathers=zero3 and not keeps, sums=sums)
            each[last_one] = forward, backward
        (f, fx), (b, bx) = each[False]
        (g, gx), (c, cx) = each[True]
        exposed = (m - 1) * (fx + bx) + gx + cx
        sent = sum(
            self.sent_s(part, back) * k for part, k in self._counted(n) for back in (False, True)
        )  # fmt: skip
        total = (m - 1) * (f + b) + g + c
        return self._causes(total, exposed, m * sent) | self._update(n, True, True)

    def _counted(self, blocks: int) -> list[tuple[Part, int]]:
        return [(self.parts.first, 1), (self.parts.block, blocks), (self.parts.last, 1)]

    def _causes(self, total: float, exposed: float, sent: float) -> dict[str, float]:
        return {"compute": total - exposed - sent, "between products": sent, "weights and gradients": exposed}

    def _update(self, blocks: float, first: bool, last: bool) -> dict[str, float]:
        """The optimizer's step on what a rank holds of it; with ZeRO-1 and 2 the new weights are gathered."""
        parts = [(self.parts.block, blocks), (self.parts.first, float(first)), (self.parts.last, float(last))]
        s, p = self.s, self.program
        ways = s.shard * s.context if s.zero else 1
        device = self.model.machine.device
        seconds = sum(part.update_s * k for part, k in parts) / ways
        if p.executor.update_bytes:
            moved = sum(part.parameters * k for part, k in parts) * p.executor.update_bytes / ways
            seconds += moved / (device.memory_bandwidth_bytes_per_s * device.efficiency.get("memory", 1.0))
        gathered = 0.0
        if s.zero in (1, 2):
            gathered = sum(self.over_data(part, "all_gather", p.bytes.used, "inner") * k for part, k in parts)
            if p.prefetches:  # beside the next step's forward, but for the first part's
                forward = sum(part.forward_s * k for part, k in parts)
                gathered = max(
                    gathered - forward, self.over_data(self.parts.block, "all_gather", p.bytes.used, "inner")
                )
        return {"update": seconds, "new weights": gathered}

    def _staged(self) -> tuple[dict[str, float], Pipeline]:
        """A pipelined step: weights are gathered once, gradients summed once, after a stage's last backward."""
        s, p, m = self.s, self.program, self.micro_batches
        layers = stage_layers(self.parts.blocks, s.pipeline)
        forward, backward = [], []
        for i, n in enumerate(layers):
            ends = i == 0, i == len(layers) - 1
            forward.append(self.pass_s(False, n, *ends, gathers=False, sums=False)[0])
            backward.append(self.pass_s(True, n, *ends, gathers=False, sums=False)[0])
        schedule = s.schedule or ("interleaved" if s.chunks > 1 else "1f1b")
        pipe = pipelined(forward, backward, m, s.chunks, self.send_s(), schedule, sends_beside=p.sends_beside)
        n = max(layers)
        slowest = max(f + b for f, b in zip(forward, backward, strict=True))
        sums = n * self.sum_s(self.parts.block) + self.sum_s(self.parts.first)
        window = backward[0] if p.sums_beside else 0.0
        sums = max(sums - window, self.sum_s(self.parts.block))
        gathers = n * self.gather_s(self.parts.block)
        gathers = max(gathers - forward[0], self.gather_s(self.parts.block)) if p.prefetches else gathers
        sent = m * n * sum(self.sent_s(self.parts.block, back) for back in (False, True))
        seconds = {
            "compute": m * slowest - sent,
            "between products": sent,
            "pipeline": pipe.step_s - m * slowest,
            "weights and gradients": sums + gathers,
        }
        return seconds | self._update(n, True, False), pipe

    def send_s(self) -> float:
        """One micro-batch's activations to the next stage."""
        s = self.s
        split = s.tensor if s.sequence or self.program.name.startswith("megatron") else 1
        mesh = mesh_from(f"stage={s.pipeline},inner={self.mesh.devices}", s.pipeline * self.mesh.devices)
        return float(
            self.model.collective("permute", mesh, 1, self._entry() * (1 if s.sequence else 1 / split))
        )

    def _entry(self) -> float:
        return self.parts.block.entry

    def moved(self) -> dict[str, float]:
        """Seconds of every collective of a step, hidden or not, by what it is for."""
        m, n = self.micro_batches, self.parts.blocks / self.s.pipeline
        parts = [(self.parts.block, n), (self.parts.first, 1.0), (self.parts.last, 1.0)]
        out: dict[str, float] = {}
        for part, k in parts:
            for c in part.sent:
                name = f"{c.kind} over {'·'.join(c.axes)}"
                out[name] = out.get(name, 0.0) + m * k * c.seconds * (1 + c.runs_again)
            passes_ = 2 if self.program.gathers_again else 1
            turns = 1 if self.s.pipeline > 1 else m
            for name, seconds in (
                ("gathers of weights", self.gather_s(part) * passes_ * turns),
                (
                    "sums of gradients",
                    self.sum_s(part) * (turns if self.program.sums_each and self.s.zero >= 2 else 1),
                ),
            ):
                if seconds:
                    out[name] = out.get(name, 0.0) + k * seconds
        return out

    # -- bytes --

    def memory(self, pipe: Pipeline | None) -> RankMemory:
        """Of the first and of the last stage, the larger."""
        layers = stage_layers(self.parts.blocks, self.s.pipeline)
        ranks = {"first": (layers[0], True, len(layers) == 1), "last": (layers[-1], len(layers) == 1, True)}
        return max((self._rank(name, *what, pipe) for name, what in ranks.items()), key=lambda r: r.total)

    def _rank(self, name: str, blocks: int, first: bool, last: bool, pipe: Pipeline | None) -> RankMemory:
        s, p, b = self.s, self.program, self.program.bytes
        ways = max(s.shard * s.context, 1) if s.zero else 1
        ends = [self.parts.first] * first + [self.parts.last] * last
        block = self.parts.block
        elements = blocks * block.parameters + sum(e.parameters for e in ends)
        # One in flight at the last stage, as many as the schedule has at the first.
        flying = 1.0 if pipe is None or name == "last" else pipe.in_flight
        held = blocks * block.kept * flying + sum(e.saved for e in ends) * (
            flying if name == "first" and not last else 1
        )
        working = block.saved - block.kept if s.remat not in (None, "none") else 0.0
        whole = max(elements - blocks * block.parameters, 0.0) + 2 * block.parameters
        gathered = whole * (b.used + b.summed) if s.zero == 3 else 0.0
        if s.zero != 3 and b.weight > b.used:
            gathered = elements * b.used
        if s.zero == 3 and (s.pipeline > 1 or not p.gathers_again):
            gathered = elements * b.used + 2 * block.parameters * b.summed
        return RankMemory(
            parameters=elements * b.weight / (ways if s.zero == 3 else 1),
            gradients=elements * b.gradient / (ways if s.zero >= 2 else 1),
            optimizer=elements * b.state / (ways if s.zero >= 1 else 1),
            activations=held + max(working, 0.0), gathered=gathered,
            logits=self.parts.logits * (4 * p.logits + 2) if last else 0.0, reserve=p.reserve_bytes, rank=name,
        )  # fmt: skip
