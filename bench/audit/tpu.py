"""Compares predictions with XLA's compiler for TPU, without a TPU.

libtpu changes how JAX starts, so this bench has its own environment:

    uv venv -p 3.11 /tmp/tpu && uv pip install --python /tmp/tpu/bin/python -e ".[jax]" jax==0.10.2 libtpu==0.0.51
    /tmp/tpu/bin/python -m bench audit.tpu               # compiles what has changed, 20 to 120 s for each row
    /tmp/tpu/bin/python -m bench audit.tpu gpt2          # the rows of these models
    /tmp/tpu/bin/python -m bench audit.tpu --recompile "gpt2: ours"         # compiles these in any case
    /tmp/tpu/bin/python -m bench audit.tpu --keep /tmp/texts "gpt2: ours"   # also writes the compiled programs
    python -m bench audit.tpu --predict                  # predicts again what the file has; compiles nothing
    python -m bench audit.tpu --page                     # the tables of docs/evidence/tpu.md from the result file

One train step is compiled ahead of time under several strategies; nothing is run. Cycles are the compiler's estimates.
It gives none for collectives that are not overlapped (``waiting``); those are priced with the machine file's links.
Writes bench/results/tpu_aot.json: a row per model and strategy, with a digest of what was compiled and the commit.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.runner import BEGAN, RESULTS, ROOT, Benchmark, option

if TYPE_CHECKING:
    from pase.backends.jax.spmd.lower import Lowering

FILE = RESULTS / "tpu_aot.json"
PAGE = ROOT / "docs" / "evidence" / "tpu.md"
MACHINE = "tpu_v5e"
MODELS = {
    "gpt2": ("gpt2?vocab=50304&attention=plain", "v5e:4x8", 32),
    "gpt_1_3b": ("gpt_1_3b?vocab=50304&seq=1024&attention=plain", "v5e:8x8", 64),
    "bert_base": ("bert_base?attention=plain", "v5e:4x8", 32),
    "transformer": ("transformer", "v5e:4x4", 16),
    "vit_l16": ("vit_l16?batch=2048", "v5e:8x8", 64),
    "gpt2_xl": ("gpt2_xl?vocab=50304&attention=plain", "v5e:8x8", 64),
    "llama3_8b": ("llama3_8b?batch=256&seq=2048&attention=plain", "v5e:16x16", 256),
    "mixtral_8x7b": ("mixtral_8x7b?batch=256&seq=1024&attention=plain", "v5e:16x16", 256),
}
"""Name -> zoo model, topology, number of devices."""

MANUAL, AHEAD = "ours, manual", "ours, manual, gathers ahead"
"""Our plan in the manual lowering, without and with prefetch in loops. Other rows have the annotated lowering."""

RECORDED = {
    "source": "jax 0.10.0, libtpu 0.0.40, a GPT of the same sizes written for the occasion; "
    "XLA AUTO is jax.experimental.pjit.AUTO, since removed",
    "rows": [
        {"model": m, "strategy": s, "mcycles": c, "peak_mb": p}
        for m, s, c, p in (
            ("gpt2", "data parallel", 118.2, 2250),
            ("gpt2", "Megatron 8x4", 147.5, 1127),
            ("gpt2", "Megatron 16x2", 125.7, None),
            ("gpt2", "XLA AUTO", 112.7, 1315),
            ("gpt2", "ZeRO-3 by hand", 103.4, 532),
            ("gpt_1_3b", "data parallel", None, 22_000),
            ("gpt_1_3b", "Megatron 16x4", 424.6, 6538),
            ("gpt_1_3b", "XLA AUTO", 300.4, 1053),
            ("gpt_1_3b", "ZeRO-3 by hand", 274.6, 946),
        )
    ],
}
"""Figures of other implementations, measured once in the same way; none of them is ours."""


NAMES = (
    *("ours", MANUAL, AHEAD, "data parallel", "FSDP", "Megatron", "Megatron, sequence parallel"),
    *("expert parallel", "ZeRO-3 by hand"),
)
"""The strategies, of which each model has some."""


def _known() -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the rows of the file by model and strategy, each with the commit at which it was compiled."""
    result = json.loads(FILE.read_text()) if FILE.exists() else {"rows": []}
    return {(r["model"], r["strategy"]): {"commit": result["commit"]} | r for r in result["rows"]}


