"""Training steps on this accelerator: plain JAX, the same under a plan, and the prediction.

    python -m bench gpu.jax_steps --machine h100x8               # models of the zoo on one GPU; ten minutes
    python -m bench gpu.jax_steps --only gpt2 --machine h100x8   # these rows again

A row has seconds and bytes of one step (loss, gradients and optax.adam in one program, with donated arguments):
``plain_s`` and ``plan_s`` without waiting between steps, ``plain_synced_s`` and ``plan_synced_s`` with waiting after
each (the median), so that the host's part shows; ``peak_bytes`` of the allocator, the sizes that XLA plans, and what
pase predicts with the machine file. The plain step and the plan's take turns. Each row runs in a process of its own,
because the allocator's peak is that of the process. Writes bench/results/gpu_jax_steps.json.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from bench.runner import Benchmark, OwnProcess, option

CASES = (
    "gpt2?batch=16",
    "bert_base?batch=32",
    "resnet101?batch=64",
    "transformer?batch=64",
    "vgg19?batch=64",
    "densenet121?batch=32",
    "inception_v3?batch=64",
    "vit_l16?batch=32",
    "rnnlm?batch=64",
    "llama3_8b?layers=2&batch=2",
    "mlp",
    "gpt2?layers=1&batch=2&seq=64&vocab=1024",
)
ROUNDS = 2
KEPT = ("argument_size_in_bytes", "temp_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes")

TimedStep = Callable[..., tuple[Any, Any, Any]]


def arrays(shapes: Any) -> Any:
    """Arrays of these shapes with small values, drawn from the number of the leaf."""
    import jax
    import jax.numpy as jnp

    def draw(k: int, s: Any) -> Any:
        key = jax.random.key(k)
        if jnp.issubdtype(s.dtype, jnp.floating):
            return (jax.random.normal(key, s.shape, jnp.float32) * 0.02).astype(s.dtype)
        return jax.random.randint(key, s.shape, 0, 100).astype(s.dtype)

    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [draw(k, s) for k, s in enumerate(leaves)])


def timed(
    steps: dict[str, TimedStep], begin: Callable[[str], tuple[Any, Any]], batch: Any, count: int
) -> Any:
    """Seconds a step of each, by name and way of waiting. begin: makes the parameters and the optimizer's state."""
    import jax

    apart: dict[str, list[float]] = {name: [] for name in steps}
    ahead: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            params, state = begin(name)
            for _ in range(3):
                params, state, loss = step(params, state, *batch)
            jax.block_until_ready((params, loss))
            for _ in range(count):
                start = time.perf_counter()
                params, state, loss = step(params, state, *batch)
                jax.block_until_ready((params, loss))
                apart[name].append(time.perf_counter() - start)
            start = time.perf_counter()
            for _ in range(count):
                params, state, loss = step(params, state, *batch)
            jax.block_until_ready((params, loss))
            ahead[name].append((time.perf_counter() - start) / count)
            del params, state
    seconds = {f"{name}_s": min(found) for name, found in ahead.items()}
    return seconds | {f"{name}_synced_s": statistics.median(found) for name, found in apart.items()}


def measured(spec: str, given: Namespace) -> dict[str, Any]:
    """A row of the bench."""
    import jax
    import optax

    import pase
    from pase import zoo

    model, optimizer = zoo.get(spec), optax.adam(1e-4)
    params = jax.device_get(arrays(model.params))
    made = arrays(model.batch)
    batch = made if isinstance(made, tuple) else (made,)

    def plain(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(model.loss_fn)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    chosen = {} if given.machine is None else {"machine": given.machine}
    plan = pase.compile(f"zoo:{spec}", devices=1, memory_limit="none", **chosen)
    steps: dict[str, TimedStep] = {
        "plain": jax.jit(plain, donate_argnums=(0, 1)),
        "plan": plan.jax.train_step(optimizer),
    }

    def begin(name: str) -> tuple[Any, Any]:
        there = jax.tree.map(jax.numpy.array, params)
        return there, optimizer.init(there) if name == "plain" else plan.jax.init(optimizer, there)

    held = begin("plain")
    planned = steps["plain"].lower(*held, *batch).compile().memory_analysis()  # type: ignore[attr-defined]
    del held
    row = timed(steps, begin, batch, given.steps)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **row,
        "predicted_s": plan.cost,
        "peak_bytes": peak,
        "predicted_bytes": plan.memory.total,
        **{k: getattr(planned, k) for k in KEPT},
    }


BENCH = Benchmark(
    "gpu_jax_steps",
    CASES,
    measured,
    named="{spec}",
    apart=OwnProcess(cpu_s=900),  # most of which the compiler needs
    options=(
        option(
            "--machine", metavar="NAME", help="the machine file to predict with; by default pase's default"
        ),
        option("--steps", type=int, default=10, metavar="N", help="timed steps in a row"),
    ),
)
