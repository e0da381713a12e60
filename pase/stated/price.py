"""The price of a stated strategy: seconds and bytes of a step as a program runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pase.costmodels.analytic import Analytic
from pase.costmodels.collectives import by_library
from pase.errors import Infeasible
from pase.files.json_values import JsonObject
from pase.ir import Graph, Remark
from pase.ir.blocks import Block
from pase.ir.precision import in_fp8
from pase.machine import CostModel, Mesh
from pase.plan.error_bar import ErrorBar, bar_of, is_measured
from pase.plan.remarks import of_graph
from pase.plan.throughput import StepWork, Throughput, step_work
from pase.stated.experts import token_copies
from pase.stated.memory import RankMemory, rank_memory
from pase.stated.parts import parts_of
from pase.stated.place import place, stage_mesh
from pase.stated.program import Program
from pase.stated.step import StatedStep
from pase.stated.strategy import PRODUCTS_IN, Strategy
from pase.stated.timeline import Pipeline

__all__ = ["Priced", "price_strategy"]


@dataclass(frozen=True, kw_only=True)
class Priced:
    """The price of a stated strategy.

    seconds: by cause; they add up to step_s. kernels_s: compute by kind of work (``pase.plan.error_bar``), without what
        the host's launches and the program's own copies take. recompute_s: the part of compute that repeats forward.
    bar: the range of the step; None if the machine's card was not measured (``pase.plan.error_bar``).
    collectives_s: by kind of collective, the seconds of all of them in a step of one rank, including hidden ones.
    stage_memory: of a rank of the first stage, and of the last.
    """

    strategy: Strategy
    program: str
    machine: str
    mesh: Mesh
    micro_batches: int
    step_s: float
    seconds: Mapping[str, float]
    kernels_s: Mapping[str, float]
    recompute_s: float
    bar: ErrorBar | None
    collectives_s: Mapping[str, float]
    stage_memory: tuple[RankMemory, ...]
    device_memory: int
    work: StepWork
    pipeline: Pipeline | None
    noted: tuple[Remark, ...] = ()
    """What the price assumes, and reasons to doubt it."""
    added: tuple[str, ...] = ()
    """What the strategy does not state and the price decides, as terms of a strategy with the reason."""

    @property
    def memory(self) -> RankMemory:
        """That of the rank that holds the most."""
        return max(self.stage_memory, key=lambda r: r.total)

    @property
    def sound(self) -> bool:
        """Whether it fits, and no remark gives a reason to doubt it."""
        return self.fits and not any(r.doubtful for r in self.noted)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.device_memory

    @property
    def throughput(self) -> Throughput:
        return self.work.at(self.step_s, self.strategy.devices)

    def to_json(self) -> JsonObject:
        """Return the object that ``pase price --json`` prints."""
        t, m, p = self.throughput, self.memory, self.pipeline
        return {
            "strategy": str(self.strategy),
            "added": list(self.added),
            "executor": self.program,
            "machine": self.machine,
            "devices": self.strategy.devices,
            "mesh": self.mesh.by_name,
            "micro_batches": self.micro_batches,
            "step_s": self.step_s,
            "step_low_s": None if self.bar is None else self.bar.low_s,
            "step_high_s": None if self.bar is None else self.bar.high_s,
            "mfu": t.mfu,
            "tflops_per_device": t.tflops_per_device,
            "tokens_per_s_per_device": t.tokens_per_s_per_device,
            "examples_per_s_per_device": t.examples_per_s_per_device,
            "seconds": dict(self.seconds),
            "collectives_s": dict(self.collectives_s),
            "memory_bytes": m.total,
            "memory": {k: getattr(m, k) for k in m.__dataclass_fields__},
            "device_memory": self.device_memory,
            "fits": self.fits,
            "remarks": [r.to_json() for r in self.noted],
            "pipeline": None if p is None else {"bubble": p.bubble, "in_flight": p.in_flight},
        }


def price_strategy(
    graph: Graph,
    s: Strategy,
    program: Program,
    model: CostModel,
    examples: int,
    written_out: Sequence[Block] = (),
    *,
    doubled: bool = False,
) -> Priced:
    """Price a strategy on a graph whose batch is one micro-batch of all data-parallel ranks.

    examples: those of the whole batch.
    doubled: whether that micro-batch has one example and the graph has two (``pase.stated.place.SECOND``).
    written_out: the graph's equal blocks, if no loop runs them.

    Raises Infeasible, with the reason, if the model cannot be split so.
    """
    micro = s.micro or 1
    m = examples // (s.ranks * micro)
    if m * s.ranks * micro != examples:
        raise Infeasible(
            f"a batch of {examples} is not whole micro-batches of {micro} on {s.ranks} data-parallel ranks",
            where=str(s),
            fix="change micro, or the number of data-parallel ranks",
        )
    _refuse(s, program, model, m)
    dtype = PRODUCTS_IN[s.precision]
    if dtype is not None:
        if dtype not in model.machine.device.peak_flops:
            raise Infeasible(
                f"it has no rate for {s.precision} products ({dtype} in [device.peak_flops])",
                where=f"machine '{model.machine.name}'",
                fix=f"leave out precision={s.precision}, or name another machine",
            )
        graph = in_fp8(graph, dtype)
    exchange = model
    if program.exchange and isinstance(model, Analytic):
        exchange = Analytic(
            by_library(model.machine, program.exchange),
            flat=model.flat,
            steady=model.steady,
            copies=token_copies(graph, written_out, model.machine),
        )
    placed = place(graph, s, exchange, whole_logits=program.whole_logits, doubled=doubled)
    parts = parts_of(graph, placed, s, program, model, written_out, exchange)
    if s.offload > parts.blocks:
        raise Infeasible(
            f"'{graph.name}' has {parts.blocks} blocks", where=str(s), fix="offload no more blocks than that"
        )
    mesh = stage_mesh(s)
    stages = s.pipeline * s.chunks
    if (
        s.pipeline > 1 and parts.blocks < stages and (parts.blocks + 2) % stages
    ):  # embedding and loss may count as a block each
        raise Infeasible(
            f"it needs {stages} stages, but '{graph.name}' has {parts.blocks} blocks",
            where=str(s),
            fix="use smaller pp or vp",
        )
    run = StatedStep(parts=parts, s=s, program=program, model=_flat(model), mesh=mesh, micro_batches=m)
    seconds, pipeline = run.step()
    work = step_work(graph, model.machine)
    part = examples / (work.examples or examples)
    work = StepWork(
        flops=work.flops * part,
        at_peak_s=work.at_peak_s * part,
        examples=examples,
        tokens=None if work.tokens is None else round(work.tokens * part),
    )
    step_s = sum(seconds.values())
    return Priced(
        strategy=s,
        program=program.name,
        machine=model.machine.name,
        mesh=mesh,
        micro_batches=m,
        step_s=step_s,
        seconds=seconds,
        kernels_s=run.kernels_s,
        recompute_s=run.recompute_s,
        bar=bar_of(step_s, run.error_parts(seconds)) if is_measured(model.machine) else None,
        collectives_s=run.collectives_s(),
        stage_memory=rank_memory(parts, s, program, mesh, pipeline),
        device_memory=model.machine.device.memory_bytes,
        work=work,
        pipeline=pipeline,
        noted=of_graph(graph),
    )


def _refuse(s: Strategy, program: Program, model: CostModel, micro_batches: int) -> None:
    """Raise Infeasible if the program does not support the strategy."""
    near = model.machine.levels[0]
    if s.asynchronous and program.decomposition.near and s.tensor > (near.ways or s.tensor):
        raise Infeasible(
            f"{program.name} runs tensor parallelism's collectives during products (async) only among the "
            f"{near.ways} devices of a {near.name} on '{model.machine.name}'",
            where=str(s),
            fix=f"leave out async, or use tp={near.ways}",
        )
    if s.offload and model.machine.device.host_bytes_per_s is None:
        raise Infeasible(
            f"machine '{model.machine.name}' does not say how fast its devices reach their host's memory",
            where=str(s),
            fix="add host_bytes_per_s to [device] of a copy of its file, or leave out offload",
        )
    if s.context > 1 and program.context == "none":
        raise Infeasible(
            f"{program.name} has no context parallelism", where=str(s), fix=f"leave out cp={s.context}"
        )
    if s.pipeline > 1 and s.zero > program.zero_in_stages:
        raise Infeasible(
            f"{program.name} runs stages with at most zero={program.zero_in_stages}",
            where=str(s),
            fix=f"use dp=N,zero={program.zero_in_stages}",
        )
    if s.chunks > 1 and micro_batches < s.pipeline:
        raise Infeasible(
            f"the interleaved schedule needs as many micro-batches as stages ({s.pipeline}), but there are "
            f"{micro_batches}",
            where=str(s),
            fix="use smaller micro-batches, or fewer chunks (vp)",
        )


def _flat(model: CostModel) -> CostModel:
    """Return the same model for single calls of a collective library, which frameworks do not divide in stages."""
    return Analytic(model.machine, flat=True) if isinstance(model, Analytic) else model
