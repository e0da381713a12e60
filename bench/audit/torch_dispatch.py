"""Counts what a rank of a PyTorch plan does besides PyTorch's own step: dispatched ops, and bytes saved for backward.

    python -m bench audit.torch_dispatch                  # six models, six strategies; two minutes on one core
    python -m bench audit.torch_dispatch --only "GPT-2"

Each row is one model under one strategy: forward and backward of rank 0, after a first step, against the model's own
forward and backward on the whole batch. ``ops``: what PyTorch dispatches below autograd, views and collectives
included, but not the ``waits``, which start no kernel; the ratio ``with_waits`` counts them. ``edges``: collectives
among ours. The ratio ``besides_edges`` is of ours without them. ``saved``: bytes of the storages that autograd keeps
for backward, without parameters, buffers and the batch (a rank's part is a view of it); on several ranks, against the
whole batch's divided by the ranks. ``step``: milliseconds on the CPU, where these tiny models are mostly Python and
dispatch. ``fsdp2``: what a rank of PyTorch's own ``fully_shard`` dispatches, waits and profiler marks left out, and
``of_fsdp2`` ours / its. It shards the module as one group, so it sends as few messages as ours. Its batch norms are
those of a rank's own examples, and send nothing. Writes bench/results/torch_dispatch.json.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from bench.audit.torch_memory import APART
from bench.cases.plans import Case
from bench.cases.torch_models import in_float32
from bench.cases.torch_ranks import alone_among
from bench.runner import Benchmark

MODELS = ("GPT-2", "Llama", "BERT", "ViT", "T5", "ResNet")
FSDP, AGAIN = "FSDP", "FSDP, gathered again"
STRATEGIES = {
    "one rank": ("ours", 1),
    "data parallel": ("data_parallel", 4),
    FSDP: ("fsdp", 4),
    AGAIN: ("fsdp", 4),
    "Megatron": ("megatron/megatron_2x2", 4),
    "ours": ("ours@2x2", 4),
}
"""Strategy -> its name as in ``bench.cases.plans.Case``, and the number of devices. Under ``AGAIN``, backward gathers
parameters again, as FSDP2 does by default; otherwise they are kept, and count as saved, from forward to backward."""
STEPS = 5


def dispatched(run: Callable[[], object]) -> Counter[str]:
    """Returns the ops that PyTorch dispatches below autograd while ``run`` runs, by name."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found[str(func)] += 1
            return func(*args, **(kwargs or {}))

    with Count():
        run()
    return found


def saved(run: Callable[[], object], without: Collection[Any]) -> int:
    """Returns the bytes of the storages that autograd has saved when backward first reads one, while ``run`` runs.

    without: tensors whose storages do not count.
    """
    import torch

    known = {x.untyped_storage()._cdata for x in without}
    storages: dict[int, Any] = {}  # they are kept, so that no second one gets the place of the first
    found: list[int] = []

    def pack(x: Any) -> Any:
        storage = x.untyped_storage()
        if storage._cdata not in known:
            storages[storage._cdata] = storage
        return x

    def unpack(x: Any) -> Any:
        if not found:  # gathered parameters have no memory between forward and backward
            found.append(sum(s.nbytes() for s in storages.values()))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        run()
    return found[0]


def counted(run: Callable[[], object]) -> dict[str, int]:
    """Returns the dispatched ops of ``run``, which has run before, and those among them that wait or send."""
    ops = dispatched(run)
    waits = sum(n for op, n in ops.items() if "wait_tensor" in op)
    marks = sum(n for op, n in ops.items() if op.startswith("profiler."))
    sent = sum(n for op, n in ops.items() if "c10d" in op) - waits
    return {"ops": ops.total() - waits - marks, "waits": waits, "edges": sent}


def of_fsdp2(module: Any, batch: dict[str, Any], again: bool) -> dict[str, int]:
    """Returns the counts of a rank's forward and backward under ``fully_shard``. again: whether backward gathers
    again."""
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(copy.deepcopy(module), reshard_after_forward=again)

    def run() -> None:
        net(**batch).loss.backward()

    run()
    run()  # its first step prepares what later ones use
    return counted(run)


def compared(module: Any, batch: dict[str, Any], strategy: str) -> dict[str, Any] | None:
    """Returns ours and PyTorch's counts. None if the strategy does not apply to the model."""
    from pase import machine
    from pase.compiler.problem.problem import SplitProblem
    from pase.compiler.problem.variants import Variant
    from pase.frontends import registry

    label, devices = STRATEGIES[strategy]
    traced = registry.trace(module, batch)
    problem = SplitProblem.of(traced.graph, devices, machine.load("h100x8"), "analytic", "adam")
    problem = problem.varied(traced, Variant(gathers_again=strategy == AGAIN))
    plan = Case(traced=traced, problem=problem).plan(label)
    if plan is None:
        return None
    mine = copy.deepcopy(module)

    def eager() -> None:
        module(**batch).loss.backward()

    with alone_among(devices, rank=0):
        step = plan.torch.parallelize(mine)

        def ours() -> None:
            step.backward(batch)

        local = [x.to_local() if hasattr(x, "to_local") else x for x in (*mine.parameters(), *mine.buffers())]
        given = list(batch.values())
        out: dict[str, Any] = {}
        for name, run, own in (
            ("pytorch", eager, [*module.parameters(), *module.buffers(), *given]),
            ("ours", ours, [*local, *given]),
        ):
            run()  # makes the first gradients, and records our program
            out[name] = {**counted(run), "saved": saved(run, own)}
            began = time.perf_counter()
            for _ in range(STEPS):
                run()
            out[name]["step_ms"] = round((time.perf_counter() - began) / STEPS * 1e3, 2)
        a, b = out["ours"], out["pytorch"]
        if strategy in (FSDP, AGAIN):
            mine = {k: v.chunk(devices)[0] for k, v in batch.items()}
            out["fsdp2"] = of_fsdp2(module, mine, again=strategy == AGAIN)
            out["of_fsdp2"] = round(a["ops"] / out["fsdp2"]["ops"], 3)
    return out | {
        "ops": round(a["ops"] / b["ops"], 3),
        "with_waits": round((a["ops"] + a["waits"]) / b["ops"], 3),
        "besides_edges": round((a["ops"] - a["edges"]) / b["ops"], 3),
        "saved": round(a["saved"] * devices / b["saved"], 3),
        "step": round(a["step_ms"] / b["step_ms"], 2),
    }


def measured(model: str, strategy: str) -> dict[str, Any]:
    """Returns the row of a model under a strategy."""
    import torch

    torch.set_num_threads(1)
    module, batch = in_float32(model, 4 * STRATEGIES[strategy][1])
    found = compared(module, batch, strategy)
    return {"refused": True} if found is None else found


BENCH = Benchmark(
    "torch_dispatch",
    {f"{m} {s}": (m, s) for m in MODELS for s in STRATEGIES},
    measured,
    "{model} {strategy}",
    apart=APART,
)
