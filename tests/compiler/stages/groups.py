"""A machine of unequal devices, and a problem on it."""

from __future__ import annotations

from functools import cache

from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.resolve import traced_model
from pase.machine import LinkLevel, Machine, load
from pase.machine.groups import grouped
from pase.machine.scale import scaled

MODEL = "zoo:gpt2?layers=6&batch=16&seq=128&vocab=2048&remat=0"


@cache
def machine(speed: float = 0.4, link: float = 12.5e9, counts: tuple[int, int] = (2, 2)) -> Machine:
    """Return a machine of H100s, and of devices at a fraction of their speed, joined by a link."""
    fast = load("h100x8")
    slow = scaled(fast, {"flops": speed, "memory": speed})
    between = LinkLevel(name="net", latency_s=2e-5, bandwidth_bytes_per_s=link)
    return grouped("mixed", list(zip((fast, slow), counts, strict=True)), between, {})


def setup(m: Machine, devices: int, **options):  # type: ignore[no-untyped-def]
    asked = CompileOptions(devices=devices, machine=m, memory_limit="none", remat="none", **options)
    traced, _ = traced_model(MODEL, None, (), asked)
    problem = SplitProblem.of(traced.graph, devices, m, "analytic", "adam", asked.overlap)
    return problem, traced, asked
