"""XLA for TPU as a witness, ahead of time and without a TPU: the same train step under several strategies.

libtpu changes how JAX starts, so this bench has an environment of its own:

    uv venv -p 3.11 /tmp/tpu && uv pip install --python /tmp/tpu/bin/python -e ".[jax]" jax==0.10.2 libtpu==0.0.51
    /tmp/tpu/bin/python -m bench.audit.tpu                # every row that is not there yet, 20 to 120 s each
    /tmp/tpu/bin/python -m bench.audit.tpu gpt2           # the rows of these models
    /tmp/tpu/bin/python -m bench.audit.tpu --again gpt2   # these again
    /tmp/tpu/bin/python -m bench.audit.tpu "--only=ours,FSDP,Megatron, sequence parallel"
    /tmp/tpu/bin/python -m bench.audit.tpu "--only=ours, manual" --keep=/tmp/texts gpt2     # keeps the compiled texts
    .venv/bin/python -m bench.audit.tpu --predict         # what is predicted of the rows there are; compiles nothing
    .venv/bin/python -m bench.audit.tpu --render          # docs/evidence/tpu.md's tables from the results alone

Writes bench/results/tpu_aot.json: one row per (model, strategy, digest of what was compiled), with the commit at which
it was compiled. Nothing is run: cycles
are the compiler's estimates, and it gives none for collectives that stand alone in the schedule (``waiting``); those
are priced with the machine file's links.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.provenance import BEGAN, RESULTS, ROOT, save

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
"""Name -> zoo model, topology, devices."""

MANUAL, AHEAD = "ours, manual", "ours, manual, gathers ahead"
"""Our plan lowered by hand, each turn of a loop by itself or gathering ahead; other rows are lowered by annotations."""

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
"""Figures of others, measured once with the same meter; no row of ours is among them."""


def main(arguments: list[str]) -> None:
    """Writes bench/results/tpu_aot.json, and from it the tables of docs/evidence/tpu.md (with --render these alone)."""
    if "--predict" in arguments:
        for name in [a for a in arguments if not a.startswith("-")] or list(MODELS):
            predict(name)
    elif "--render" not in arguments:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
        names = [a for a in arguments if not a.startswith("-")] or list(MODELS)
        only = [
            name for a in arguments if a.startswith("--only=") for name in listed(a.removeprefix("--only="))
        ]
        kept = next((Path(a.removeprefix("--keep=")) for a in arguments if a.startswith("--keep=")), None)
        for name in names:
            measure(name, again="--again" in arguments, only=only, kept=kept)
    from bench.audit.tpu_page import tables

    head, _, _ = PAGE.read_text().partition("<!-- tables -->")
    PAGE.write_text(head + "<!-- tables -->\n\n" + tables(json.loads(FILE.read_text())))


def listed(names: str) -> list[str]:
    """Strategies of a list; a comma within a name has a space behind it.

    >>> listed("ours,Megatron, sequence parallel,FSDP")
    ['ours', 'Megatron, sequence parallel', 'FSDP']
    """
    return re.split(r",(?! )", names)


def measure(name: str, *, again: bool, only: list[str], kept: Path | None) -> None:
    """Add the rows of one model, or of the strategies in ``only`` if any are named. kept: where the compiled texts are
    written to; None: nowhere."""
    zoo_name, topology, devices = MODELS[name]
    mesh_devices = _topology(topology)
    for strategy, facts, lower in strategies(zoo_name, devices, mesh_devices):
        if only and strategy not in only:
            continue
        lowered = lower()
        digest = _digest(lowered)
        known = _known()
        mine = [r for r in known if (r["model"], r["strategy"]) == (name, strategy)]
        if any(r["digest"] == digest for r in mine) and not again:
            # What was compiled has not changed; what is predicted of it may have.
            rows = [r | facts if r in mine else r for r in known]
        else:
            row = {
                "model": name,
                "zoo": zoo_name,
                "topology": topology,
                "strategy": strategy,
                "digest": digest,
                "commit": BEGAN["commit"],
            }
            row |= facts | compiled(lowered, facts["mesh"], kept and kept / f"{name}, {strategy}.txt")
            print(json.dumps(row), file=sys.stderr, flush=True)
            # Read again: this took a while, and another process may have added rows.
            known = _known()
            mine = [r for r in known if (r["model"], r["strategy"]) == (name, strategy)]
            rows = [r for r in known if r not in mine] + [row]
        _write(rows)


def _known() -> list[dict[str, Any]]:
    """The rows in the file, each with the commit at which it was compiled."""
    if not FILE.exists():
        return []
    result = json.loads(FILE.read_text())
    return [{"commit": result["commit"]} | r for r in result["rows"]]


def predict(name: str) -> None:
    """Predict the rows of one model again, where the plan is the one that was compiled: the same mesh, and the same
    bytes of every kind of collective. Says which are not."""
    zoo_name, _, devices = MODELS[name]
    facts = {strategy: f for strategy, f, _ in strategies(zoo_name, devices, [])}
    rows = _known()
    for row in rows:
        now = facts.get(row["strategy"], {})
        if row["model"] != name or "predicted_s" not in row:
            continue
        if any(row[k] != now.get(k) for k in ("mesh", "predicted_collectives")):
            print(f"{name}, {row['strategy']}: the plan has changed; compile it again", file=sys.stderr)
            continue
        row.pop("account", None)
        row.update(now)
    save(json.loads(FILE.read_text()) | {"rows": rows}, FILE)


def _write(rows: list[dict[str, Any]]) -> None:
    order = list(MODELS)
    result = {
        "target": "TPU, ahead of time: nothing ran on one",
        "jax": importlib.metadata.version("jax"),
        "libtpu": importlib.metadata.version("libtpu"),
        "recorded": RECORDED,
        "rows": sorted(rows, key=lambda r: order.index(r["model"])),
    }
    save(result, FILE)


def _topology(name: str) -> list[Any]:
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)


def strategies(
    zoo_name: str, devices: int, on: list[Any]
) -> Iterator[tuple[str, dict[str, Any], Callable[[], Any]]]:
    """(name, what is predicted, how to lower it)."""
    import jax
    import numpy as np
    import optax

    from bench.audit import tpu_hand
    from pase import compare, zoo

    optimizer = optax.adam(1e-4)
    found = compare(f"zoo:{zoo_name}", devices=devices, machine=MACHINE)
    chosen: dict[str, Any] = {}
    for name, plan in found:  # cheapest first: of each method, its best mesh
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
    """Of the program handed to the compiler, and of the compiler."""
    versions = [importlib.metadata.version(p) for p in ("jax", "libtpu")]
    return hashlib.sha256(json.dumps([lowered.as_text(), *versions]).encode()).hexdigest()[:16]


def out_of_memory(said: str) -> tuple[int, int] | None:
    """(bytes asked for, bytes there) of the compiler's message that a program does not fit.

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
    """Compile and read: cycles, peak bytes, collectives; or that it does not fit. text: where the program is kept."""
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


if __name__ == "__main__":
    main(sys.argv[1:])
