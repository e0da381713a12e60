"""How often ``plan.jax.check`` raises a false alarm, and which planted faults it misses.

Programs of the composer (float64) and models of the zoo in their reduced sizes (float32), under plans that move data,
lowered by hand. Each is checked as it is, and with one of its moves wrong: a sum that is dropped, or a mean, or counted
too often; a device's part that is missing; parts at the wrong devices. Whether a planted fault does any harm is asked
of the unsharded step: gradients off by more than 1e-3 of their largest element, or another
loss. Lines alone ("none") can find those with the right loss; of a wrong loss the gradient may be right.

    python -m bench.check_rates --seeds 20 --zoo mlp gpt2
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.composer.runner import ENVIRONMENT
from bench.provenance import RESULTS, save

OUT = RESULTS / "check_rates.json"
HARM = 1e-3
FAULTS = ("dropped", "mean", "counted too often", "a part is missing", "at the wrong device")


def _wrong(fault: str, move: Any, x: Any, right: Callable[[Any], Any]) -> Any:
    """A move with a fault in it."""
    import jax

    axis, ways = move.axes[0], jax.lax.axis_size(tuple(move.axes))
    me = jax.lax.axis_index(axis)
    if fault == "dropped" and move.kind == "all_reduce":
        return x
    if fault == "mean":
        return right(x) / ways if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) else right(x)
    if fault == "counted too often":
        return right(x) * ways
    if fault == "at the wrong device":
        n = jax.lax.axis_size(axis)
        return jax.lax.ppermute(right(x), axis, [(i, (i + 1) % n) for i in range(n)])
    return right(jax.numpy.where(me == 0, jax.numpy.zeros((), x.dtype), x))


@contextmanager
def planted(fault: str, number: int) -> Iterator[list[str]]:
    """The move of this number that a lowering makes is wrong. Yields the moves made, filled in as they are."""
    from pase.backends import jax_moves

    right, made = jax_moves._step, []

    def step(x: Any, move: Any, *rest: Any) -> Any:
        made.append(f"{move.kind} over {'·'.join(move.axes)}")
        if len(made) - 1 != number or not move.axes:
            return right(x, move, *rest)
        return _wrong(fault, move, x, lambda v: right(v, move, *rest))

    with patch.object(jax_moves, "_step", step):
        yield made


def checks(
    name: str, plan: Any, arguments: tuple[Any, ...], faults: int, rng: Any
) -> Iterator[dict[str, Any]]:
    """Rows of one program: as it is, and with planted faults."""
    with planted("", -1) as made:
        yield {"program": name} | row(plan, arguments, "none")
    yield {"program": name} | row(plan, arguments, "auto")
    if not made:
        return
    for _ in range(faults):
        fault, number = str(rng.choice(FAULTS)), int(rng.integers(len(made)))
        with planted(fault, number) as again:
            known = row(plan, arguments, "unsharded")
        harm = known.get("harm", False)
        with planted(fault, number):
            alone = row(plan, arguments, "none") if harm else {}
        yield {
            "program": name,
            "fault": fault,
            "move": again[number] if number < len(again) else "",
            "harm": harm,
            "loss_harm": known.get("loss_harm", False),
            "unsharded": known["verdict"],
            "lines": alone.get("verdict"),
            "off": known.get("off"),
        }


def row(plan: Any, arguments: tuple[Any, ...], against: str) -> dict[str, Any]:
    """A check as a row."""
    from pase.errors import PaseError

    began = time.process_time()
    try:
        found = plan.jax.check(*arguments, against=against, lowering="manual")
    except PaseError as e:
        return {"against": against, "verdict": "refused", "message": str(e).splitlines()[0][:200]}
    out: dict[str, Any] = {
        "against": against,
        "verdict": found.verdict,
        "parameters": dict(Counter(p.verdict for p in found.parameters)),
        "off": [f"{p.name}: {p.why}"[:160] for p in found.by("off")],
        "undecided": [f"{p.name}: {p.why}"[:160] for p in found.by("undecided")],
        "steps": found.steps,
        "cpu_s": round(time.process_time() - began, 1),
    }
    if (r := found.reference) is not None:
        worst = max(r.differences, key=lambda d: d.difference, default=None)
        largest = max((d.largest for d in r.differences), default=0.0)
        out["loss_harm"] = not r.loss_agrees
        out["harm"] = out["loss_harm"] or bool(worst is not None and worst.difference > HARM * largest)
    return out


def programs(seeds: int, parts: int, zoo: list[str], rng: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """(name, plan, arguments) of each program."""
    from bench.cases.plans import case_of, reduced
    from bench.composer.jax_programs import draw, program_of
    from pase.errors import PaseError

    for name in zoo:
        case = reduced(name)
        plan = case.plan("ours@2x4")
        if plan is not None:
            yield f"zoo:{name}", plan, case.model.init(0)
    for seed in range(seeds):
        spec = draw(seed)
        if len(spec.parts) > parts:
            continue
        program = program_of(spec)
        try:
            case = case_of(program.loss, program.params, program.batch, devices=4)
            plan = case.plan(f"random{int(rng.integers(100))}@2x2")
        except PaseError:
            continue
        if plan is not None:
            yield f"composer:{seed}", plan, (program.params, program.batch)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts: false alarms of right steps, and planted faults that do harm and are not found."""
    clean = [r for r in rows if "fault" not in r and r["verdict"] != "refused"]
    harmful = [r for r in rows if r.get("harm")]
    backward = [r for r in harmful if not r["loss_harm"]]
    return {
        "right steps": {
            a: dict(Counter(r["verdict"] for r in clean if r["against"] == a)) for a in ("none", "auto")
        },
        "planted faults that do harm": len(harmful),
        "found against the unsharded step": sum(r["unsharded"] == "off" for r in harmful),
        "with the right loss": len(backward),
        "by lines alone, with the right loss": dict(Counter(str(r["lines"]) for r in backward)),
        "by lines alone, with a wrong loss": dict(
            Counter(str(r["lines"]) for r in harmful if r["loss_harm"])
        ),
    }


def main() -> None:
    """Writes bench/results/check_rates.json after each program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--parts", type=int, default=4, help="programs of at most so many layers")
    parser.add_argument("--zoo", nargs="*", default=["mlp", "gpt2"])
    parser.add_argument("--faults", type=int, default=3)
    parser.add_argument("--out", default=str(OUT))
    given = parser.parse_args()
    os.environ |= ENVIRONMENT
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for name, plan, arguments in programs(given.seeds, given.parts, given.zoo, rng):
        for found in checks(name, plan, arguments, given.faults, rng):
            rows.append(found)
            print(json.dumps(found), flush=True)
        save({"summary": summary(rows), "rows": rows}, given.out)
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
