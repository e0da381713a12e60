"""Programs in child processes: one that dies or hangs costs its own row, and the next ones go on in another child."""

from __future__ import annotations

import gc
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from bench.composer.outcomes import FAULTS
from bench.composer.spec import Spec, parse
from bench.processes import forks_of

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
"""Code of XLA in one piece, and no tracebacks in HLO: a third of a program's CPU time."""
CHILD = 25
"""Programs of one child, which takes about a second to start and keeps what it compiled."""
ALONE = re.compile(r"/(aot_eager|graph|inductor)/")
"""Programs with a child of their own: torch.compile needs processes as ranks, which are forked before any backward."""
CPU_S = 150
"""CPU seconds after which a program is ended."""
QUIET_S = 900
"""Seconds without a word after which a child is ended though it has used no more CPU: it waits for ever."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where children come from: forks of a process that has imported what they need, and done nothing else."""

    framework: Framework
    processes: Any

    @classmethod
    def of(cls, framework: Framework) -> Server:
        os.environ |= ENVIRONMENT
        return cls(
            framework=framework,
            processes=forks_of([MODULES[framework], "bench.cases.plans", *PRELOADED[framework]]),
        )


def _child(framework: Framework, programs: Sequence[str], answer: Any, said: str) -> None:
    """The whole of a child: a word before each program and its row behind it."""
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    module = import_module(MODULES[framework])
    gc.freeze()
    gc.set_threshold(200_000)
    for text in programs:
        answer.send(text)
        answer.send(module.attempt(parse(text)))


def _cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _heard(child: Any, pipe: Any) -> Any:
    """The next word of a child. EOFError: it died; TimeoutError: it took too long, and was ended."""
    began, quiet = _cpu_s(child.pid), 0.0
    while not pipe.poll(2):
        quiet += 2
        if _cpu_s(child.pid) - began > CPU_S or quiet > QUIET_S:
            child.kill()
            raise TimeoutError
    return pipe.recv()


def _turn(left: Sequence[str]) -> list[str]:
    """The programs of the next child."""
    alone = [i for i, text in enumerate(left[:CHILD]) if ALONE.search(text)]
    return list(left[: max(alone[0], 1)] if alone else left[:CHILD])


def rows(server: Server, programs: Iterable[Spec]) -> Iterator[dict[str, Any]]:
    """The row of each program, in order."""
    left = list(map(str, programs))
    while left:
        with tempfile.NamedTemporaryFile() as said:
            ours, theirs = server.processes.Pipe(duplex=False)
            turn, begun = _turn(left), ""
            child = server.processes.Process(target=_child, args=(server.framework, turn, theirs, said.name))
            child.start()
            theirs.close()
            try:
                for text in turn:
                    begun = _heard(child, ours)
                    row = _heard(child, ours)
                    left.remove(text)
                    yield row
            except (EOFError, TimeoutError) as e:
                child.join()
                words = Path(said.name).read_text(errors="replace")
                if not begun:
                    raise RuntimeError(f"a child ended before its first program:\n{words[-2000:]}") from e
                yield _lost(
                    left.pop(0), "too long" if isinstance(e, TimeoutError) else "aborted", child, words
                )
            finally:
                child.kill()
                child.join()


def _lost(text: str, end: str, child: Any, words: str) -> dict[str, Any]:
    """The row of a program whose process ended."""
    check = [line for line in words.splitlines() if "Check failed" in line or line.startswith("F0")]
    message = f"exit {child.exitcode}: {(check or [words[-500:]])[0][-500:]}"
    spec = parse(text)
    return {
        "program": text,
        "patterns": sorted({p.pattern for p in (*spec.parts, spec.loss)}),
        "ends": {m: {"end": end, "message": message} for m in spec.manners},
    }


def ended(row: Mapping[str, Any]) -> str:
    """How a program ended: the worst of its ways."""
    ends = [e["end"] for e in row["ends"].values()]
    return min(ends, key=lambda e: (*FAULTS, "refused", "agrees", "unstable", "no plan").index(e))


def failing(row: Mapping[str, Any]) -> bool:
    """Whether a program ended as none must."""
    return ended(row) in FAULTS


def shrunk(
    server: Server, spec: Spec, alike: Callable[[Mapping[str, Any]], bool]
) -> tuple[Spec, dict[str, Any]]:
    """The smallest program found that still ends alike, and its row: whatever can be left out is."""
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
    """Of rows by seed: how many ended how, by way of running and by pattern; refusals by what they say."""
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
    """What a refusal says, without its line and numbers."""
    text = re.sub(r" at \S+\.py:\d+(:\d+)?( \([^)]*\))?", "", message.splitlines()[0])
    return re.sub(r"\d+", "#", text)[:160]
