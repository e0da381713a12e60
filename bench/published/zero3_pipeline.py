"""ZeRO-3 against a pipeline with tensor parallelism, on up to 1,536 A100.

    python -m bench published.zero3_pipeline

Is the faster of two measured runs also priced as the faster one? Narayanan et al. 2021 (arXiv 2104.04473), table 2: a
GPT of 174.6B (96 layers of 12,288, vocabulary 51,200, sequences of 2,048, batch 1,536, everything recomputed), by
DeepSpeed's ZeRO-3 without model parallelism, and by PTD-P with 8-way tensor parallelism in 12 stages. TFLOP/s count
recomputation, by that paper's formula. Both run Megatron-LM's own layers with its fused kernels (section 4.2), in
float16. Nothing is fitted. Writes bench/results/zero3_pipeline.json.
"""

from __future__ import annotations

import time
from typing import Any

from bench.published.programs import DEEPSPEED
from bench.published.vtrain import graph_of
from bench.runner import Benchmark
from pase import costmodels
from pase.machine import load
from pase.stated.price import Priced, price_strategy
from pase.stated.program import PROGRAMS, Program
from pase.stated.strategy import Strategy, parse

LAYERS, WIDTH, VOCABULARY, SEQUENCE, BATCH = 96, 12288, 51200, 2048, 1536
MEASURED = ((384, 4, 144.0, 153.0), (768, 2, 88.0, 149.0), (1536, 1, 44.0, 141.0))
"""GPUs, ZeRO-3's micro-batch, TFLOP/s per GPU with ZeRO-3 and with PTD-P."""

MEGATRON = PROGRAMS["megatron_2021"]


def flops() -> float:
    """Returns the FLOPs of a step (the paper's equation 3)."""
    of_layers = 96 * BATCH * SEQUENCE * LAYERS * WIDTH**2
    return of_layers * (1 + SEQUENCE / (6 * WIDTH) + VOCABULARY / (16 * LAYERS * WIDTH))


def priced(s: Strategy, program: Program) -> Priced:
    """Returns the price of a strategy's step on A100 by a program."""
    at_once = (s.micro or 1) * s.ranks
    graph = graph_of(at_once, SEQUENCE, LAYERS, WIDTH, 96, VOCABULARY, recompute="none")
    return price_strategy(graph, s, program, costmodels.get("analytic", load("a100x8")), BATCH)


def row(gpus: int, micro: int, zero3: float, piped: float) -> dict[str, Any]:
    """Returns both runs on this many GPUs, as measured and as priced, and whether the order is right."""
    began = time.process_time()
    ways = (
        (f"fsdp={gpus},micro={micro},remat=full", DEEPSPEED, zero3),
        (f"dp={gpus // 96},tp=8,pp=12,micro=1,remat=full", MEGATRON, piped),
    )
    steps = []
    for text, program, tflops in ways:
        found = priced(parse(text, gpus), program)
        measured = flops() / gpus / tflops / 1e12
        steps.append(
            {
                "strategy": text,
                "measured_s": measured,
                "priced_s": found.step_s,
                "error": found.step_s / measured - 1,
                "seconds": dict(found.seconds),
            }
        )
    first, second = steps
    right = (first["measured_s"] < second["measured_s"]) == (first["priced_s"] < second["priced_s"])
    return {
        "gpus": gpus,
        "zero3": first,
        "pipeline": second,
        "ordered_rightly": right,
        "cpu_s": time.process_time() - began,
    }


BENCH = Benchmark(
    "zero3_pipeline",
    {f"{case[0]} GPUs": case for case in MEASURED},
    row,
    named="{gpus} GPUs",
    head=lambda rows: {"ordered_rightly": sum(r["ordered_rightly"] for r in rows)},
)
