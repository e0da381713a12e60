"""Another degree of tensor parallelism, predicted from traces of jax.profiler.

    python -m bench replay.xla [--budget 30]

Two host devices in one process have a core each. A GPT-2 of two layers runs unsplit on both, and split by Megatron's
rule; steps of the two are traced in turn, several times, because the machine's speed changes by the minute and that
must not be taken for an effect of the degree. From the traces of each round the other degree is predicted: with the
kernels of the other run by shape, and by the roofline of a machine file measured in the same run. Nothing is fitted to
the steps. Writes bench/results/replay_xla.json.
"""

from __future__ import annotations

import statistics
import tempfile
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.replay.calibrate_cpu import calibrated, keep_memory
from bench.runner import Benchmark, option

if TYPE_CHECKING:
    from pase.replay.reports.trust import Run

STEPS, TURNS = 6, 5
"""Traced steps of a strategy in each round, and the number of rounds unless another is asked for."""
BATCHES = (16, 32, 64)
WHOLE, SPLIT = "no split", "megatron"


def gpt2(batch: int) -> tuple[Any, ...]:
    """Returns the model's loss, parameters and batch."""
    from bench.netlab.models import model

    m = model("gpt2", batch)
    return m.loss_fn, m.params, m.batch


def gpt2_16() -> tuple[Any, ...]:
    """Returns the model with 16 examples; ``--model`` needs a function without arguments."""
    return gpt2(16)


def gpt2_32() -> tuple[Any, ...]:
    """Returns the model with 32 examples."""
    return gpt2(32)


def gpt2_64() -> tuple[Any, ...]:
    """Returns the model with 64 examples."""
    return gpt2(64)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The traces of one round: some steps of each strategy, one directly after the other. others_cores: how many of
    this machine's cores other programs took meanwhile."""

    traces: dict[str, Path]
    others_cores: float


def traced(batch: int, machine: Path, folder: Path, turns: int) -> list[Turn]:
    """Traces both strategies on two host devices, in turn. A step before each is not traced, because the caches have
    the other strategy's arrays."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    from bench.netlab.steps import Running, planned

    cells = {c.strategy: c for c in planned("gpt2", batch, 2, machine, folder)}
    running = {s: Running(replace(cells[s], lowering="auto")) for s in (WHOLE, SPLIT)}
    out = []
    for turn in range(turns):
        traces = {s: folder / f"{batch}_{turn}_{s.replace(' ', '_')}" for s in running}
        for s, r in running.items():
            r.run(1)
            r.forget()
            r.run(STEPS, traces[s])
        others = sum(r.busy_s - r.cpu_s for r in running.values())
        took = sum(sum(r.times) for r in running.values())
        out.append(Turn(traces=traces, others_cores=max(others, 0.0) / took))
    return out


def compared(batch: int, machine: Path, folder: Path, turns: int) -> list[dict[str, Any]]:
    """Returns the rows of four what-ifs: each degree from the other, with its kernels and without. Each is predicted
    and compared within each round; the error is the median over the rounds."""
    from pase.bridges.degrees import by_tensor, kernel_times

    rounds = traced(batch, machine, folder, turns)
    read = [{s: measured_run(path) for s, path in t.traces.items()} for t in rounds]
    kernels = [{s: kernel_times([(r.measured.timeline, r.graph)]) for s, r in runs.items()} for runs in read]
    rows = []
    for now, then, ran, ways in ((WHOLE, SPLIT, "tp=1,sp", 2), (SPLIT, WHOLE, "tp=2,sp", 1)):
        for known in (True, False):
            asked = []
            for turn, runs, times in zip(rounds, read, kernels, strict=True):
                model = f"bench.replay.xla:gpt2_{batch}"
                measured = times[then] if known else None
                change = by_tensor(ways, model=model, ran=ran, machine=str(machine), measured=measured)
                made = change(runs[now].measured.timeline, runs[now].graph)
                ns = runs[now].changed_ns(made.graph)
                asked.append(
                    {
                        "now_ms": runs[now].measured_ns / 1e6,
                        "predicted_ms": ns / 1e6,
                        "true_ms": runs[then].measured_ns / 1e6,
                        "error": ns / runs[then].measured_ns - 1,
                        "spread_of_true": runs[then].spread,
                        "others_cores": turn.others_cores,
                        "note": made.note,
                    }
                )
            true = [x["true_ms"] for x in asked]
            rows.append(
                {
                    "what_if": f"gpt2, {batch} examples, {ran}: tensor={ways}",
                    "kernels_measured": known,
                    "error": statistics.median(x["error"] for x in asked),
                    "spread_of_turns": (max(true) - min(true)) / 2 / statistics.fmean(true),
                    "turns": asked,
                }
            )
    return rows


def measured_run(traces: Path) -> Run:
    """Returns the traced steps of a round as the replay measures them."""
    from pase.replay import align, load, measure
    from pase.replay.reports.trust import Run

    return Run(measured=measure(align(load(traces))))


def prepare(given: Namespace) -> None:
    """Starts the process again if the allocator is not set; calibrates this machine if no machine file is given."""
    keep_memory()
    given.folder = tempfile.TemporaryDirectory()
    if not given.machine:
        given.machine = f"{given.folder.name}/cpu.toml"
        calibrated(Path(given.machine), 2, given.budget, 3.0)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the number of questions, and the median and worst error with measured kernels and by the roofline."""
    kinds = {"shapes measured": True, "roofline": False}
    errors = {k: [abs(r["error"]) for r in rows if r["kernels_measured"] is v] for k, v in kinds.items()}
    each = {k: {"median": statistics.median(e), "worst": max(e)} for k, e in errors.items() if e}
    return {"what_ifs": len(rows), "summary": each}


BENCH = Benchmark(
    "replay_xla",
    {f"gpt2, {b} examples": b for b in BATCHES},
    lambda batch, given: compared(batch, Path(given.machine), Path(given.folder.name), given.turns),
    named="{what_if:.17}",  # the what-if's name begins with that of the row
    head=summary,
    environment={"JAX_ENABLE_COMPILATION_CACHE": "false"},  # a trace lacks cached programs
    options=[
        option(
            "--turns", type=int, default=TURNS, help="rounds, in each of which both strategies are traced"
        ),
        option("--budget", type=float, default=30.0, help="seconds that calibrating takes"),
        option("--machine", help="a machine file measured before; default: measure now"),
    ],
    prepare=prepare,
)