@lru_cache(1)
def _strategies(name: str, predict: bool) -> dict[str, tuple[dict[str, Any], Callable[[], Any]]]:
    """Returns the prediction for each strategy of a model, and a function that lowers it."""
    zoo_name, topology, devices = MODELS[name]
    on = [] if predict else _topology(topology)
    return {strategy: (facts, lower) for strategy, facts, lower in strategies(zoo_name, devices, on)}


def measured(name: str, strategy: str, given: Namespace) -> dict[str, Any] | None:
    """Returns the row of one model and strategy; None if it has no such strategy.

    A program that was compiled before is compiled again only with ``--recompile``; otherwise only the prediction is
    updated. With ``--predict`` nothing is compiled.
    """
    facts, lower = _strategies(name, given.predict).get(strategy, (None, None))
    row = _known().get((name, strategy))
    if facts is None or lower is None:
        return None
    if given.predict:
        if row is None or "predicted_s" not in row:
            return None
        if any(row[k] != facts[k] for k in ("mesh", "predicted_collectives")):
            print(f"{name}, {strategy}: the plan has changed; compile it again", file=sys.stderr)
            return None
        return {k: v for k, v in row.items() if k != "account"} | facts
    lowered = lower()
    digest = _digest(lowered)
    if row is not None and row["digest"] == digest and not given.recompile:
        return row | facts
    zoo_name, topology, _ = MODELS[name]
    about = {"model": name, "zoo": zoo_name, "topology": topology, "strategy": strategy, "digest": digest}
    text = given.keep and given.keep / f"{name}, {strategy}.txt"
    return about | {"commit": BEGAN["commit"]} | facts | compiled(lowered, facts["mesh"], text)


def head(rows: object, given: Namespace) -> dict[str, Any]:
    """Returns the versions of the compiler, and others' figures."""
    before = json.loads(FILE.read_text()) if given.predict else {}
    return {
        "target": "TPU, ahead of time: nothing ran on one",
        **{p: before.get(p) or importlib.metadata.version(p) for p in ("jax", "libtpu")},
        "recorded": RECORDED,
    }


def write_page(result: dict[str, Any], given: Namespace) -> None:
    """Writes the tables of docs/evidence/tpu.md."""
    from bench.audit.tpu_page import tables

    head, _, _ = PAGE.read_text().partition("<!-- tables -->")
    PAGE.write_text(head + "<!-- tables -->\n\n" + tables(result))


def _topology(name: str) -> list[Any]:
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)


def strategies(
    zoo_name: str, devices: int, on: list[Any]
) -> Iterator[tuple[str, dict[str, Any], Callable[[], Any]]]:
    """Yields (name, prediction, function that lowers it)."""
    import jax
    import numpy as np
    import optax

    from bench.audit import tpu_hand
    from pase import compare, zoo

    optimizer = optax.adam(1e-4)
    found = compare(f"zoo:{zoo_name}", devices=devices, machine=MACHINE)
    chosen: dict[str, Any] = {}
    for name, plan in found:  # sorted by cost, so the first of each baseline is that on its best mesh
        method = "megatron_sp" if name.startswith("megatron_sp") else name.partition("_")[0]
        kept = {
            "pase": "ours",
            "data": "data parallel",
            "fsdp": "FSDP",
            "megatron": "Megatron",
            "megatron_sp": "Megatron, sequence parallel",
            "expert": "expert parallel",
        }.get(method)
        if kept and kept not in chosen:
            chosen[kept] = plan
    for name, plan in chosen.items():
        facts = {
            "mesh": list(plan.mesh.sizes),
            "predicted_s": plan.cost,
            "predicted_peak": plan.memory.total,
            "predicted_collectives": _by_kind((c.kind, c.nbytes * c.times) for c in plan.collectives),
            "predicted_collectives_s": sum(c.cost for c in plan.collectives),
        }

        def lower(plan: Any = plan, lowering: Lowering = "annotated", ahead: bool = False) -> Any:
            made = replace(plan.jax, prefetch=ahead)
            return made.lower_train_step(optimizer, made.mesh(on), lowering=lowering)

        yield name, facts, lower
        if name == "ours":
            yield MANUAL, facts, partial(lower, lowering="manual")
            yield AHEAD, facts, partial(lower, lowering="manual", ahead=True)
    model = zoo.get(zoo_name)
    if on and model.name.startswith("gpt"):
        mesh = jax.sharding.Mesh(np.array(on, dtype=object), ("all",))
        yield "ZeRO-3 by hand", {"mesh": [devices]}, lambda: tpu_hand.lower(model, mesh, optimizer)


