"""Measures steps of PyTorch models on slow networks: our plans, DDP, FSDP2, tensor parallelism, and pipeline stages.

Each framework's way has a prediction: the price of the equal strategy (data parallel, FSDP, Megatron, stages) on the
network's calibrated machine file. GPT-2 has no plan of transformers for tensor parallelism, and its tied weights keep
``torch.distributed.pipelining`` from cutting it.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.netlab.jobs import calibrated, results_of
from bench.netlab.net import Network, Topology
from bench.netlab.session import Session

__all__ = ["NETWORKS", "measure", "run_cells"]

NETWORKS = tuple(Topology(racks=(n,), host_mbit=mbit) for n in (2, 4) for mbit in (1000.0, 200.0))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": (
        "LlamaForCausalLM",
        {
            "vocab_size": 2048,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
        },
    ),
    "GPT-2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": 2048,
            "n_embd": 256,
            "n_layer": 4,
            "n_head": 8,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
}
BATCH, LENGTH, MICRO_BATCHES = 16, 64, 4
ROUNDS = 3
STAGES = "stages"
PLANNED = {
    "ours": "ours",
    "data parallel, by pase": "data_parallel",
    "FSDP, by pase": "fsdp",
    "Megatron, by pase": "megatron/",
    "stages, by pase": STAGES,
    "DDP": "data_parallel",
    "FSDP2": "fsdp",
    "tensor parallel, by transformers": "megatron/",
    "stages, by torch.distributed.pipelining": STAGES,
}
"""Row -> the same strategy's name in pase."""


