"""AMP's measured steps of GPT-2 on equal and unequal hosts, predicted.

    python -m bench published.amp [--only unequal]

Nothing is fitted. Each stage is priced as ``pase price`` does, on the machine of its devices; if a stage has devices of
both kinds, the slower one counts. Transfers and sums that leave a host share its link. The rest follows their code
(DachengLi1/AMP at 72eeea4, with its copies of DeepSpeed and Megatron-LM), file by file:

- DeepSpeed/deepspeed/runtime/pipe/schedule.py (TrainSchedule): in each round, neighbours exchange what they computed in
  the round before, then both compute. p2p.py: a transfer is a broadcast that both wait for. engine.py, and
  wall_clock_breakdown in examples/ds_config.json: the host waits for the device after each instruction.
- runtime/pipe/engine.py: tensor-parallel ranks send an activation in parts, which are gathered on arrival, and once
  on the sending stage before its backward; but each of them sends the whole gradient. A mask is sent with activations.
- runtime/engine.py (allreduce_bucket): gradients are copied into one tensor, cast to float32, divided, summed, cast and
  copied back. There is no recomputation.
- megatron/model/transformer.py (ParallelTransformerLayerPipe): a block's forward runs twice, once to print its shape.

Writes bench/results/amp.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases import csv_rows
from bench.published.megatron_gpt import padded_vocabulary
from bench.published.vtrain import graph_of
from bench.runner import Benchmark
from pase.costmodels.analytic import Analytic
from pase.machine import GroupedMachine, LinkLevel, Machine, load
from pase.stated.parts import parts_of
from pase.stated.place import place, stage_mesh
from pase.stated.program import PROGRAMS
from pase.stated.step import StatedStep
from pase.stated.strategy import Strategy

MACHINES = Path(__file__).parents[1] / "machines"
HOST, DEVICES, BATCH = 4, 16, 32
LAYERS, WIDTH, HEADS, SEQUENCE = 24, 1024, 16, 1024
_BLOCKS = range(2, 2 + LAYERS)
"""The indices of blocks among the layers that can be cut."""
_MEGATRON = PROGRAMS["megatron_2021"]
PROGRAM = replace(
    _MEGATRON,
    bytes=replace(_MEGATRON.bytes, summed=4),
    executor=replace(
        _MEGATRON.executor,
        traffic={"softmax": (8 / 4, 10 / 6), "bias_gelu": (8 / 4, 1.0), "bias_dropout_add": (15 / 7, 1.0)},
    ),
)
"""traffic: bytes of the kernels that run over those of a fused kernel. The fusions are options that their script does
not set (megatron/arguments.py): masked_fill_ and softmax (megatron/model/fused_softmax.py), bias and gelu, bias,
dropout and addition (megatron/model/transformer.py)."""
_MASK_BYTES = SEQUENCE * SEQUENCE * 2
"""The mask that each rank sends with activations, in half precision (runtime/pipe/engine.py, _exec_send_activations).
"""
FORWARD_S = {
    ("NVIDIA T4", 1): (0.27e-3, 5.47e-3, 3.08e-3),
    ("NVIDIA T4", 2): (1.55e-3, 5.96e-3, 1.23e-3),
    ("NVIDIA T4", 4): (1.83e-3, 5.58e-3, 0.66e-3),
    ("NVIDIA V100 SXM2 16GB", 1): (0.37e-3, 3.92e-3, 2.46e-3),
    ("NVIDIA V100 SXM2 16GB", 2): (1.32e-3, 5.24e-3, 1.28e-3),
    ("NVIDIA V100 SXM2 16GB", 4): (1.31e-3, 4.52e-3, 0.69e-3),
}
"""Device and tensor parallelism -> measured seconds of one example's forward: embedding, block (mean of 24), head.
known_cost/gpt2_{G4,P3}_{1,2,4}.npy of the same commit. AMP predicts from these alone."""
_FORWARDS = 2
"""How often a block's forward runs."""
_SUMMED_COPIES = (2 + 2) + (2 + 4) + (4 + 4) + (4 + 2) + (2 + 2)
"""Bytes of device memory read and written for each gradient that is reduced: copied into one tensor, cast to float32,
divided, cast back to half precision, and copied into the gradients."""