def _by_kind(pairs: Any) -> dict[str, int]:
    out: dict[str, int] = {}
    for kind, nbytes in pairs:
        out[kind] = out.get(kind, 0) + int(nbytes)
    return out


def _digest(lowered: Any) -> str:
    """Returns a digest of the program given to the compiler, and of the compiler's version."""
    versions = [importlib.metadata.version(p) for p in ("jax", "libtpu")]
    return hashlib.sha256(json.dumps([lowered.as_text(), *versions]).encode()).hexdigest()[:16]


def out_of_memory(said: str) -> tuple[int, int] | None:
    """Returns (requested bytes, available bytes) from the compiler's message that a program does not fit.

    >>> out_of_memory("Ran out of memory in memory space hbm. Used 22.03G of 15.75G hbm.")[1] / 2**30
    15.75
    >>> said = "the total memory required for HLO temporaries (66.36G) exceeds available HBM (15.75G)."
    >>> round(out_of_memory(said)[0] / 2**30, 2)
    66.36
    """
    size = r"([\d.]+)([KMG])"
    found = re.search(rf"Used {size} of {size} hbm", said)
    found = found or re.search(rf"\({size}\) exceeds available HBM \({size}\)", said)
    if found is None:
        return None
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}
    return int(float(found[1]) * scale[found[2]]), int(float(found[3]) * scale[found[4]])


def compiled(lowered: Any, mesh_sizes: list[int], text: Path | None = None) -> dict[str, Any]:
    """Compiles a program; returns its cycles, peak bytes and collectives, or that it does not fit. text: the file for
    the compiled program."""
    import jax

    from pase import costmodels, machine
    from pase.hlo.cycles import cycles
    from pase.machine import Mesh

    began, cpu = time.perf_counter(), time.process_time()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        asked = out_of_memory(str(error))
        if asked is None:
            raise
        return {
            "out_of_memory": asked[0],
            "limit": asked[1],
            "compile_s": round(time.perf_counter() - began, 1),
        }
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    if text is not None:
        text.write_text(program.as_text())
    mesh = Mesh(names=tuple("abcdef"[: len(mesh_sizes)]), sizes=tuple(mesh_sizes))
    model = costmodels.get("analytic", machine.load(MACHINE))
    read = cycles(program, mesh)
    assert read.trips_known
    whole = (1 << len(mesh_sizes)) - 1
    waits = sum(
        c.count * float(model.collective(c.kind, mesh, [whole if c.axes is None else c.axes], c.bytes)[0])
        for c in read.waiting
        if c.group_size > 1
    )
    memory = program.memory_analysis()
    return {
        "mcycles": round(read.total / 1e6, 2),
        "waiting_s": waits,
        "peak": memory.peak_memory_in_bytes,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "waiting": _by_kind((c.kind, c.bytes * c.count) for c in read.waiting if c.group_size > 1),
        "hidden": _by_kind((c.kind, c.bytes * c.count) for c in read.hidden if c.group_size > 1),
        "compile_s": round(seconds, 1),
        "compile_cpu_s": round(cpu, 1),
    }


BENCH = Benchmark(
    "tpu_aot",
    {f"{model}: {strategy}": (model, strategy) for model in MODELS for strategy in NAMES},
    measured,
    named="{model}: {strategy}",
    head=head,
    options=[
        option("--predict", action="store_true", help="only predict again what the file has"),
        option("--recompile", action="store_true", help="compile also what has not changed"),
        option("--keep", type=Path, metavar="FOLDER", help="write the compiled programs to this folder"),
    ],
    environment={"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
    page=write_page,
)
