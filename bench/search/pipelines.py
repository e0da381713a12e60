"""Pipeline schedules, their bounds and cuts, and two published pipelines.

    python -m bench search.pipelines [--compile llama3_405b|llama3_405b_any|gpt_39b] [-o FILE]

What each schedule takes on equal stages, how close the bounds are, and how many simulations prove the cuts. Writes
bench/results/pipelines.json. ``--compile`` searches one model instead, and writes a file of its own: Llama-3 405B on
16,384 H100 with the published shape among the choices (about a minute of CPU; several for any mesh), or a GPT of 39B on
64 V100.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench.runner import Benchmark, option
from pase.pipeline.bounds import lower_bound, slowest_stage_bound, wait_paths, work_paths
from pase.pipeline.cuts import CutProblem, best_cuts
from pase.pipeline.registry import SCHEDULES, schedule
from pase.pipeline.simulate import peak_bytes, simulate
from pase.pipeline.types import StageTimes

MODEL = "zoo:llama3_405b?batch=2048&seq=8192&attention=fused&remat=0"
DEVICES = 16384


def schedules(ranks: int = 8, micro_batches: int = 16) -> list[dict[str, Any]]:
    """Returns rows of equal ranks: forward and both parts of backward take one unit each. Some have transfers."""
    rows = []
    for name, d in SCHEDULES.items():
        v = max(d.chunks[0], 1)
        s = schedule(name, ranks, micro_batches, v)
        plain, sent = (
            simulate(s, StageTimes.of([1 / v] * (ranks * v), 1 / v, 1 / v, ranks=ranks, send=c))
            for c in (0.0, 0.1)
        )
        held = peak_bytes(s, np.full(ranks * v, 1 / v))
        rows.append(
            {
                "schedule": name,
                "chunks": v,
                "step": plain.step_s,
                "period": plain.period_s,
                "bubble": plain.bubble,
                "with_transfers": sent.step_s,
                "held_first": float(held[0]),
                "held_last": float(held[-1]),
            }
        )
    return rows


def bounds(pipelines: int = 1000) -> dict[str, float]:
    """Returns the mean and the largest gap of the bounds to the simulation, for 1F1B with random unequal stages."""
    rng, off = np.random.default_rng(0), dict[str, list[float]]()
    for _ in range(pipelines):
        p, m = int(rng.integers(2, 9)), int(rng.integers(4, 33))
        s = schedule("1f1b", p, m)
        t = StageTimes.of(rng.uniform(0.5, 1.5, p), rng.uniform(1, 3, p), 0.0, ranks=p)
        truth = simulate(s, t).step_s
        for name, value in (
            ("work", max(q.seconds(t) for q in work_paths(s))),
            ("wait", max(q.seconds(t) for q in wait_paths(s))),
            ("both", lower_bound(s, t)),
            ("slowest stage (upper)", slowest_stage_bound(m, t)),
        ):
            off.setdefault(name, []).append(value / truth - 1)
    both = (("mean", np.mean), ("worst", np.max))
    return {f"{k}, {what}": float(f(np.abs(v))) for k, v in off.items() for what, f in both}


def cuts(chains: int = 8) -> list[dict[str, Any]]:
    """Returns the number of simulations that prove the cuts of chains of equal blocks with an embedding and a head."""
    rng, rows = np.random.default_rng(1), []
    for i in range(chains):
        p, blocks = ((3, 9), (4, 12), (4, 16), (5, 20), (6, 24), (8, 32), (12, 96), (16, 126))[i % 8]
        m, head = 4 * p, rng.uniform(0.5, 1.5)
        ends = np.zeros(p)
        ends[0], ends[-1] = 0.1, head
        s = schedule("1f1b", p, m)
        problem = CutProblem(
            schedule=s,
            blocks=blocks,
            fixed=StageTimes.of(ends, 2 * ends, 0.0, ranks=p),
            each=StageTimes.of([1.0] * p, 2.0, 0.0, ranks=p),
        )
        began = time.perf_counter()
        found = best_cuts(problem)
        assert found.simulated is not None
        rows.append(
            {
                "blocks": blocks,
                "stages": p,
                "micro_batches": m,
                "head": head,
                "simulations": found.simulations,
                "counts": found.counts,
                "step": found.simulated.step_s,
                "bound": found.bound,
                "proven": found.optimal,
                "seconds": time.perf_counter() - began,
            }
        )
    return rows


def llama() -> list[dict[str, Any]]:
    """Searches Llama-3 405B in the published shape (TP 8, PP 16, DP 128, 16 micro-batches)."""
    return [searched("16 ranks of 128×8, 16 micro-batches", (MODEL,), DEVICES, mesh="128x8", accumulate=16)]


def llama_any() -> list[dict[str, Any]]:
    """Searches Llama-3 405B on 16 ranks of any mesh, with any number of micro-batches."""
    return [searched("16 ranks", (MODEL,), DEVICES)]


def gpt_39b() -> list[dict[str, Any]]:
    """Searches the GPT of Alpa's figure 7 (Zheng et al., OSDI 2022: 48 layers of 8,192, batch 1,024 × 1,024) on 64
    V100, whose plan has 16 stages on 4 devices each."""
    from pase.zoo.layers import shapes
    from pase.zoo.transformers import gpt

    built = gpt(
        batch=1024,
        seq=1024,
        layers=48,
        vocab=51200,
        dtype="float16",
        attention="fused",
        scan=1,
        remat=0,
        d=8192,
        heads=64,
        context=1024,
    )
    model = (built.loss_fn, shapes(built.params, built.stored), shapes(built.batch, built.stored))
    return [searched("16 ranks", model, 64, machine="v100x8")]


def searched(asked: str, model: tuple[Any, ...], devices: int, **options: Any) -> dict[str, Any]:
    """Returns the result of the search over 16 ranks within the machine's memory, with its bound."""
    import pase

    began = time.process_time()
    plan = pase.compile(*model, devices=devices, memory_limit="machine", pipeline=16, **options)
    p = plan.pipeline
    assert p is not None
    return {
        "asked": asked,
        "step_s": plan.cost,
        "bound_s": plan.bound,
        "gap": 1 - plan.bound / plan.cost,
        "mesh": plan.mesh.sizes,
        "pipeline": str(p),
        "cuts": p.cuts,
        "bubble": p.bubble,
        "memory_bytes": plan.memory.total,
        "others": dict(p.others),
        "cpu_s": time.process_time() - began,
    }


SEARCHES = {"llama3_405b": llama, "llama3_405b_any": llama_any, "gpt_39b": gpt_39b}
BENCH = Benchmark(
    result=lambda given: f"pipelines_{given.compile}" if given.compile else "pipelines",
    rows=lambda given: (
        {given.compile: SEARCHES[given.compile]}
        if given.compile
        else {"schedules": schedules, "bounds": bounds, "cuts": cuts}
    ),
    stream=lambda parts: ((name, part()) for name, part in parts.items()),
    at="",
    options=[option("--compile", choices=list(SEARCHES), help="search one model, to a file of its own")],
)