@dataclass(frozen=True, kw_only=True)
class AmpTrial:
    """A measured step on 4 hosts of 4 T4 (AWS g4dn.12xlarge: ``homogeneous``), or on 3 hosts of 4 V100 (p3.8xlarge) and
    one of 4 T4. Trials that ran out of memory are left out.

    theirs_s: AMP's prediction. cuts: the first layer of each stage, and the end. Of 30 layers, the first is the
    embedding, 2 to 25 are blocks, and 28 is the head.
    """

    table: str
    micro: int
    tensor: int
    data: int
    stages: int
    theirs_s: float
    measured_s: float
    cuts: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.table} micro={self.micro},tp={self.tensor},dp={self.data},pp={self.stages}"

    @property
    def strategy(self) -> Strategy:
        return Strategy(
            data=self.data, tensor=self.tensor, pipeline=self.stages, micro=self.micro, remat="none"
        )


def trials() -> Iterator[AmpTrial]:
    """Yields the measured steps of both tables, in the order in which AMP predicts them."""
    for r in csv_rows(Path(__file__).with_suffix(".csv")):
        micro, tensor, data, stages = (int(r[k]) for k in ("micro", "tensor", "data", "stages"))
        yield AmpTrial(
            table=r["table"],
            micro=micro,
            tensor=tensor,
            data=data,
            stages=stages,
            theirs_s=float(r["theirs_s"]),
            measured_s=float(r["measured_s"]),
            cuts=tuple(map(int, r["cuts"].split())),
        )


