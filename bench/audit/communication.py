"""Audits communication: predicted bytes against compiled programs.

    python -m bench audit.communication               # each reduced zoo model and strategy; an hour on two cores
    python -m bench audit.communication gpt2 mlp      # the rows of these models again
    python -m bench audit.communication --32 gpt2     # on 32 devices: compiled, not run
    python -m bench audit.communication --lines vit_l16 ours@2x4  # the collectives without a partner, one by one
    python -m bench audit.communication --manual "gpt2 ours"      # the manual lowering; with --32 compiled, not run
    python -m bench audit.communication --without=cse gpt2        # manual rows that differ, without this pass of XLA
    python -m bench audit.communication --page        # docs/evidence/communication.md from the result files

It also compares the step's numbers with the unsharded step. The devices are 8 JAX host devices, or 32. Writes
bench/results/comm_truth.json (manual lowering: comm_truth_manual.json) and docs/evidence/communication.md.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from functools import lru_cache
from typing import Any

from bench.audit.communication_page import page
from bench.runner import RESULTS, ROOT, Benchmark, option

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


@lru_cache(1)
def _unsharded(name: str) -> Any:
    """Returns the step on one device, with which the rows of all strategies are compared."""
    import optax

    from bench.cases.plans import reduced
    from pase.backends.audit.xla import unsharded_step

    case = reduced(name)
    return unsharded_step(case.model.loss_fn, optax.sgd(0.1, momentum=0.9), *case.model.init(0))


def measured(name: str, strategy: str, given: Namespace) -> dict[str, Any] | None:
    """Returns a row: predicted and compiled bytes, and on 8 devices how far the step is from the unsharded one.

    None if the strategy does not apply to the model. The step is run on 8 devices; on 32 it is only compiled. With
    ``--without``: the row of the result file, with the bytes of a program that XLA compiled without these passes.
    """
    import optax

    from bench.cases.plans import reduced
    from pase.backends.audit.xla import compare, sharded_step
    from pase.backends.jax.spmd.values import NotManual

    optimizer = optax.sgd(0.1, momentum=0.9)
    case = wide_case(name) if given.wide else reduced(name)
    plan = case.plan(strategy)
    if plan is None:
        return None
    began = time.perf_counter()
    manual = given.manual or bool(given.without)
    lowering = "manual" if manual else "annotated"
    row: dict[str, Any] = {"model": name, "strategy": strategy}
    row |= {"devices": 32 if given.wide else 8} if manual or given.wide else {}
    row["mesh"] = list(plan.mesh.sizes)
    try:
        if given.wide or given.without:
            compiled = plan.jax.lower_train_step(optimizer, lowering=lowering).compile()
        else:
            step = sharded_step(plan, optimizer, *case.model.init(0), lowering=lowering)
            off = _unsharded(name).differences(step)
            row["differences"] = {k: float(f"{v:.2g}") for k, v in off.items()}
            compiled = step.compiled
            row |= {} if manual else {"rematerialised": len(step.rematerialised)}
    except NotManual as e:
        return row | {"refused": str(e).replace(f"{ROOT}/", "")}
    found = compare(plan, compiled, lowering)
    if given.without:
        known = _off(given)[name, strategy]
        pairs = {r.kind: r.compiled for r in found if r.kind in _pairs_off(known)}
        return known | {"without": {**known.get("without", {}), given.without: pairs}}
    row["collectives"] = {
        r.kind: {"predicted": r.predicted, **({} if manual else {"on_cpu": r.on_cpu}), "compiled": r.compiled}
        for r in found
        if r.predicted or r.compiled or (r.on_cpu and not manual)
    }
    return row if manual else row | {"seconds": round(time.perf_counter() - began, 1)}


def _pairs_off(row: dict[str, Any]) -> list[str]:
    return [k for k, b in row.get("collectives", {}).items() if b["predicted"] != b["compiled"]]


def _off(given: Namespace) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the rows of the manual lowering in which the bytes of a kind of collective differ from the prediction."""
    devices = 32 if given.wide else 8
    rows = json.loads(MANUAL.read_text())["rows"]
    return {(r["model"], r["strategy"]): r for r in rows if r["devices"] == devices and _pairs_off(r)}


def lines(given: Namespace) -> bool:
    """With ``--lines``, prints the collectives that only the plan has, and those that only the compiled step has."""
    if not given.lines:
        return False
    import optax

    from bench.cases.plans import reduced
    from pase.backends.audit.xla import unmatched

    model, strategy = given.lines
    plan = (wide_case(model) if given.wide else reduced(model)).plan(strategy)
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
    return True


def wide_case(name: str) -> Any:
    """Returns a reduced zoo model with a batch of 32 on 32 devices."""
    from bench.cases.plans import case_of
    from pase import zoo

    m = zoo.reduced(name, batch=32)
    return case_of(m.loss_fn, m.params, m.batch, name=f"zoo:{name}", devices=32)


def alike() -> dict[str, str]:
    """Returns for each zoo model the first one that is the same in its reduced size."""
    from pase import zoo

    first: dict[str, str] = {}
    models = {name: zoo.reduced(name) for name in zoo.names()}
    return {name: first.setdefault(str((m.params, m.batch)), name) for name, m in models.items()}


def rows(given: Namespace) -> dict[str, tuple[str, str]]:
    """Returns (model, strategy) of each row."""
    models = [name for name, same in alike().items() if name == same]
    every = [(m, s) for m in models for s in (WIDE if given.wide else STRATEGIES)]
    return {
        f"{m} {s} on {32 if given.wide else 8}": (m, s) for m, s in (_off(given) if given.without else every)
    }


def head(rows: object, given: Namespace) -> dict[str, Any]:
    """Returns the version of JAX, and which models are alike."""
    import jax

    if given.manual or given.without:
        return {"jax": jax.__version__}
    others = {name: same for name, same in alike().items() if name != same}
    return {"jax": jax.__version__, "devices": 8, "alike": others}


def order(_: str, row: dict[str, Any]) -> Any:
    """Sorts rows by the order of the zoo, then by devices and strategy."""
    from pase import zoo

    return (
        list(zoo.names()).index(row["model"]),
        row.get("devices", 8),
        [*STRATEGIES, *WIDE].index(row["strategy"]),
    )


def environment(given: Namespace) -> dict[str, str]:
    """Returns the variables for 8 or 32 host devices, without the passes that are left out."""
    flags = (
        f"--xla_force_host_platform_device_count={32 if given.wide else 8} --xla_backend_optimization_level=0"
    )
    without = f" --xla_disable_hlo_passes={given.without}" if given.without else ""
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags + without}


def write_page(result: object) -> None:
    """Writes docs/evidence/communication.md from both result files."""
    manual = json.loads(MANUAL.read_text())["rows"] if MANUAL.exists() else []
    PAGE.write_text(page(json.loads(FILE.read_text()), manual))


BENCH = Benchmark(
    result=lambda given: "comm_truth_manual" if given.manual or given.without else "comm_truth",
    rows=rows,
    measure=measured,
    named=lambda row: f"{row['model']} {row['strategy']} on {row.get('devices', 8)}",
    head=head,
    order=order,
    options=[
        option("--32", dest="wide", action="store_true", help="compile for 32 devices, do not run"),
        option("--manual", action="store_true", help="lowered as manual"),
        option(
            "--without", default="", metavar="PASSES", help="rows with bytes off, again without XLA's passes"
        ),
        option(
            "--lines", nargs=2, metavar=("MODEL", "STRATEGY"), help="print the collectives without a partner"
        ),
    ],
    environment=environment,
    instead=lines,
    page=write_page,
)
