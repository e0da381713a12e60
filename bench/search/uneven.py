"""Dims that the devices do not divide: padded and as written.

    python -m bench search.uneven [--only "gpt2, 8"]

Both are compared with the next extents that the devices divide. ``layers`` is a model of one hidden layer; its machine
is an H100 whose products take a million times as long, so that a small model is worth splitting. Its bound holds for
the model as written and for the paddings that were searched. Writes bench/results/uneven.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

import pase
from bench.runner import Benchmark
from pase.api import Plan

DEVICES = 8
SLOWER = 1e6


def _gpt2(vocabulary: int, uneven: str) -> Plan:
    return pase.compile(
        f"zoo:gpt2?batch=2&vocab={vocabulary}",
        devices=DEVICES,
        baselines=False,
        memory_limit="none",
        uneven=uneven,
    )


def _layers(sizes: tuple[int, int, int], uneven: str) -> Plan:
    """sizes: those of the batch, of its features, and of the hidden layer."""

    def loss(p: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        h = jax.nn.relu(x @ p["up"] + p["bias"])
        return ((h @ p["down"] - y) ** 2).mean()

    machine = pase.machine.load("h100x8")
    rates = {k: v / SLOWER for k, v in machine.device.peak_flops.items()}
    machine = replace(machine, device=replace(machine.device, peak_flops=rates, products=None))
    b, d, e = sizes
    params = {"up": jnp.ones((d, e)), "bias": jnp.ones(e), "down": jnp.ones((e, d))}
    batch = jnp.ones((b, d))
    return pase.compile(
        loss, params, batch, batch, devices=DEVICES, machine=machine, memory_limit="none", uneven=uneven
    )


ROWS: dict[str, tuple[Callable[[str], Plan], Callable[[], Plan]]] = {
    "layers 31 x 63 x 61, 8": (lambda u: _layers((31, 63, 61), u), lambda: _layers((32, 64, 64), "whole")),
    "gpt2, 8": (lambda u: _gpt2(50_257, u), lambda: _gpt2(50_264, "whole")),
}
"""The model by the option ``uneven``, and the same model with the next extents that 8 divides, by name."""


def measured(model: Callable[[str], Plan], divisible: Callable[[], Plan]) -> dict[str, object]:
    """Returns a row: the padded plan, the plan without padding, and that of the neighbour whose dims divide."""
    began = time.process_time()
    padded = model("padded")
    took = time.process_time() - began
    neighbour = divisible()
    return {
        "padding": {str(k): v for k, v in padded.padding.items()},
        "padded_s": padded.cost,
        "as_written_s": padded.baselines.get("no_padding", padded.cost),
        "neighbour_s": neighbour.cost,
        "bound_over_cost": padded.bound / padded.cost,
        "optimal": padded.optimal,
        "paddings": padded.provenance.get("paddings", "0"),
        "cpu_s": round(took, 1),
    }


BENCH = Benchmark(
    "uneven", ROWS, measured, named="{case}", head={"devices": DEVICES, "target": "h100x8 (predicted)"}
)
