"""Training passes of PyTorch models on one A100 or H100, as NeuSight's authors measured them, predicted.

    python -m bench published.neusight

The rows are of sitar-lab/NeuSight@6945927 (``e2e_labels.csv``): models of Hugging Face in eager PyTorch and float32,
which keeps all bits of the factors of products, with attention written out; forward and backward without the optimizer.
The models are traced by the PyTorch frontend and priced on the eager executor of ``pase.plan.step``. Nothing is fitted
to these rows. The rates of float32 products are from the same authors' tables of single products
(``bench/kernels``). "gpt3_xl" is left out: no configuration of that name that we know has the time of its row. Rows of
several devices, of fused kernels and of forward alone are left out, too. Writes bench/results/neusight.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pase
from bench.cases import SHARED, csv_rows
from bench.published.cards import card
from bench.published.vtrain import accuracy
from bench.runner import Benchmark
from pase import machine
from pase.compiler.problem.problem import SplitProblem
from pase.plan.step import EAGER, PassTime, on_host, step_time
from pase.tables.itemize import config_of

FILE = SHARED / "measured" / "neusight" / "e2e_labels.csv"
CARDS = {"NVIDIA_H100_80GB_HBM3": machine.load("h100x8"), "NVIDIA_A100_80GB_PCIe": card("A100-80GB-PCIe")}
MODELS: dict[str, tuple[str, str, dict[str, int]]] = {
    "bert_large": (
        "BertForPreTraining",
        "BertConfig",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "gpt2_large": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt3_27": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 2560, "n_layer": 32, "n_head": 32, "n_positions": 2048},
    ),
    "opt_13": (
        "OPTForCausalLM",
        "OPTConfig",
        {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192},
    ),
}
"""Model -> the class of transformers, its configuration's, and what differs from that one's defaults: the widths of
BERT-large, GPT-2 large, GPT-3 2.7B and OPT 1.3B."""


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One measured row. forward_s, backward_s: the passes."""

    card: str
    model: str
    seq: int
    batch: int
    forward_s: float
    backward_s: float

    @property
    def name(self) -> str:
        return f"{self.model} {self.batch}x{self.seq} {CARDS[self.card].name}"


def rows() -> Iterator[TrainingRow]:
    """Reads the rows of training on one of the cards."""
    for r in csv_rows(FILE):
        model, mode, *shape = r["case"].split("-")
        if r["gpu"] in CARDS and model in MODELS and mode == "train" and len(shape) == 2:
            yield TrainingRow(
                card=r["gpu"],
                model=model,
                seq=int(shape[0]),
                batch=int(shape[1]),
                forward_s=float(r["fw_latency"]) * 1e-3,
                backward_s=float(r["bwall_latency"]) * 1e-3,
            )


def predict(row: TrainingRow) -> tuple[PassTime, PassTime]:
    """Returns the predicted passes of a row, forward and backward."""
    import torch
    import transformers

    kind, config, changes = MODELS[row.model]
    torch.set_float32_matmul_precision("highest")
    with torch.device("meta"):
        built = getattr(transformers, config)(**changes)
        module = getattr(transformers, kind)._from_config(built, attn_implementation="eager")
        ids = torch.zeros(row.batch, row.seq, dtype=torch.long)
    m = CARDS[row.card]
    plan = pase.compile(
        module, ids, loss=lambda m, x: m(input_ids=x)[0].mean(), devices=1, machine=m, baselines=False
    )
    assert plan.traced is not None
    p = SplitProblem.of(plan.traced.graph, 1, m, "analytic", "adam")
    configs = {n.name: config_of(n, plan.strategy[n.name], plan.mesh) for n in p.graph.nodes}
    return step_time(p.graph, plan.mesh, configs, p.model, executor=on_host(EAGER, m)).passes


def compared(row: TrainingRow) -> dict[str, Any]:
    """Returns the row beside its prediction, in seconds."""
    forward, backward = (p.seconds for p in predict(row))
    return {
        "forward_s": row.forward_s,
        "backward_s": row.backward_s,
        "predicted_forward_s": forward,
        "predicted_backward_s": backward,
        "error": (forward + backward) / (row.forward_s + row.backward_s) - 1,
    }


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the accuracy over both passes."""
    measured, predicted = (
        [r[f"{x}forward_s"] + r[f"{x}backward_s"] for r in rows.values()] for x in ("", "predicted_")
    )
    return {"all": accuracy(measured, predicted)}


BENCH = Benchmark("neusight", lambda: {r.name: r for r in rows()}, compared, head=summary)
