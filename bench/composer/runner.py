"""Runs programs in child processes, counts how they end, and finds the smallest program that ends in the same way."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from bench.composer.outcomes import FAULTS
from bench.composer.spec import Spec, parse
from bench.processes import forks_of, rows_apart

__all__ = ["ENVIRONMENT", "Framework", "counted", "ended", "failing", "rows", "shrunk"]

Framework = Literal["jax", "torch"]
MODULES: dict[Framework, str] = {"jax": "bench.composer.jax_runs", "torch": "bench.composer.torch_runs"}
"""Each has draw(seed) -> Spec, attempt(Spec) -> a row, and written(Spec) -> text."""
PRELOADED: dict[Framework, tuple[str, ...]] = {
    "jax": ("optax", "equinox", "flax.linen", "flax.nnx"),
    "torch": (
        "torch.export",
        "torch._export",
        "torch._dynamo",
        "torch._functorch.aot_autograd",
        "torch.distributed.tensor",
        "torch.testing._internal.distributed.multi_threaded_pg",
        "pase.compiler.compilation",
        "pase.frontends.torch.frontend",
    ),
}
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_cpu_collective_timeout_seconds=600",
    "JAX_PLATFORMS": "cpu",
    "JAX_TRACEBACK_FILTERING": "off",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "JAX_ENABLE_X64": "1",
    "NUMBA_THREADING_LAYER": "workqueue",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""XLA generates code in one piece, and HLO has no tracebacks: this saves a third of a program's CPU time."""
ALONE = re.compile(r"/(aot_eager|graph|inductor)/")
"""Programs that need their own child: torch.compile needs processes as ranks, which are forked before any backward."""
CPU_S = 150
"""The limit of CPU seconds for a program."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """Starts children as forks of a process that has only imported what they need."""

    framework: Framework
    processes: Any

    @classmethod
    def of(cls, framework: Framework) -> Server:
        os.environ |= ENVIRONMENT
        return cls(
            framework=framework,
            processes=forks_of([MODULES[framework], "bench.cases.plans", *PRELOADED[framework]]),
        )


def _attempt(framework: Framework, text: str) -> dict[str, Any]:
    row: dict[str, Any] = import_module(MODULES[framework]).attempt(parse(text))
    return row


def rows(server: Server, programs: Iterable[Spec]) -> Iterator[dict[str, Any]]:
    """Yields the row of each program, in order."""
    cases = [(server.framework, str(spec)) for spec in programs]
    found = rows_apart(
        server.processes, _attempt, cases, cpu_s=CPU_S, alone=lambda case: bool(ALONE.search(case[1]))
    )
    for (_, text), row in found:
        yield _lost(text, row) if "end" in row else row


def _lost(text: str, end: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a program whose process ended."""
    spec = parse(text)
    return {
        "program": text,
        "patterns": sorted({p.pattern for p in (*spec.parts, spec.loss)}),
        "ends": {m: end for m in spec.manners},
    }


def ended(row: Mapping[str, Any]) -> str:
    """Returns how a program ended, in the worst of its ways to run."""
    ends = [e["end"] for e in row["ends"].values()]
    return min(ends, key=lambda e: (*FAULTS, "refused", "agrees", "unstable", "no plan").index(e))


def failing(row: Mapping[str, Any]) -> bool:
    """Returns whether a program ended with a fault."""
    return ended(row) in FAULTS


def shrunk(
    server: Server, spec: Spec, alike: Callable[[Mapping[str, Any]], bool]
) -> tuple[Spec, dict[str, Any]]:
    """Returns the smallest program found that ends in the same way, and its row, by leaving out parts."""
    (row,) = rows(server, [spec])
    tried = {str(spec)}
    while True:
        for smaller in spec.smaller():
            if str(smaller) in tried:
                continue
            tried.add(str(smaller))
            (found,) = rows(server, [smaller])
            if alike(found):
                spec, row = smaller, found
                break
        else:
            return spec, row


def counted(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns how many rows ended how, by way to run and by pattern, and the refusals by message."""
    ends = Counter(ended(row) for row in found.values())
    ways: dict[str, Counter[str]] = {}
    patterns: dict[str, Counter[str]] = {}
    refusals: Counter[str] = Counter()
    fell: Counter[str] = Counter()
    for row in found.values():
        for word in row["patterns"]:
            patterns.setdefault(word, Counter())[ended(row)] += 1
        for manner, end in row["ends"].items():
            kind = re.sub(r"\d*(@.*)?$", "", manner.partition("/")[0])
            ways.setdefault(kind, Counter())[end["end"]] += 1
            fell["fell back" if "fell_back" in end else "as asked"] += end["end"] == "agrees"
            if end["end"].startswith("refused"):
                refusals[_kind(end["message"])] += 1
    return {
        "of": len(found),
        "ends": dict(ends.most_common()),
        "lowered": dict(fell),
        "ways": {k: dict(v.most_common()) for k, v in sorted(ways.items())},
        "patterns": {k: dict(v.most_common()) for k, v in sorted(patterns.items())},
        "refusals": dict(refusals.most_common(40)),
        "not agreeing": {
            k: row for k, row in found.items() if ended(row) not in ("agrees", "unstable", "no plan")
        },
    }


def _kind(message: str) -> str:
    """Returns the message of a refusal without lines and numbers."""
    text = re.sub(r" at \S+\.py:\d+(:\d+)?( \([^)]*\))?", "", message.splitlines()[0])
    return re.sub(r"\d+", "#", text)[:160]
