"""AMP's measured steps of GPT-2 on equal and unequal hosts, predicted, stage by stage on the devices of each.

    python -m bench.amp [--only unequal] [-o bench/results/amp.json]

Nothing is fitted. A stage is priced as ``pase price`` prices one, on the machine of its devices; where a stage has
devices of both kinds, the slower one counts. Transfers and sums that leave a host share its link. Of DeepSpeed's code:
1F1B (runtime/pipe/schedule.py), nothing beside compute, gradients in float32 while they are summed (fp32_allreduce),
activations sent in parts by tensor-parallel ranks, no recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.amp_rows import FORWARD_S, HOMOGENEOUS, UNEQUAL
from bench.arguments import parser, wanted
from bench.megatron_gpt import padded_vocabulary
from bench.provenance import save
from bench.vtrain import graph_of
from pase.costmodels.analytic import Analytic
from pase.machine import GroupedMachine, Machine, load
from pase.pipeline.registry import schedule
from pase.pipeline.simulate import simulate
from pase.pipeline.types import StageTimes
from pase.stated.parts import parts_of
from pase.stated.place import place
from pase.stated.program import PROGRAMS
from pase.stated.step import StatedStep
from pase.stated.strategy import Strategy

MACHINES = Path(__file__).parent / "machines"
HOST, DEVICES, BATCH = 4, 16, 32
LAYERS, WIDTH, HEADS, SEQUENCE = 24, 1024, 16, 1024
_BLOCKS = range(2, 2 + LAYERS)
"""The places of blocks among those that are cut."""
_MEGATRON = PROGRAMS["megatron_2021"]
PROGRAM = replace(
    _MEGATRON,
    bytes=replace(_MEGATRON.bytes, summed=4),
    executor=replace(
        _MEGATRON.executor,
        traffic={"softmax": (8 / 4, 10 / 6), "bias_gelu": (8 / 4, 1.0), "bias_dropout_add": (15 / 7, 1.0)},
    ),
)
"""traffic: bytes of the kernels that are run over those of a fused one. The fusions are options that their script does
not set (megatron/arguments.py): masked_fill_ and softmax (megatron/model/fused_softmax.py), bias and gelu, bias,
dropout and addition (megatron/model/transformer.py)."""
_MASK_BYTES = SEQUENCE * SEQUENCE * 2
"""Sent along with activations by each rank (GPT2ModelPipe: a stage's result is (hidden, mask)); assumed to be in half
precision, as the activations are."""


@dataclass(frozen=True, kw_only=True)
class AmpTrial:
    """A measured step. cuts: where its stages begin and end."""

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
    """The measured steps of both tables, in the order in which AMP predicts them."""
    for table, text in (("homogeneous", HOMOGENEOUS), ("unequal", UNEQUAL)):
        for line in text.split("\n"):
            if line:
                *numbers, theirs, measured, cuts = line.split()
                micro, tensor, data, stages = map(int, numbers)
                yield AmpTrial(
                    table=table,
                    micro=micro,
                    tensor=tensor,
                    data=data,
                    stages=stages,
                    theirs_s=float(theirs),
                    measured_s=float(measured),
                    cuts=tuple(map(int, cuts.split(","))),
                )


def hosts(table: str) -> list[Machine]:
    """The machine of each host, in the order of ranks."""
    if table == "homogeneous":
        return [load(MACHINES / "g4dn_12xlarge.toml")] * (DEVICES // HOST)
    both = load(MACHINES / "amp.toml")
    assert isinstance(both, GroupedMachine)
    return [g.machine for g in both.groups for _ in range(g.count // HOST)]


@cache
def priced(machine: Machine, t: Strategy) -> StatedStep:
    """The parts of a step on devices of one kind."""
    micro, model = t.micro or 1, Analytic(machine, flat=True)
    at_once = max(micro * t.data, 2)  # a batch of one example is no batch to a tracer
    graph = graph_of(at_once, SEQUENCE, LAYERS, WIDTH, HEADS, padded_vocabulary(50257, t.tensor))
    placed = place(graph, t, model)
    parts = parts_of(graph, placed, t, PROGRAM, model, micro * t.data / at_once)
    return StatedStep(
        parts=parts,
        s=t,
        program=PROGRAM,
        model=model,
        mesh=placed.mesh,
        micro_batches=BATCH // (t.data * micro),
    )


def crossing_s(a: Machine, b: Machine, nbytes: float, together: int) -> float:
    """Seconds for so many devices of a host to send bytes to another host at once."""
    slow = max((m.levels[1] for m in (a, b)), key=lambda level: 1 / level.bandwidth_bytes_per_s)
    return slow.latency_s + nbytes * together / (slow.bandwidth_bytes_per_s * HOST)


def passes_s(run: StatedStep, blocks: int, first: bool, last: bool, *, measured: bool) -> tuple[float, float]:
    """Seconds of a stage's forward and backward of one micro-batch.

    measured: no part's forward is shorter than its measured forward of one example, and no backward than the forward.
    """
    forward, backward = (
        run.units(way, blocks, first, last, gathers=False, sums=False) for way in (False, True)
    )
    least = FORWARD_S[run.model.machine.device.name, run.s.tensor]
    floors = [least[0]] * first + [least[1]] * blocks + [least[2]] * last
    there = [
        max(u.compute_s + u.sent_s, floor if measured else 0.0)
        for u, floor in zip(forward, floors, strict=True)
    ]
    back = [
        max(u.compute_s + u.sent_s, f if measured else 0.0)
        for u, f in zip(backward[::-1], there, strict=True)
    ]
    return sum(there), sum(back)


def step_s(t: AmpTrial, *, measured: bool) -> float:
    """Seconds that the trial's step is predicted to take."""
    where, size = hosts(t.table), t.data * t.tensor
    forward, backward, after, send = [], [], [], []
    of_stage = [range(i * size // HOST, -(-(i + 1) * size // HOST)) for i in range(t.stages)]
    for i, (low, high) in enumerate(zip(t.cuts, t.cuts[1:], strict=False)):
        first, last = i == 0, i == t.stages - 1
        blocks = len(set(range(low, high)) & set(_BLOCKS))
        runs = [priced(machine, t.strategy) for machine in {where[h] for h in of_stage[i]}]
        both = [passes_s(r, blocks, first, last, measured=measured) for r in runs]
        forward.append(max(f for f, _ in both))
        backward.append(max(b for _, b in both))
        after.append(max(once_s(r, blocks, first, last) for r in runs))
        if not last:
            out, into = of_stage[i][-1], of_stage[i + 1][-1]
            nbytes = runs[0].parts.block.entry / t.tensor + _MASK_BYTES / 2  # forward alone, so half each way
            if out == into:
                level = where[out].levels[0]
                send.append(level.latency_s + nbytes / level.bandwidth_bytes_per_s)
            else:
                send.append(crossing_s(where[out], where[into], nbytes, min(size, HOST)))
    if t.stages > 1:  # the tied embedding's gradient, in its own type
        run = priced(where[0], t.strategy)
        nbytes = run.parts.tied.parameters * PROGRAM.bytes.gradient
        tied = crossing_s(where[of_stage[0][0]], where[of_stage[-1][-1]], nbytes, min(size, HOST))
        after[0] += tied
        after[-1] += tied
    times = StageTimes.of(forward, backward, 0.0, ranks=t.stages, send=send, after=np.array(after))
    return simulate(schedule("1f1b", t.stages, BATCH // (t.data * t.micro)), times).step_s


def once_s(run: StatedStep, blocks: int, first: bool, last: bool) -> float:
    """Seconds after a stage's last backward: sums of gradients, and the update."""
    p = run.parts
    of = [(p.block, blocks), (p.first, int(first)), (p.last, int(last))]
    moved = sum(k * part.parameters for part, k in of) * PROGRAM.executor.update_bytes
    return sum(k * (run.sum_s(part) + part.update_s) for part, k in of) + run.copying_s(moved)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Kendall's tau and errors of a table, ours and AMP's."""
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


def main() -> None:
    """Writes bench/results/amp.json: each trial with what is predicted, and a summary per table."""
    args = parser(__doc__, "amp").parse_args()
    rows = [
        {
            "table": t.table,
            "trial": t.name,
            "measured_s": t.measured_s,
            "amp_s": t.theirs_s,
            "ours_s": step_s(t, measured=False),
            "floored_s": step_s(t, measured=True),
        }
        for t in wanted([(t.name, t) for t in trials()], args.only)
    ]
    tables = {name: [r for r in rows if r["table"] == name] for name in ("homogeneous", "unequal")}
    told = {name: summary(of) for name, of in tables.items() if len(of) > 1}
    print(save({"summary": told, "rows": rows}, args.o))
    for r in rows:
        said = "  ".join(f"{who} {r[f'{who}_s']:.2f}" for who in ("measured", "ours", "floored", "amp"))
        print(f"{r['trial']:45} {said}")
    for name, of in told.items():
        print(name, of)


if __name__ == "__main__":
    main()
