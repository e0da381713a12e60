"""Bucket plans in the text of XLA's compiler for NVIDIA GPUs, without a GPU: how many messages are left as planned.

It needs JAX's CUDA plugin, as bench.audit.gpu does:

    /tmp/gpu/bin/python -m bench audit.gpu_buckets        # 7 s for each row
    /tmp/gpu/bin/python -m bench audit.gpu_buckets gpt2   # the rows of this model

A train step with data parallelism on 8 H100 is compiled ahead of time under the bucket plan of each policy, once as XLA
does by default and once with a threshold of one byte for its own joining of collectives. Nothing is run. Messages are
counted with the turns of their loops. Writes bench/results/gpu_buckets.json.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from functools import lru_cache
from typing import Any

from bench.runner import Benchmark

MODELS = {"gpt2": "gpt2?batch=64", "bert_base": "bert_base?batch=256"}
POLICIES = ("none", "ddp", "fifo", "mg_wfbp", "tic", "tac", "ours")
KEPT = " ".join(
    f"--xla_gpu_{kind}_combine_threshold_bytes=1" for kind in ("all_reduce", "all_gather", "reduce_scatter")
)
CELLS = [(m, p, joined) for m in MODELS for p in POLICIES for joined in ("by default", "as planned")]


@lru_cache(1)
def _plan(model: str) -> Any:
    import pase

    return dict(pase.compare(f"zoo:{MODELS[model]}", devices=8, machine="h100x8"))["data_parallel"]


def measured(model: str, policy: str, joined: str) -> dict[str, Any]:
    """Returns the row of a cell: planned and compiled messages of a step."""
    from pase.hlo.collectives import collectives

    given = os.environ.get("XLA_FLAGS", "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = _plan(model)
        plan = plan if policy == "none" else plan.scheduled(policy)
        try:
            os.environ["XLA_FLAGS"] = f"{given} {KEPT}" if joined == "as planned" else given
            found = plan.verify("h100x8", lowering="manual")
        finally:
            os.environ["XLA_FLAGS"] = given
    sent: Counter[str] = Counter()
    for c in collectives(found.text):
        sent[c.kind] += c.count
    return {
        "planned": None if policy == "none" else len(plan.bucket_plan.messages),
        "compiled": sum(sent.values()),
        "by kind": dict(sent),
        "bytes_equal": found.bytes_equal,
        "waited_s": found.waited_s,
        "step_s": found.step_s,
    }


BENCH = Benchmark(
    "gpu_buckets",
    {f"{m}: {p}, joined {j}": (m, p, j) for m, p, j in CELLS},
    measured,
    named="{model}: {policy}, joined {joined}",
    environment={"JAX_PLATFORMS": "cpu"},
    resumes=True,
)
