"""Compiled programs of JAX, and timelines of their ops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pase.replay.traces.hlo import HloFacts, read_hlo
from pase.replay.types import Event, Mark, Timeline, from_events


def varint(n: int) -> bytes:
    """Encodes a number as a protobuf varint."""
    return bytes([n]) if n < 128 else bytes([n % 128 + 128]) + varint(n // 128)


US = 1000


def facts_of_step(layers: int) -> HloFacts:
    """Returns the facts of a training step with equal layers that jax compiles here."""
    jax = pytest.importorskip("jax")

    def loss(w: Any, x: Any) -> Any:
        for v in w:
            x = jax.numpy.tanh(x @ v)
        return (x * x).sum()

    def step(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, (w, x), jax.grad(loss, (0, 1))(w, x))

    arrays = [jax.numpy.ones((16, 16))] * layers
    compiled = jax.jit(step).lower(arrays, jax.numpy.ones((8, 16))).compile()
    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    return read_hlo(b"\x0a" + varint(len(module)) + module, "here")


def timeline_of_steps(facts: HloFacts, ranks: int = 1, late_us: int = 0, steps: int = 5) -> Timeline:
    """A timeline of consecutive steps, in which each op takes 10 µs.

    If there are several ranks, the last one begins each step late, and an all-reduce ends the step.
    """
    ops = [n for n in facts.order if n in facts.ops]
    events, marks, begin = [], [], 0
    for k in range(steps):
        longest = begin + late_us * US + (10 * len(ops) + 50) * US
        for r in range(ranks):
            at = begin + (late_us * US if r == ranks - 1 else 0)
            first = at
            for n in ops:
                kind: dict[str, Any] = {"rank": r, "lane": "XLA ops", "device": True, "iteration": k}
                events.append(Event(kind="kernel", name=n, start_ns=at, duration_ns=10 * US, **kind))
                at += 10 * US
            if ranks > 1:
                more = {"operation": "all_reduce", "group": "", "nbytes": 1 << 10}
                events.append(
                    Event(
                        kind="collective", name="sum.1", start_ns=at, duration_ns=longest - at, **kind, **more
                    )
                )
                at = longest
            marks.append(Mark(rank=r, iteration=k, start_ns=first, end_ns=at))
        begin = longest
    return replace(from_events(events, marks=tuple(marks)), compiled=dict(facts.ops))