def measure(topology: Topology, session: Session, iterations: int) -> list[dict[str, Any]]:
    """Returns a row for each model and way to split its step on this network."""
    with Network(topology) as network:
        machine = calibrated(network, session)
        found = results_of(
            network,
            session,
            f"frameworks_{topology.slug}",
            [{"key": model, "machine": str(machine), "iterations": iterations} for model in MODELS],
            kind="frameworks",
            stamp=session.stamp(machine),
            timeout_s=600.0,
        )
    about = {"network": topology.name, "hosts": topology.hosts, "commit": session.commit}
    return [
        about | {"model": model} | row
        for model in MODELS
        for row in found[model].get("rows", [{"failed": found[model].get("failed", "no time")}])
    ]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns for each network and model the order of predictions and of measurements, errors, and the speedup of
    ours."""
    from scipy.stats import kendalltau

    out: dict[str, Any] = {}
    for cell in dict.fromkeys((r["network"], r["model"]) for r in rows):
        ran = {r["way"]: r for r in rows if (r["network"], r["model"]) == cell and "measured_s" in r}
        if not ran:
            continue
        pairs = [(r["predicted_s"], r["measured_s"]) for r in ran.values()]
        out[", ".join(cell)] = {
            "kendall_tau": float(kendalltau(*zip(*pairs, strict=True)).statistic),
            "median_error": statistics.median(abs(p / m - 1) for p, m in pairs),
            "over_ours": {w: r["measured_s"] / ran["ours"]["measured_s"] for w, r in ran.items()},
        }
    return out


def run_cells(job: dict[str, Any], say: Callable[[dict[str, Any]], None], rank: int) -> None:
    """Runs on every host: some steps of each way in every round. The first host writes the rows."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{job['coordinator']}",
        rank=rank,
        world_size=job["hosts"],
        timeout=timedelta(seconds=240),
    )
    torch.set_num_threads(1)
    for cell in job["cells"]:
        say({"key": cell["key"], "begun": time.time()})
        plans = _plans(cell["key"], Path(cell["machine"]), job["hosts"])
        steps = {
            way: step
            for way, strategy in PLANNED.items()
            if strategy in plans and (step := _way(way, cell["key"], plans[strategy])) is not None
        }
        first = {way: _agreed(float(step()), "mean") for way, step in steps.items()}
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in steps}
        for _ in range(ROUNDS):
            for way, step in steps.items():
                times[way] += _timed(step, -(-cell["iterations"] // ROUNDS))
        rows = []
        for way in steps:
            took, cpu = zip(*times[way], strict=True)
            low, _, high = statistics.quantiles(took, n=4)
            middle = statistics.median(took)
            plan = plans[PLANNED[way]]
            rows.append(
                {
                    "way": way,
                    "strategy": PLANNED[way].strip("/"),
                    "mesh": list(plan.mesh.sizes),
                    "loss": first[way],
                    "predicted_s": plan.cost,
                    "measured_s": middle,
                    "spread": (high - low) / middle,
                    "cpu_s": statistics.median(cpu),
                    "steps": len(times[way]),
                }
            )
        say({"key": cell["key"], "rows": rows})
    dist.barrier()
    os._exit(0)  # Gloo's threads may abort the interpreter's shutdown


def _plans(name: str, machine: Path, devices: int) -> dict[str, Any]:
    """Returns the plan of each strategy, which is the same on every host."""
    import pase
    from bench.cases.plans import Case
    from pase.compiler.problem.problem import SplitProblem
    from pase.frontends import registry
    from pase.machine import load

    module, batch = _model(name)
    traced = registry.trace(module, batch)
    problem = SplitProblem.of(traced.graph, devices, load(machine), "analytic", "adam", "machine")
    case = Case(traced=traced, problem=problem)
    split = [s for s in dict.fromkeys(PLANNED.values()) if s != STAGES]
    found = {strategy: case.plan(strategy) for strategy in split}
    found[STAGES] = pase.compile(
        module,
        batch,
        devices=devices,
        machine=machine,
        pipeline=devices,
        stage_schedule="1f1b",
        accumulate=MICRO_BATCHES,
        remat="none",
        baselines=False,
    )
    return {k: p for k, p in found.items() if p is not None}


def _model(name: str) -> tuple[Any, dict[str, Any]]:
    import torch
    import transformers

    torch.manual_seed(0)
    of, sizes = MODELS[name]
    made = getattr(transformers, of)
    module = made(made.config_class(**sizes, use_cache=False)).train()
    ids = torch.randint(sizes["vocab_size"], (BATCH, LENGTH))
    return module, {"input_ids": ids, "labels": ids}


def _way(way: str, name: str, plan: Any) -> Callable[[], Any] | None:
    """Returns a function that runs a step with its update and returns the loss of this rank. None if PyTorch cannot run
    the model so."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    module, batch = _model(name)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if way == "ours" or way.endswith("by pase"):
        step = plan.torch.train_step(module, torch.optim.Adam, lr=1e-3)
        return lambda: step(batch)
    if name != "Llama" and way not in ("DDP", "FSDP2"):
        return None
    if PLANNED[way] == STAGES:
        return _in_stages(module, batch)
    mine = {k: v.chunk(ranks)[rank] for k, v in batch.items()}
    if way == "DDP":
        net: Any = DistributedDataParallel(module)
    elif way == "FSDP2":
        for layer in module.model.layers if name == "Llama" else module.transformer.h:
            fully_shard(layer)
        net = fully_shard(module)
    else:
        net, mine = _by_its_own_plan(module, init_device_mesh("cpu", (ranks,))), batch
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step_of_framework() -> Any:
        optimizer.zero_grad()
        loss = net(**copy.copy(mine)).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step_of_framework


def _in_stages(module: Any, batch: Mapping[str, Any]) -> Callable[[], Any]:
    """Returns a step of a Llama in stages of equally many layers, one on each rank, by PyTorch's own schedule."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    ranks, rank, llama = dist.get_world_size(), dist.get_rank(), module.model
    share = len(llama.layers) // ranks

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = llama.embed_tokens if rank == 0 else None
            self.layers = llama.layers[rank * share : (rank + 1) * share]
            self.last = torch.nn.Sequential(llama.norm, module.lm_head) if rank == ranks - 1 else None
            self.rotary = llama.rotary_emb

        def forward(self, x: Any) -> Any:
            x = x if self.first is None else self.first(x)
            turned = self.rotary(x, torch.arange(LENGTH)[None])
            for layer in self.layers:
                x = layer(x, attention_mask=None, position_embeddings=turned)
            return x if self.last is None else self.last(x)

    def loss_of(logits: Any, labels: Any) -> Any:
        return module.loss_function(logits, labels, module.config.vocab_size)

    stage = Stage()
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, ranks, torch.device("cpu")), MICRO_BATCHES, loss_fn=loss_of
    )
    optimizer = torch.optim.Adam(stage.parameters(), lr=1e-3)

    def step() -> Any:
        optimizer.zero_grad()
        losses: list[Any] = []
        given = (batch["input_ids"],) if rank == 0 else ()
        told = {"target": batch["labels"], "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*given, **told)
        optimizer.step()
        whole = sum(x.detach() for x in losses) / MICRO_BATCHES if losses else torch.zeros(())
        return whole * ranks  # all ranks' mean is then the last one's loss

    return step


def _by_its_own_plan(module: Any, mesh: Any) -> Any:
    """Returns the plan of transformers for the class, in PyTorch's styles."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    plan = {f"model.{k}": v for k, v in type(module.config).base_model_tp_plan.items()} | module._tp_plan
    own = {k: styles[v]() for k, v in plan.items() if v in styles}
    if not any("q_proj" in k for k in own):
        raise ValueError(f"transformers' plan has other styles than this bench knows: {plan}")
    return parallelize_module(module, mesh, own)


def _timed(step: Callable[[], Any], count: int) -> list[tuple[float, float]]:
    """Returns the seconds of each step on the slowest host, and the CPU's on the busiest; the hosts start together."""
    import torch.distributed as dist

    out = []
    for _ in range(count):
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        step()
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        out.append((_agreed(took, "max"), _agreed(cpu, "max")))
    return out


def _agreed(value: float, how: str) -> float:
    import torch
    import torch.distributed as dist

    x = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(x, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
    return float(x[0]) / (1 if how == "max" else dist.get_world_size())
