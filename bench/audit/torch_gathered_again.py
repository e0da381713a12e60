"""Compares a PyTorch step that gathers parameters again for backward with one that keeps them gathered, under FSDP.

    python -m bench audit.torch_gathered_again                  # twelve models on 8 devices; five minutes on one core
    python -m bench audit.torch_gathered_again --only "GPT-2"

Each row is one model, with messages of an eighth of its parameters, so that these small models are gathered piece by
piece, as large ones are. ``kept`` and ``again``: the tracked and the predicted peak of rank 0 with Adam (as in
``bench.audit.torch_memory``), and the bytes of parameters that it gathers in a step. ``peak``: tracked, again / kept.
``gathered``: the bytes, again / kept. ``ratio``: predicted / tracked, of both. Writes
bench/results/torch_gathered_again.json.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.audit.torch_memory import APART, peaks
from bench.cases.plans import Case
from bench.cases.torch_models import MODELS, in_float32
from bench.runner import Benchmark

DEVICES, MESSAGES = 8, 8


def measured(model: str) -> dict[str, Any]:
    """Returns the row of a model."""
    import torch

    from pase import machine
    from pase.compiler.problem.problem import SplitProblem
    from pase.compiler.problem.variants import Variant
    from pase.frontends import registry

    torch.set_num_threads(1)
    module, batch = in_float32(model, 4 * DEVICES)
    traced = registry.trace(module, batch)
    nbytes = sum(p.numel() * p.element_size() for p in module.parameters())
    small = replace(machine.load("h100x8"), bucket_bytes=nbytes / MESSAGES)
    problem = SplitProblem.of(traced.graph, DEVICES, small, "analytic", "adam")
    found = {}
    for name, again in (("kept", False), ("again", True)):
        way = problem.varied(traced, Variant(gathers_again=again))
        plan = Case(traced=traced, problem=way).plan("fsdp")
        assert plan is not None and plan.gathers_again == again
        gathers = [c for c in plan.collectives if c.kind == "all_gather"]
        sent = sum(c.nbytes * c.times for c in gathers if c.source.partition(":copy")[0] in plan.parameters)
        found[name] = peaks(plan, small.device.workspace_bytes) | {"gathered_bytes": sent}
    kept, again_ = found["kept"], found["again"]
    return {
        "peak": round(again_["tracked"]["total"] / kept["tracked"]["total"], 3),
        "gathered": round(again_["gathered_bytes"] / kept["gathered_bytes"], 3),
        "ratio": [x["ratio"] for x in found.values()],
        **found,
    }


BENCH = Benchmark("torch_gathered_again", list(MODELS), measured, "{model}", apart=APART)
