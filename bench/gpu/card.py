"""Calibrates a GPU, and predicts its steps with the file: this GPU, or one that was recorded.

    python -m bench gpu.card                           # this GPU
    python -m bench gpu.card FOLDER                    # ops.csv and steps.csv of an H100, on any machine

The recorded card starts from two files: h100x8 as shipped, and the same with nearly every figure another one. Rows have
the errors of single ops that were not fitted, and of training steps, which nothing is fitted to. Writes
bench/results/gpu_card.json.
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases import csv_rows
from bench.cases.recorded_card import recorded_card
from bench.runner import option, parser, save
from pase.calibrate.card import CardFit, calibrate_card, card_facts, card_file
from pase.calibrate.figures import prices
from pase.costmodels.analytic import Analytic
from pase.machine import Machine, dumps, load

__all__ = ["another", "recorded"]

OPS = 60
"""How many of the recorded ops are timed, as in two minutes on a card. All others are predicted."""


def another(base: Machine) -> Machine:
    """The file of a card with other kernels: products at two thirds of the rate, memory and convolutions as well."""
    d = base.device
    assert d.products is not None
    p = d.products
    products = replace(
        p,
        rate={dtype: x * 0.67 for dtype, x in p.rate.items()},
        unaligned={dtype: x * 0.5 for dtype, x in p.unaligned.items()},
        start_s=1.6 * p.start_s,
        memory=0.7 * p.memory,
    )
    efficiency = {kind: x * 0.6 for kind, x in d.efficiency.items()}
    return replace(base, device=replace(d, products=products, efficiency=efficiency))


def recorded(folder: Path, count: int | None = None) -> dict[str, Any]:
    """Row by base file: errors of ops that were not fitted and of steps, before and after. count: of the steps."""
    base = load("h100x8")
    steps = {r["spec"]: float(r["step_s"]) for r in csv_rows(folder / "steps.csv")[:count]}
    rows = {}
    for name, begin in (("h100x8 as shipped", base), ("other figures", another(base))):
        card = recorded_card(folder / "ops.csv")
        fit = calibrate_card(
            begin,
            card,
            partial(Analytic, steady=False),
            OPS,
            lambda *_: None,
            ops=card.ops,
            now=card.now,
        )
        others = [op for op in card.times if op not in {t.op for t in fit.timed if t.fitted}]
        works, measured = [op.work for op in others], np.array([card.times[op] for op in others])
        least = min(s for op, s in card.times.items() if op.kind == "memory")
        apart = {
            what: dict(
                zip(
                    (op.label for op in others),
                    (prices(Analytic(machine, steady=False), works, least) / measured - 1).tolist(),
                    strict=True,
                )
            )
            for what, machine in (("before", begin), ("after", fit.machine))
        }
        rows[name] = row(begin, fit) | {
            "not fitted": {what: _summary(errors) for what, errors in apart.items()},
            "steps": {
                what: _summary(_of_steps(machine, steps))
                for what, machine in (("before", begin), ("after", card_file(begin, fit, "recorded", {})))
            },
        }
    return rows


def row(begin: Machine, fit: CardFit) -> dict[str, Any]:
    """What is recorded of a calibration."""
    apart = [t for t in fit.timed if not t.fitted]
    return {
        "base": begin.name,
        "ops": len(fit.timed),
        "not fitted": {
            "before": _summary({t.op.label: t.before_s / t.measured_s - 1 for t in apart}),
            "after": _summary({t.op.label: t.predicted_s / t.measured_s - 1 for t in apart}),
        },
        "figures": card_facts(fit)["figures"],
    }


def _summary(errors: dict[str, float]) -> dict[str, Any]:
    off = [abs(e) for e in errors.values()]
    return {
        "median": round(statistics.median(off), 4),
        "p90": round(float(np.quantile(off, 0.9)), 4),
        "worst": round(max(off), 4),
        "errors": {k: round(e, 4) for k, e in errors.items()},
    }


def _of_steps(machine: Machine, steps: dict[str, float]) -> dict[str, float]:
    """Step → predicted over measured, minus one."""
    import pase

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Path(folder) / "machine.toml"
        file.write_text(dumps(machine))
        return {
            spec: pase.compile(f"zoo:{spec}", devices=1, machine=str(file), memory_limit="none").cost / s - 1
            for spec, s in steps.items()
        }


def main() -> None:
    """Calibrates, prints the errors before and after, and saves them."""
    folder = option("folder", type=Path, nargs="?", help="ops.csv and steps.csv; default: measure this GPU")
    steps = option("--steps", type=int, help="price only so many of the recorded steps")
    p = parser(__doc__, "gpu_card", folder, steps)
    given = p.parse_args()
    if given.folder is not None:
        rows = recorded(given.folder, given.steps)
    else:
        from pase.calibrate.card_ops import ProfiledKernels
        from pase.calibrate.here import find
        from pase.machine.recognize import machine_named

        here = find()
        known = machine_named(here.device_name)
        if known is None:
            p.error(f"no machine file has '{here.device_name}'; give a folder with recorded ops")
        fit = calibrate_card(
            load(known), ProfiledKernels(), partial(Analytic, steady=False), 100.0, lambda *_: None
        )
        rows = {here.device_name: row(load(known), fit)}
    for name, r in rows.items():
        apart, of_steps = r["not fitted"], r.get("steps")
        print(f"{name}: ops not fitted {apart['before']['median']:.1%} -> {apart['after']['median']:.1%}")
        if of_steps:
            print(
                f"  steps: median {of_steps['before']['median']:.1%} -> {of_steps['after']['median']:.1%}, "
                f"worst {of_steps['before']['worst']:.1%} -> {of_steps['after']['worst']:.1%}"
            )
    print(f"wrote {save({'rows': rows}, given.out)}")
