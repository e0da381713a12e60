"""Communication truth: bytes that plans predict beside bytes in the compiled programs, and their steps' numbers.

.venv/bin/python -m bench.audit.communication                    # every reduced zoo model × every strategy; an hour on
two cores .venv/bin/python -m bench.audit.communication gpt2 mlp           # these models again; the others' rows are
kept .venv/bin/python -m bench.audit.communication --32 gpt2 mlp      # on 32 devices: compiled, not run; rows that
stand are kept .venv/bin/python -m bench.audit.communication --lines vit_l16 ours@2x4    # what has no partner, line by
line; --32 likewise .venv/bin/python -m bench.audit.communication --manual mlp gpt2:ours  # lowered by hand; with --32
compiled, not run .venv/bin/python -m bench.audit.communication --without=cse gpt2      # pairs by hand that are off,
compiled without this pass .venv/bin/python -m bench.audit.communication --render           #
docs/evidence/communication.md from the results alone

Writes bench/results/comm_truth.json and docs/evidence/communication.md. The devices are 8 JAX host devices, or 32.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.audit.communication_page import page
from bench.provenance import RESULTS, ROOT, save

FILE = RESULTS / "comm_truth.json"
MANUAL = RESULTS / "comm_truth_manual.json"
PAGE = ROOT / "docs" / "evidence" / "communication.md"
STRATEGIES = (
    "data_parallel",
    "fsdp",
    "owt",
    "megatron/megatron_2x4",
    "megatron/megatron_sp_2x4",
    "ours",
    "ours@8",
    "ours@2x4",
    "ours@2x2x2",
    "random1@2x4",
)
WIDE = (
    "data_parallel",
    "fsdp",
    "owt",
    "megatron/megatron_8x4",
    "megatron/megatron_sp_8x4",
    "ours",
    "ours@4x8",
)
"""Strategies on 32 devices."""


def main(arguments: list[str]) -> None:
    """Writes bench/results/comm_truth.json, and from it docs/evidence/communication.md; --render writes the page
    alone."""
    if arguments != ["--render"]:
        wide = "--32" in arguments
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={32 if wide else 8} --xla_backend_optimization_level=0"
        )
        without = next((a.partition("=")[2] for a in arguments if a.startswith("--without=")), "")
        if without:
            os.environ["XLA_FLAGS"] += f" --xla_disable_hlo_passes={without}"
        names = [a for a in arguments if not a.startswith("--")]
        if "--lines" in arguments:
            lines(*names, wide=wide)
            return
        if without:
            for name in names:
                for row in rows_without(name, without, wide=wide):
                    _keep_manual(row)
        elif "--manual" in arguments:
            for model in names:
                name, _, strategy = model.partition(":")
                for row in manual_rows_of(name, (strategy,) if strategy else (), wide=wide):
                    _keep_manual(row)
        else:
            measure(names, wide=wide)
    by_hand = json.loads(MANUAL.read_text())["rows"] if MANUAL.exists() else []
    PAGE.write_text(page(json.loads(FILE.read_text()), by_hand))
    print(f"wrote {PAGE}", file=sys.stderr)


def measure(models: list[str], *, wide: bool) -> None:
    """Compiles the models under every strategy and puts their rows into the result file."""
    from pase import zoo

    alike: dict[str, str] = {}
    first: dict[str, str] = {}
    for name in zoo.names():
        m = zoo.reduced(name)
        alike[name] = first.setdefault(str((m.params, m.batch)), name)
    devices = 32 if wide else 8
    for name in models or [name for name, same in alike.items() if name == same]:
        known = {r["strategy"] for r in _rows() if r["model"] == name and r.get("devices", 8) == devices}
        for row in wide_rows_of(name, known) if wide else rows_of(name):
            _keep(row, alike)


def _rows() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text())["rows"] if FILE.exists() else []


def _keep(row: dict[str, Any], alike: dict[str, str]) -> None:
    """Add the row to those in the file. Each is written as soon as it is made, so that an interrupt loses none."""
    import jax

    from pase import zoo

    print(json.dumps(row), file=sys.stderr, flush=True)
    key = ("model", "strategy", "devices")
    rows = [r for r in _rows() if any(r.get(k) != row.get(k) for k in key)] + [row]
    models, strategies = list(zoo.names()), [*STRATEGIES, *WIDE]
    result = {
        "jax": jax.__version__,
        "devices": 8,
        "alike": {n: same for n, same in alike.items() if n != same},
        "rows": sorted(
            rows,
            key=lambda r: (models.index(r["model"]), r.get("devices", 8), strategies.index(r["strategy"])),
        ),
    }
    save(result, FILE)


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    """One row per strategy of a model: predicted and compiled bytes, and how far its step is from the unsharded one."""
    import optax

    from bench.cases.plans import reduced
    from pase.backends.audit.xla import compare, sharded_step, unsharded_step

    optimizer = optax.sgd(0.1, momentum=0.9)
    case = reduced(name)
    params, batch = case.model.init(0)
    whole = unsharded_step(case.model.loss_fn, optimizer, params, batch)
    for strategy in STRATEGIES:
        plan = case.plan(strategy)
        if plan is None:
            continue
        began = time.perf_counter()
        step = sharded_step(plan, optimizer, params, batch, lowering="annotated")
        off = whole.differences(step)
        collectives = {
            r.kind: {"predicted": r.predicted, "on_cpu": r.on_cpu, "compiled": r.compiled}
            for r in compare(plan, step.compiled)
            if r.predicted or r.on_cpu or r.compiled
        }
        row = {
            "model": name,
            "strategy": strategy,
            "mesh": list(plan.mesh.sizes),
            "collectives": collectives,
            "differences": {k: float(f"{v:.2g}") for k, v in off.items()},
            "rematerialised": len(step.rematerialised),
            "seconds": round(time.perf_counter() - began, 1),
        }
        yield row


def lines(model: str, strategy: str, *, wide: bool) -> None:
    """Print the collectives of one plan that the compiled step does not have, and the other way round."""
    import optax

    from bench.cases.plans import reduced
    from pase.backends.audit.xla import unmatched

    plan = (wide_case(model) if wide else reduced(model)).plan(strategy)
    if plan is None:
        raise SystemExit(f"{model} has no strategy {strategy}")
    compiled = plan.jax.lower_train_step(optax.sgd(0.1, momentum=0.9), lowering="annotated").compile()
    alone, more = unmatched(plan, compiled, ("all_gather", "all_to_all", "permute"))
    for c in alone:
        print(
            f"plan only: {c.times} x {c.kind} {c.nbytes:,} over {c.axes}, {c.phase}: "
            f"{c.tensor} of {c.source} for {c.node}"
        )
    for h in more:
        print(
            f"compiled only: {h.count} x {h.kind} {h.bytes:,} of {h.group_size}: {h.computation}/{h.name}, {h.op_name}"
        )


def wide_case(name: str) -> Any:
    """A reduced zoo model with a batch of 32 on 32 devices."""
    from bench.cases.plans import case_of
    from pase import zoo

    m = zoo.reduced(name, batch=32)
    return case_of(m.loss_fn, m.params, m.batch, name=f"zoo:{name}", devices=32)


def wide_rows_of(name: str, known: set[str]) -> Iterator[dict[str, Any]]:
    """Rows on 32 devices but the known ones: the step is compiled and not run."""
    import optax

    from pase.backends.audit.xla import compare

    case = wide_case(name)
    for strategy in WIDE:
        plan = None if strategy in known else case.plan(strategy)
        if plan is None:
            continue
        began = time.perf_counter()
        compiled = plan.jax.lower_train_step(optax.sgd(0.1, momentum=0.9), lowering="annotated").compile()
        collectives = {
            r.kind: {"predicted": r.predicted, "on_cpu": r.on_cpu, "compiled": r.compiled}
            for r in compare(plan, compiled)
            if r.predicted or r.on_cpu or r.compiled
        }
        row = {
            "model": name,
            "strategy": strategy,
            "devices": 32,
            "mesh": list(plan.mesh.sizes),
            "collectives": collectives,
            "seconds": round(time.perf_counter() - began, 1),
        }
        yield row


def manual_rows_of(name: str, strategies: Sequence[str] = (), *, wide: bool) -> Iterator[dict[str, Any]]:
    """Rows of steps lowered by hand, under these strategies, or all; on 32 devices the step is compiled and not run."""
    import optax

    from bench.cases.plans import reduced
    from pase.backends.audit.xla import compare, sharded_step, unsharded_step
    from pase.backends.jax.spmd.values import NotManual

    optimizer = optax.sgd(0.1, momentum=0.9)
    case = wide_case(name) if wide else reduced(name)
    params, batch = case.model.init(0) if not wide else (None, None)
    whole = None if wide else unsharded_step(case.model.loss_fn, optimizer, params, batch)
    for strategy in strategies or (WIDE if wide else STRATEGIES):
        plan = case.plan(strategy)
        if plan is None:
            continue
        row: dict[str, Any] = {
            "model": name,
            "strategy": strategy,
            "devices": 32 if wide else 8,
            "mesh": list(plan.mesh.sizes),
        }
        try:
            if whole is None:
                compiled = plan.jax.lower_train_step(optimizer, lowering="manual").compile()
            else:
                step = sharded_step(plan, optimizer, params, batch, lowering="manual")
                off = whole.differences(step)
                row["differences"] = {k: float(f"{v:.2g}") for k, v in off.items()}
                compiled = step.compiled
        except NotManual as e:
            yield row | {"refused": str(e).replace(f"{ROOT}/", "")}
            continue
        yield row | {
            "collectives": {
                r.kind: {"predicted": r.predicted, "compiled": r.compiled}
                for r in compare(plan, compiled, "manual")
                if r.predicted or r.compiled
            }
        }


def rows_without(name: str, passes: str, *, wide: bool) -> Iterator[dict[str, Any]]:
    """The rows of a model lowered by hand of which a pair is off, with the bytes of a program that XLA compiled without
    some passes, "cse" or "cse,algsimp"."""
    import optax

    from bench.cases.plans import reduced
    from pase.backends.audit.xla import compare

    devices = 32 if wide else 8
    for row in json.loads(MANUAL.read_text())["rows"]:
        pairs = row.get("collectives", {})
        off = {k for k, b in pairs.items() if b["predicted"] != b["compiled"]}
        if (row["model"], row["devices"]) != (name, devices) or not off:
            continue
        plan = (wide_case(name) if wide else reduced(name)).plan(row["strategy"])
        compiled = plan.jax.lower_train_step(optax.sgd(0.1, momentum=0.9), lowering="manual").compile()
        found = {r.kind: r.compiled for r in compare(plan, compiled, "manual") if r.kind in off}
        yield row | {"without": {**row.get("without", {}), passes: found}}


def _keep_manual(row: dict[str, Any]) -> None:
    import jax

    print(json.dumps(row), file=sys.stderr, flush=True)
    key = ("model", "strategy", "devices")
    rows = json.loads(MANUAL.read_text())["rows"] if MANUAL.exists() else []
    kept = [r for r in rows if any(r[k] != row[k] for k in key)] + [row]
    kept.sort(key=lambda r: (r["model"], r["devices"], [*STRATEGIES, *WIDE].index(r["strategy"])))
    save({"jax": jax.__version__, "rows": kept}, MANUAL)


if __name__ == "__main__":
    main(sys.argv[1:])
