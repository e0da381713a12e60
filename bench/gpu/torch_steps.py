"""Training steps of PyTorch models on this accelerator: eager, compiled, and under a plan; time and peak memory.

    python -m bench gpu.torch_steps --machine h100x8              # six models on one GPU; ten minutes
    python -m bench gpu.torch_steps --only bert --machine h100x8  # these rows again

A row has for each way to run the step (``eager``; ``compiled`` by torch.compile; ``plan``, the plan's step; and
``plan_compiled``, the same with ``compile=True``) the median seconds of a step, and the allocator's peak. The step is
forward, backward and AdamW, with ``fused=True`` on a GPU. The plan is for one device, so it sends nothing, and its
step should take what PyTorch's own takes. Each way runs in a process of its own, because the peak is that of the
process. Writes bench/results/gpu_torch_steps.json.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

from bench.processes import forks_of, row_apart
from bench.runner import Benchmark, option

StepWay = Literal["eager", "compiled", "plan", "plan_compiled"]
CPU_S = 900
"""The limit of CPU time of one way, most of which torch.compile needs."""

CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], str]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
        (16, 1024),
        "bfloat16",
    ),
    "bert": (
        "BertForMaskedLM",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        (32, 512),
        "bfloat16",
    ),
    "llama, 4 layers": (
        "LlamaForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        (1, 4096),
        "bfloat16",
    ),
    "vit, large": (
        "ViTForImageClassification",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        (64, 3, 224, 224),
        "bfloat16",
    ),
    "resnet50": ("ResNetForImageClassification", {}, (64, 3, 224, 224), "float32"),
    "tiny bert": (
        "BertForMaskedLM",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 512,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        (4, 32),
        "float32",
    ),
}
"""Row -> (class of transformers, changes of its default configuration, shape of the input, dtype)."""


def built(name: str, device: str) -> tuple[Any, tuple[Any, Any], Callable[..., Any]]:
    """The model of a row, its batch, and the loss as a function of both."""
    import torch
    import transformers

    kind, changes, shape, dtype = CASES[name]
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    own = {"attn_implementation": "sdpa"} if cls._supports_sdpa else {}
    model = cls(cls.config_class(**changes, **own)).to(device, getattr(torch, dtype)).train()
    model.config.use_cache = False
    if len(shape) == 2:
        ids = torch.randint(0, model.config.vocab_size, shape, device=device)
        return model, (ids, ids.clone()), lambda m, x, y: m(input_ids=x, labels=y).loss
    images = torch.randn(shape, device=device, dtype=getattr(torch, dtype))
    labels = torch.randint(0, model.config.num_labels, shape[:1], device=device)
    return model, (images, labels), lambda m, x, y: m(pixel_values=x, labels=y).loss


def measured(name: str, way: StepWay, machine: str | None, count: int) -> dict[str, Any]:
    """Seconds and bytes of a step, run in one way in this process."""
    import torch

    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model, batch, loss = built(name, device)
    settings = {"lr": 1e-4, "fused": gpu}
    row: dict[str, Any] = {"torch": torch.__version__}
    if way in ("eager", "compiled"):
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        run = (
            torch.compile(lambda *given: loss(model, *given))
            if way == "compiled"
            else lambda *g: loss(model, *g)
        )

        def step() -> Any:
            value = run(*batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return value.detach()

    else:
        import pase

        chosen = {} if machine is None else {"machine": machine}
        plan = pase.compile(model, *batch, devices=1, loss=loss, memory_limit="none", **chosen)
        row |= {"predicted_s": plan.cost, "predicted_bytes": plan.memory.total}
        torch.distributed.init_process_group(
            "nccl" if gpu else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        own = plan.torch.train_step(model, torch.optim.AdamW, compile=way == "plan_compiled", **settings)
        step = lambda: own(*batch)  # noqa: E731
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    begun, times = time.perf_counter(), []
    for k in range(3 + count):
        start = time.perf_counter()
        value = step()
        if gpu:
            torch.cuda.synchronize()
        if k >= 3:
            times.append(time.perf_counter() - start)
        elif k == 0:
            row["first_s"] = time.perf_counter() - begun
    row |= {"s": statistics.median(times), "loss": float(value)}
    if gpu:
        row |= {"device": torch.cuda.get_device_name(), "peak_bytes": torch.cuda.max_memory_allocated()}
    return row


def apart(name: str, given: Any) -> dict[str, Any]:
    """A row of the bench: each way in a process of its own."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    forks = forks_of([__name__])
    ways = given.ways or get_args(StepWay)
    return {w: row_apart(forks, measured, name, w, given.machine, given.steps, cpu_s=CPU_S) for w in ways}


BENCH = Benchmark(
    "gpu_torch_steps",
    [*CASES],
    apart,
    named="{model}",
    line=lambda name, row: f"{name}: {row}",
    options=(
        option(
            "--machine", metavar="NAME", help="the machine file to predict with; by default pase's default"
        ),
        option("--steps", type=int, default=10, metavar="N", help="timed steps of each way"),
        option("--ways", nargs="+", choices=get_args(StepWay), help="only these ways to run a step"),
    ),
)
