"""Gains predicted from a profile, compared with the gains of the changes really made.

    python -m bench replay.gains [--only TEXT] [--steps 40]

Each row profiles a training step of JAX on one core of this machine, changes the durations in the replayed graph as the
change is expected to (ops of the scope that goes away take nothing, twice the batch takes twice the time of every op
but the optimizer's, ops on a dim that is halved take half the time, an update takes what its bytes take, half the bytes
take half the time), and then makes the change: the changed program is compiled and run in turn with the unchanged one.
The machine may be busy with other work, so both sides are what that disturbs least: the lowest decile over the steps of
each op's duration, of each gap, and of the CPU time of a step. ``error`` is the predicted over the measured ratio of
the steps, less one. Writes bench/results/replay_gains.json.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.runner import Benchmark, OwnProcess, option

if TYPE_CHECKING:
    from pase.replay.types import CompiledOp

QUIET = 0.1
"""The quantile over the steps that other work on the machine disturbs least."""
DurationFactor = Callable[["CompiledOp"], float]
"""What an op's duration is multiplied by."""


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """A classifier of residual layers, trained by Adam or SGD."""

    batch: int = 128
    width: int = 256
    layers: int = 4
    classes: int = 2000
    dtype: str = "float32"
    dropout: bool = False
    adam: bool = True


def _within(scope: str, factor: float) -> DurationFactor:
    return lambda op: factor if re.search(rf"\b{scope}\b", op.op_name) else 1.0


def _with_dim(size: int, factor: float) -> DurationFactor:
    """Ops that read or write an array with such a dim."""
    return lambda op: factor if any(size in dims for dims in (*op.operands, *op.product)) else 1.0


def _larger(op: CompiledOp) -> float:
    return 1.0 if op.work == "optimizer" else 2.0


def _sgd(op: CompiledOp) -> float:
    """Adam moves seven arrays of a parameter's size (it, its gradient, two moments; three are written), SGD three."""
    return 3 / 7 if op.work == "optimizer" else 1.0


BASE = Classifier()


def _fewer(op: CompiledOp) -> float:
    """Half the layers: of their ops, and of the updates of their parameters."""
    of_layer = op.work == "optimizer" and not any(BASE.classes in dims for dims in op.operands)
    return 0.5 if of_layer else _within("layer", 0.5)(op)


CHANGES: dict[str, tuple[Classifier, Classifier, DurationFactor]] = {
    "twice the batch": (BASE, replace(BASE, batch=256), _larger),
    "twice a small batch": (replace(BASE, batch=16), replace(BASE, batch=32), _larger),
    "half the classes": (BASE, replace(BASE, classes=1000), _with_dim(BASE.classes, 0.5)),
    "no dropout": (replace(BASE, dropout=True), BASE, _within("dropout", 0.0)),
    "two layers less": (BASE, replace(BASE, layers=2), _fewer),
    "SGD instead of Adam": (BASE, replace(BASE, adam=False), _sgd),
    "float32 instead of float64": (replace(BASE, dtype="float64"), BASE, lambda op: 0.5),
}


def _step(p: Classifier) -> tuple[Any, Any]:
    """Returns the compiled step of a program, and its arguments."""
    import jax
    import jax.numpy as jnp
    import optax

    jax.config.update("jax_enable_x64", p.dtype == "float64")
    # A profile does not say which of two programs of one name from a cache has run.
    jax.config.update("jax_enable_compilation_cache", False)
    keys = jax.random.split(jax.random.key(0), p.layers + 1)
    with jax.default_device(jax.devices("cpu")[0]):
        params = {
            f"w{k}": jax.random.normal(keys[k], (p.width, p.width), p.dtype) / 16 for k in range(p.layers)
        }
        params["head"] = jax.random.normal(keys[-1], (p.width, p.classes), p.dtype) / 16
        x = jnp.ones((p.batch, p.width), p.dtype)
        y = jnp.zeros((p.batch,), "int32")
    optimizer = optax.adam(1e-3) if p.adam else optax.sgd(1e-3)

    def loss(params: Any, x: Any, y: Any, key: Any) -> Any:
        for k in range(p.layers):
            with jax.named_scope("layer"):
                h = jnp.tanh(x @ params[f"w{k}"])
            if p.dropout:
                with jax.named_scope("dropout"):
                    h = h * jax.random.bernoulli(jax.random.fold_in(key, k), 0.9, h.shape) / 0.9
            x = x + h
        with jax.named_scope("head"):
            logits = x @ params["head"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, x, y, key), state, params)
        return optax.apply_updates(params, updates), state

    args = (params, optimizer.init(params), x, y, jax.random.key(1))
    return jax.jit(step).lower(*args).compile(), args


def _predicted(folder: Path, factor: DurationFactor) -> tuple[float, float]:
    """Returns the replayed step and the one with the changed durations, in ns."""
    import numpy as np

    from pase.replay import align, load, measure, replay_graph
    from pase.replay.measurement.model import own_times

    m = measure(align(load(folder)))
    own = own_times(m, m.iterations())
    g = replace(
        own.graph,
        duration_ns=np.quantile(own.own_ns, QUIET, axis=0),
        lag_ns=np.quantile(own.own_lag_ns, QUIET, axis=0),
    )
    if not m.timeline.compiled:
        raise RuntimeError("the profile does not have the program that ran")
    by_name = {n: factor(op) for n, op in m.timeline.compiled.items()}
    factors = np.array([by_name.get(n, 1.0) for n in g.names])[g.name]
    changed = replace(g, duration_ns=g.duration_ns * factors)
    return replay_graph(g).makespan_ns, replay_graph(changed).makespan_ns


def compared(name: str, given: Namespace) -> dict[str, Any]:
    """Profiles, changes and runs one program, on one core; returns the row."""
    steps = given.steps
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    import jax
    import numpy as np

    from pase.replay.collect.profiling import profile

    before, after, factor = CHANGES[name]
    programs = [_step(before), _step(after)]
    for run, args in programs:
        jax.block_until_ready(run(*args))
    taken: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        run, args = programs[0]
        with profile(folder, framework="jax") as traced:
            for _ in range(steps):
                with traced.step():
                    jax.block_until_ready(run(*args))
        for _ in range(steps):
            for seconds, (run, args) in zip(taken, programs, strict=True):
                begun = time.process_time()
                jax.block_until_ready(run(*args))
                seconds.append(time.process_time() - begun)
        now_ns, then_ns = _predicted(Path(folder), factor)
    now, then = (float(np.quantile(seconds, QUIET)) for seconds in taken)
    return {
        "predicted_ratio": then_ns / now_ns,
        "measured_ratio": then / now,
        "error": (then_ns / now_ns) / (then / now) - 1,
        "replayed_ms": now_ns / 1e6,
        "cpu_ms": now * 1e3,
        "changed_cpu_ms": then * 1e3,
    }


BENCH = Benchmark(
    "replay_gains",
    tuple(CHANGES),
    compared,
    apart=OwnProcess(cpu_s=900),  # a process has its own number of threads
    options=[option("--steps", type=int, default=40)],
)
