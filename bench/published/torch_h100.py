"""Training steps of PyTorch on one H100, eager and compiled by torch.compile, predicted.

    python -m bench published.torch_h100

The measured steps are the project's own, of the models of ``bench.gpu.torch_steps``: forward, backward and AdamW.
GPT-2's and ResNet-50's are in a file (``gpu_h100/torch.jsonl``, torch 2.11); of the other two, the median that was
written down is left. The models are traced by the PyTorch frontend and priced on the executors of ``pase.plan.step``,
without a GPU. Nothing is fitted to these rows. Writes bench/results/torch_h100.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pase
from bench.cases import SHARED
from bench.gpu.torch_steps import built
from bench.published.vtrain import accuracy
from bench.runner import Benchmark
from pase import machine
from pase.compiler.problem.problem import SplitProblem
from pase.plan.step import COMPILED, EAGER, on_host, step_time
from pase.tables.itemize import config_of

FILE = SHARED / "gpu_h100" / "torch.jsonl"
WRITTEN_DOWN = {"bert": (44e-3, 53e-3), "llama, 4 layers": (92e-3, 85e-3)}
"""Model -> the seconds of a step, eager and compiled."""


@dataclass(frozen=True, kw_only=True)
class TorchRow:
    """One measured step. model: as in ``bench.gpu.torch_steps``."""

    model: str
    way: Literal["eager", "compiled"]
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.model} {self.way}"


def rows() -> Iterator[TorchRow]:
    """Reads the rows."""
    both = dict(WRITTEN_DOWN)
    for line in FILE.read_text().splitlines():
        r = json.loads(line)
        both[r["case"]] = r["eager"]["median_s"], r["compiled"]["median_s"]
    for model, (eager, compiled) in both.items():
        yield TorchRow(model=model, way="eager", seconds=eager)
        yield TorchRow(model=model, way="compiled", seconds=compiled)


def compared(row: TorchRow) -> dict[str, Any]:
    """Returns the row beside its prediction. passes: the seconds of the device in forward and backward, and of the
    optimizer's update."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    with torch.device("meta"):
        model, batch, loss = built(row.model, "meta")
    m = machine.load("h100x8")
    plan = pase.compile(model, *batch, devices=1, loss=loss, machine=m, memory_limit="none", baselines=False)
    assert plan.traced is not None
    p = SplitProblem.of(plan.traced.graph, 1, m, "analytic", "adam")
    configs = {n.name: config_of(n, plan.strategy[n.name], plan.mesh) for n in p.graph.nodes}
    executor = on_host(EAGER, m) if row.way == "eager" else COMPILED
    time = step_time(p.graph, plan.mesh, configs, p.model, executor=executor)
    return {
        "measured_s": row.seconds,
        "predicted_s": time.total_s,
        "passes": [*(q.busy_s for q in time.passes), time.update_s],
        "error": time.total_s / row.seconds - 1,
    }


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the accuracy of each way."""
    found = {}
    for way in ("eager", "compiled"):
        mine = [r for name, r in rows.items() if name.endswith(f" {way}")]
        if mine:
            found[way] = accuracy([r["measured_s"] for r in mine], [r["predicted_s"] for r in mine])
    return found


BENCH = Benchmark("torch_h100", lambda: {r.name: r for r in rows()}, compared, head=summary)
