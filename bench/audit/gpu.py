"""Compares predictions with XLA's compiler for NVIDIA GPUs, without a GPU.

It needs JAX's CUDA plugin of JAX's own version, which is no part of the default extras:

    python -m venv /tmp/gpu && /tmp/gpu/bin/pip install -c constraints.txt -e ".[jax,verify-cuda]"
    /tmp/gpu/bin/python -m bench audit.gpu --resume       # 6 to 190 s for each row
    /tmp/gpu/bin/python -m bench audit.gpu gpt2           # the rows of these models

One train step is compiled ahead of time under several strategies; nothing is run. Seconds are a roofline of the
compiled program (``pase.hlo.kernels``). Writes bench/results/gpu_aot.json: a row per model, method, lowering, number
of GPUs and machine.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from functools import lru_cache
from typing import Any

from bench.runner import Benchmark

HOPPER, BLACKWELL = "h100x8", "b200x8"
MODELS = {
    "mlp": "mlp",
    "gpt2": "gpt2?batch=64",
    "bert_base": "bert_base?batch=256",
    "llama": "llama3_8b?layers=2&batch=8&seq=512&vocab=8192",
    "mixtral": "mixtral_8x7b?layers=2&batch=8&seq=512&vocab=8192",
    "vit": "vit_l16?batch=64",
    "resnet": "resnet101?batch=256",
    "rnnlm": "rnnlm",
    "transformer": "transformer",
}
PROGRAMS = {name: f"bench.audit.gpu_programs:{name}" for name in ("decoder", "vision")}
"""Models of Flax NNX that are none of ours."""
CELLS = [
    *((m, method, "manual", 8, HOPPER) for m in MODELS for method in ("pase", "data_parallel")),
    *((m, method, "manual", 8, HOPPER) for m in PROGRAMS for method in ("pase", "data_parallel", "fsdp")),
    ("mlp", "pase", "annotated", 8, HOPPER),
    ("gpt2", "pase", "annotated", 8, HOPPER),
    ("gpt2", "fsdp", "manual", 8, HOPPER),
    ("llama", "fsdp", "manual", 8, HOPPER),
    ("llama", "megatron_sp_2x4", "manual", 8, HOPPER),
    ("llama", "pase", "annotated", 8, HOPPER),
    ("mlp", "pase", "manual", 32, HOPPER),
    ("gpt2", "pase", "manual", 32, HOPPER),
    ("llama", "pase", "manual", 32, HOPPER),
    ("gpt2", "pase", "manual", 128, HOPPER),
    ("llama", "pase", "manual", 128, HOPPER),
    ("mlp", "pase", "manual", 8, BLACKWELL),
    ("gpt2", "pase", "manual", 8, BLACKWELL),
]


@lru_cache(2)
def _plans(model: str, devices: int, machine: str) -> dict[str, Any]:
    import pase

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name = PROGRAMS.get(model) or f"zoo:{MODELS[model]}"
        return dict(pase.compare(name, devices=devices, machine=machine))


def measured(model: str, method: str, lowering: str, devices: int, machine: str) -> dict[str, Any] | None:
    """Returns the row of a cell; None if the model has no such method."""
    plan = _plans(model, devices, machine).get(method)
    if plan is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = plan.verify(machine, lowering=lowering)
    about = {"model": model, "zoo": MODELS.get(model, ""), "method": method, "mesh": list(plan.mesh.sizes)}
    return (
        about | {"asked": lowering} | {k: v for k, v in found.to_json().items() if k not in ("model", "how")}
    )


BENCH = Benchmark(
    "gpu_aot",
    {f"{cell[0]}: {', '.join(map(str, cell[1:]))}": cell for cell in CELLS},
    measured,
    named="{model}: {method}, {asked}, {devices}, {target}",
    head=lambda rows: {
        "how": "compiled ahead of time: nothing ran",
        **{p: importlib.metadata.version(p) for p in ("jax", "jax-cuda12-plugin")},
    },
    environment={"JAX_PLATFORMS": "cpu"},
    resumes=True,
)