def hosts(table: str) -> list[Machine]:
    """Returns the machine of each host, in the order of ranks."""
    if table == "homogeneous":
        return [load(MACHINES / "g4dn_12xlarge.toml")] * (DEVICES // HOST)
    both = load(MACHINES / "amp.toml")
    assert isinstance(both, GroupedMachine)
    return [g.machine for g in both.groups for _ in range(g.count // HOST)]


@cache
def priced(machine: Machine, t: Strategy) -> StatedStep:
    """Returns the parts of a step on devices of one kind."""
    micro, model = t.micro or 1, Analytic(machine, flat=True)
    at_once = max(micro * t.data, 2)  # tracing needs at least two examples to find the batch dim
    graph = graph_of(at_once, SEQUENCE, LAYERS, WIDTH, HEADS, padded_vocabulary(50257, t.tensor))
    placed = place(graph, t, model, doubled=micro * t.data == 1)
    parts = parts_of(graph, placed, t, PROGRAM, model)
    return StatedStep(
        parts=parts,
        s=t,
        program=PROGRAM,
        model=model,
        mesh=stage_mesh(t),
        micro_batches=BATCH // (t.data * micro),
    )


def sent_s(a: Machine, b: Machine, nbytes: float, together: int, messages: int, *, inside: bool) -> float:
    """Returns the seconds for a device to send bytes to another. together: how many devices of its host send at the
    same time. inside: the other device is in the same host."""
    level = a.levels[0] if inside else max((m.levels[1] for m in (a, b)), key=_slowness)
    share = 1.0 if inside else together / HOST
    return messages * level.latency_s + nbytes * share / level.bandwidth_bytes_per_s


def _slowness(level: LinkLevel) -> float:
    return 1 / level.bandwidth_bytes_per_s


def passes_s(run: StatedStep, blocks: int, first: bool, last: bool, *, measured: bool) -> tuple[float, float]:
    """Returns the seconds of a stage's forward and backward of one micro-batch.

    measured: whether a part's forward takes at least its measured forward of one example, and its backward one forward.
    """
    forward, backward = (
        run.units(way, blocks, first, last, gathers=False, sums=False) for way in (False, True)
    )
    least = FORWARD_S[run.model.machine.device.name, run.s.tensor]
    floors = [least[0]] * first + [least[1]] * blocks + [least[2]] * last
    times = [1] * first + [_FORWARDS] * blocks + [1] * last
    there = [
        max(k * (u.compute_s + u.sent_s), floor if measured else 0.0)
        for u, k, floor in zip(forward, times, floors, strict=True)
    ]
    back = [
        max(u.compute_s + u.sent_s, f / k if measured else 0.0)
        for u, k, f in zip(backward[::-1], times, there, strict=True)
    ]
    return sum(there), sum(back)


def step_s(t: AmpTrial, *, measured: bool) -> float:
    """Returns the predicted seconds of the trial's step."""
    where, size = hosts(t.table), t.data * t.tensor
    forward, backward, after, there, back = [], [], [], [], []
    of_stage = [range(i * size // HOST, -(-(i + 1) * size // HOST)) for i in range(t.stages)]
    for i, (low, high) in enumerate(zip(t.cuts, t.cuts[1:], strict=False)):
        first, last = i == 0, i == t.stages - 1
        blocks = len(set(range(low, high)) & set(_BLOCKS))
        runs = [priced(machine, t.strategy) for machine in {where[h] for h in of_stage[i]}]
        both = [passes_s(r, blocks, first, last, measured=measured) for r in runs]
        entry = runs[0].parts.block.entry
        gathered = max(r.collective_s("all_gather", ("model",), entry) for r in runs)
        forward.append(max(f for f, _ in both) + gathered * (not first))
        backward.append(max(b for _, b in both) + gathered * (not last))
        after.append(max(once_s(r, blocks, first, last) for r in runs))
        if not last:
            out, into = of_stage[i][-1], of_stage[i + 1][-1]
            ways = where[out], where[into]
            many, inside = min(size, HOST), out == into
            parts = 2 + (t.tensor > 1)  # a part of an activation is sent with its position
            there.append(sent_s(*ways, entry / t.tensor + _MASK_BYTES, many, parts, inside=inside))
            back.append(sent_s(*ways, entry, many, 1, inside=inside))
    if t.stages > 1:  # the tied embedding's gradient, in its own type
        run = priced(where[0], t.strategy)
        nbytes = run.parts.tied.parameters * PROGRAM.bytes.gradient
        ends = where[of_stage[0][0]], where[of_stage[-1][-1]]
        tied = sent_s(*ends, nbytes, min(size, HOST), 1, inside=False)
        after[0] += tied
        after[-1] += tied
    return in_turns_s(forward, backward, there, back, after, BATCH // (t.data * t.micro))


def in_turns_s(
    forward: list[float],
    backward: list[float],
    there: list[float],
    back: list[float],
    after: list[float],
    micro_batches: int,
) -> float:
    """Returns the seconds of a step with rounds. In each, a stage and its neighbour exchange the results of the round
    before, and then compute, one of them a forward and the other a backward. there, back: seconds of a transfer to the
    next stage, and back.

    >>> in_turns_s([1.0, 1.0], [2.0, 2.0], [0.0], [0.0], [0.0, 0.0], 4)
    15.0
    """
    p, done = len(forward), [0.0] * len(forward)
    within = range(micro_batches)
    for turn in range(2 * (micro_batches + p - 1)):
        for i in range(1, p):
            if (turn + i) % 2 == 0:
                activation, gradient = (turn - i) // 2 in within, (turn + i) // 2 - p in within
                if activation or gradient:
                    moved = activation * there[i - 1] + gradient * back[i - 1]
                    done[i - 1] = done[i] = max(done[i - 1], done[i]) + moved
        for i in range(p):
            ahead = (turn + i) % 2 == 0
            micro = (turn - i) // 2 if ahead else (turn + i + 1) // 2 - p
            done[i] += (forward if ahead else backward)[i] * (micro in within)
    return max(d + a for d, a in zip(done, after, strict=True))


def once_s(run: StatedStep, blocks: int, first: bool, last: bool) -> float:
    """Returns the seconds after a stage's last backward: all-reduces of gradients, and the update."""
    p = run.parts
    of = [(p.block, blocks), (p.first, int(first)), (p.last, int(last))]
    copies = _SUMMED_COPIES if run.s.data > 1 else 0
    moved = sum(k * part.parameters for part, k in of) * (PROGRAM.executor.update_bytes + copies)
    return sum(k * (run.sum_s(part) + part.update_s) for part, k in of) + run.copying_s(moved)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns Kendall's tau and the errors of a table, ours and AMP's."""
    from scipy.stats import kendalltau

    measured = np.array([r["measured_s"] for r in rows])
    out: dict[str, Any] = {"trials": len(rows)}
    for who in ("ours", "floored", "amp"):
        said = np.array([r[f"{who}_s"] for r in rows])
        off = np.abs(said / measured - 1)
        best = int(said.argmin())
        out[who] = {
            "tau": float(kendalltau(said, measured).statistic),
            "mean_error": float(off.mean()),
            "median_error": float(np.median(off)),
            "best_picked_s": float(measured[best]),
        }
    return out | {"best_s": float(measured.min())}


def row(t: AmpTrial) -> dict[str, Any]:
    """Returns a trial's measured step, AMP's prediction and ours."""
    return {
        "table": t.table,
        "measured_s": t.measured_s,
        "amp_s": t.theirs_s,
        "ours_s": step_s(t, measured=False),
        "floored_s": step_s(t, measured=True),
    }


def summaries(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the summary of each table with at least two trials."""
    tables = {name: [r for r in rows if r["table"] == name] for name in ("homogeneous", "unequal")}
    return {"summary": {name: summary(of) for name, of in tables.items() if len(of) > 1}}


BENCH = Benchmark("amp", {t.name: t for t in trials()}, row, named="{trial}", head=summaries)
