"""How often ``plan.torch.check`` raises a false alarm, and which planted faults it misses.

Programs of the composer (``bench.composer``, float64) on four ranks, which are threads. Each is checked as it is, and
with one of the following wrong: one rank's or all ranks' gradient of a parameter, the batch of which the gradients are,
gradients of an earlier step, the buffers that a step leaves.

    python -m bench.audit.check_rates_torch --seeds 0-20
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.audit.check_rates import HARM, numbers, summary
from bench.provenance import BEGAN, RESULTS, save

OUT = RESULTS / "check_rates_torch.json"


def _rolled(g: Any) -> Any:
    return g.flatten().roll(max(g.numel() // 2, 1)).reshape(g.shape) if g.numel() > 1 else -g


def _twice(right: Any, run: Any, *batch: Any) -> Any:
    """The loss is right; the gradients are those of a batch half of which counts twice."""
    import torch
    from torch.utils._pytree import tree_map_only

    loss = right(*batch)
    for p in run.module.parameters():
        p.grad = None
    right(
        *tree_map_only(
            torch.Tensor,
            lambda x: x[::2].repeat_interleave(2, 0) if x.ndim and not x.shape[0] % 2 else x,
            batch,
        )
    )
    return loss


def _unwritten(right: Any, run: Any, *batch: Any) -> Any:
    import torch

    held = [(b, b.clone()) for b in run.module.buffers()]
    loss = right(*batch)
    with torch.no_grad():
        for b, was in held:
            b.copy_(was)
    return loss


def faults(names: tuple[str, ...], written: bool, rng: np.random.Generator) -> Iterator[tuple[str, str, Any]]:
    """(kind, where, backward(right, run, *batch) -> the loss) without end."""
    import torch

    def changed(change: Callable[[Any], Any], rank: int | None) -> Callable[..., Any]:
        name = str(rng.choice(names))

        def backward(right: Any, run: Any, *batch: Any) -> Any:
            loss = right(*batch)
            p = dict(run.module.named_parameters())[name]
            me = torch.distributed.get_rank()
            if p.grad is not None and rank in (None, me):
                local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                with torch.no_grad():
                    local.copy_(change(local))
            return loss

        backward.__name__ = name
        return backward

    def stale() -> Callable[..., Any]:
        kept: dict[Any, Any] = {}

        def backward(right: Any, run: Any, *batch: Any) -> Any:
            loss = right(*batch)
            for k, p in enumerate(run.module.parameters()):
                p.grad = kept.setdefault((id(run), k), p.grad)
            return loss

        return backward

    kinds: list[tuple[str, Callable[[], Callable[..., Any]]]] = [
        ("summed twice", lambda: changed(lambda g: 2 * g, None)),
        ("a mean instead of a sum", lambda: changed(lambda g: g / 2, None)),
        ("no gradient", lambda: changed(lambda g: 0 * g, None)),
        ("permuted", lambda: changed(_rolled, None)),
        ("one rank's part or copy is not summed", lambda: changed(lambda g: g / 2, 2)),
        ("one rank's part or copy is missing", lambda: changed(lambda g: 0 * g, 3)),
        ("one rank has another's part", lambda: changed(_rolled, 1)),
        ("a micro-batch counts twice, another not", lambda: _twice),
        ("gradients of an earlier step", stale),
    ]
    if written:
        kinds.append(("state not advanced", lambda: _unwritten))
    while True:
        for k in rng.permutation(len(kinds)):
            kind, make = kinds[k]
            made = make()
            yield kind, made.__name__ if made.__name__ in names else "", made


def checked(
    plan: Any, module: Callable[[], Any], batch: Any, fault: Any, lines: bool, right: dict[Any, Any]
) -> dict[str, Any]:
    """A check on all ranks, as a row. right: what each rank has without a fault, filled in if it is empty."""
    import torch

    from bench.cases.torch_ranks import on_ranks
    from pase.backends.torch import check as torch_check
    from pase.backends.torch import check_plans
    from pase.errors import PaseError

    began, run = time.process_time(), plan.torch
    assert run.program.ops and run.leaves and run.sums  # worked out once, not once on each thread
    check_module, driver = check_plans.check_module, torch_check.gradient_check
    mine: dict[Any, Any] = {}

    def watched(steps: Any, *rest: Any, **named: Any) -> Any:
        rank = torch.distributed.get_rank()
        mine[rank, "loss"] = torch.tensor(steps.loss)
        mine.update({(rank, name): g.clone() for name, g in zip(steps.names, steps.gradients, strict=True)})
        steps.step(steps.start)
        mine.update({(rank, "state", k): x.clone() for k, (x, _) in enumerate(steps.held.buffers)})
        return driver(steps, *rest, **named)

    def wrong(run: Any, *rest: Any) -> Any:
        from dataclasses import replace

        backward = run.backward if fault is None else lambda *b: fault(run.backward, run, *b)
        return check_module(replace(run, backward=backward), *rest)

    torch.manual_seed(11)
    modules = [module() for _ in range(plan.mesh.devices)]
    try:
        with (
            patch.object(check_plans, "check_module", wrong),
            patch.object(torch_check, "gradient_check", watched),
        ):
            found = on_ranks(
                len(modules), lambda rank: run.check(modules[rank], batch, most_lines=50 if lines else 0)
            )[0]
    except PaseError as e:
        return {"verdict": "refused", "message": str(e).splitlines()[0][:300]}
    out: dict[str, Any] = {
        "verdict": found.verdict,
        "parameters": [p.name for p in found.parameters],
        "off": [f"{p.name}: {p.why}"[:160] for p in found.by("off")],
        "undecided": [f"{p.name}: {p.why}"[:160] for p in found.by("undecided")],
        "steps": found.steps,
        "reference": found.reference is not None or found.no_reference,
        "cpu_s": round(time.process_time() - began, 1),
    }
    right.update({} if right else mine)
    sizes = {k: float(x.abs().max()) if x.numel() else 0.0 for k, x in right.items()}
    most = max(size for k, size in sizes.items() if k[1] not in ("loss", "state"))
    off = {
        k for k, x in right.items() if x.numel() and not float((mine[k] - x).abs().max()) <= HARM * sizes[k]
    }
    out["loss_harm"] = any(k[1] == "loss" for k in off)
    out["harm"] = any(k[1] in ("loss", "state") or sizes[k] > 1e-6 * most for k in off)
    out["written"] = any(k[1] == "state" for k in mine)
    return out


def main() -> None:
    """Writes bench/results/check_rates_torch.json after each program; programs that it has are not run again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=numbers, default=list(range(40)))
    parser.add_argument("--faults", type=int, default=8)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch

    from bench.composer.torch_manners import planned
    from bench.composer.torch_programs import draw, program_of
    from pase.errors import PaseError

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    known = {r["program"] for r in rows}
    for seed in given.seeds:
        spec = draw(seed)
        for manner in spec.manners:
            name, (word, runs, _) = f"{seed} {manner}", manner.split("/")
            if name in known or runs != "eager":
                continue
            program = program_of(spec)
            try:
                plan = planned(program, word)
            except PaseError:
                continue
            if plan is None or plan.pipeline is not None:
                continue
            rng = np.random.default_rng([*name.encode()])
            held: dict[Any, Any] = {}
            clean = checked(plan, program.module, program.batch, None, True, held)
            made = [clean | {"lines": clean["verdict"]}]
            if clean.get("reference") is True:
                source = faults(tuple(clean["parameters"]), clean["written"], rng)
                for _ in range(given.faults):
                    kind, where, fault = next(source)
                    row = checked(plan, program.module, program.batch, fault, False, held)
                    made.append({"fault": kind, "where": where, "harm": True} | row)
            for row in made:
                rows.append({"program": name, "commit": BEGAN["commit"]} | row)
                print(json.dumps(rows[-1]), flush=True)
            save({"summary": summary(rows), "rows": rows}, given.out)
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
