"""Published step times of large GPTs on A100 80 GB, predicted.

    python -m bench published.megatron

Korthikanti et al. 2022 (arXiv 2205.05198), tables 3 and 5: full recomputation, and selective recomputation with
sequence parallelism. Nothing is fitted. The strategy is the Megatron baseline at tensor parallelism 8. If the paper
adds a pipeline, a step is (micro-batches + (stages - 1) / chunks) passes of one stage, with the bubble of the
interleaved schedule (Narayanan et al. 2021, section 2.2.2), and the embedding of the first and the logits of the last
stage in the slowest one. Writes bench/results/published.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.cases import csv_rows
from bench.published.megatron_gpt import padded_vocabulary
from bench.published.vtrain import graph_of, strategy
from bench.runner import Benchmark
from pase import costmodels, machine
from pase.machine import Machine
from pase.plan.step import COMPILED, EAGER, Executor, StepTime, step_time


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model and its two measured steps (Korthikanti et al. 2022, tables 3 and 5)."""

    name: str
    d: int
    heads: int
    layers: int
    batch: int
    micro_batch: int
    stages: int
    chunks: int
    full_s: float
    selective_s: float


_TIMES = ("full_s", "selective_s")
MODELS = [
    Published(name=r.pop("name"), **{k: float(r.pop(k)) for k in _TIMES}, **{k: int(v) for k, v in r.items()})
    for r in csv_rows(Path(__file__).with_suffix(".csv"))
]


MEGATRON = replace(
    EAGER,
    update_bytes=32.0,
    traffic={},  # Apex's norms
    source=EAGER.source
    + ". update_bytes: Megatron's Float16OptimizerWithFloat16Params (megatron/optimizer/optimizer.py) copies "
    "half-precision gradients to float32 (6 bytes), unscales and checks them (8), takes their norm and clips (12) "
    "and copies the parameters back (6)",
)


def _stage(
    p: Published, layers: int, recompute: str, m: Machine, executor: Executor, passes: int
) -> StepTime:
    model = costmodels.get("analytic", m)
    vocab = padded_vocabulary(50257, 8)
    # A batch of one has no batch dim, and the roles of dims cannot be found: half of the time of two samples.
    samples = max(p.micro_batch, 2)
    graph = graph_of(samples, 2048, layers, p.d, p.heads, vocab, recompute=recompute)
    s = strategy(graph, 1, 8, m, model, by_sequence=recompute == "selective")
    t = step_time(
        graph, s.mesh, s.strategy, model, executor=executor, micro_batches=passes, optimizer="adam_master"
    )
    part = p.micro_batch / samples
    forward, backward = (
        replace(x, device_s=x.device_s * part, communication_s=x.communication_s * part) for x in t.passes
    )
    return replace(t, passes=(forward, backward))


def predict(p: Published, recompute: str, m: Machine, executor: Executor = MEGATRON) -> float:
    """Returns the seconds of a step on 8 x stages devices."""
    passes = p.batch // p.micro_batch
    each = p.layers // p.stages
    if p.stages == 1:
        return _stage(p, each, recompute, m, executor, passes).total_s
    # The time of a layer follows from two depths; the remainder is that of embedding and logits.
    few, many = (_stage(p, n, recompute, m, executor, passes) for n in (2, 3))
    layer_s = many.micro_batch_s - few.micro_batch_s
    ends_s = few.micro_batch_s - 2 * layer_s
    update_s = few.update_s + (each - 2) * (many.update_s - few.update_s)
    # The last stage also has the logits and is the slowest. Activations that are sent are split over the node's 8
    # devices, forward and backward, once for each chunk of layers (Narayanan et al. 2021, section 4.1).
    nbytes = p.micro_batch * 2048 * p.d * 2 / 8
    across = machine.mesh_from("stage=2,model=8", 16)
    sent_s = float(costmodels.get("analytic", m).collective("permute", across, 1, nbytes))
    stage_s = each * layer_s + 2 * p.chunks * sent_s
    bubble = (p.stages - 1) / p.chunks
    return (passes + bubble) * stage_s + passes * ends_s + update_s


def rows(p: Published) -> Iterator[dict[str, Any]]:
    """Yields a row for each way to recompute."""
    m = machine.load("a100x8")
    for recompute, measured in (("full", p.full_s), ("selective", p.selective_s)):
        found = {e.name: predict(p, recompute, m, e) for e in (MEGATRON, COMPILED)}
        yield {
            "recompute": recompute,
            "devices": 8 * p.stages,
            "measured_s": measured,
            "predicted_s": found["eager"],
            "error": found["eager"] / measured - 1,
            "predicted_compiled_s": found["compiled"],
        }


BENCH = Benchmark(
    "published",
    {p.name: p for p in MODELS},
    rows,
    named="{model}",
    head=lambda rows: {"mean_absolute_error": sum(abs(r["error"]) for r in rows) / len(rows)},
)
