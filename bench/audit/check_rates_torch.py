"""False alarms and missed faults of ``plan.torch.check``.

    python -m bench audit.check_rates_torch --seeds 0-20

The programs are those of the composer (float64), on four ranks that are threads. Each is checked as it is, and with one
of these faults: a wrong gradient of a parameter on one rank or on all, gradients of another batch, gradients of an
earlier step, or wrong buffers after the step. Writes bench/results/check_rates_torch.json.
"""

from __future__ import annotations

import itertools
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.audit import check_rates
from bench.runner import numbers, option


def _rolled(g: Any) -> Any:
    return g.flatten().roll(max(g.numel() // 2, 1)).reshape(g.shape) if g.numel() > 1 else -g


def _twice(right: Any, run: Any, *batch: Any) -> Any:
    """Runs a step with the right loss, but with the gradients of a batch of which one half counts twice."""
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
    """Yields (kind, where, backward(right, run, *batch) -> loss) endlessly."""
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
    """Returns the row of a check on all ranks. right: the results of each rank without a fault; filled if empty."""
    import torch

    from bench.cases.torch_ranks import on_ranks
    from pase.backends.torch import check as torch_check
    from pase.backends.torch import check_plans
    from pase.errors import PaseError

    began, run = time.process_time(), plan.torch
    assert run.program.ops and run.leaves and run.sums  # computed once, not on each thread
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
        k
        for k, x in right.items()
        if x.numel() and not float((mine[k] - x).abs().max()) <= check_rates.HARM * sizes[k]
    }
    out["loss_harm"] = any(k[1] == "loss" for k in off)
    out["harm"] = any(k[1] in ("loss", "state") or sizes[k] > 1e-6 * most for k in off)
    out["written"] = any(k[1] == "state" for k in mine)
    return out


def programs(given: Namespace) -> dict[str, tuple[int, str]]:
    """Returns (seed, way to run) of each program that is run eagerly."""
    from bench.composer.torch_programs import draw

    ways = {f"{seed} {manner}": (seed, manner) for seed in given.seeds for manner in draw(seed).manners}
    return {name: way for name, way in ways.items() if way[1].split("/")[1] == "eager"}


def measured(seed: int, manner: str, given: Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of one program: as it is, and with faults."""
    from bench.composer.torch_manners import planned
    from bench.composer.torch_programs import draw, program_of
    from pase.errors import PaseError

    name = f"{seed} {manner}"
    program = program_of(draw(seed))
    try:
        plan = planned(program, manner.split("/")[0])
    except PaseError:
        return
    if plan is None or plan.pipeline is not None:
        return
    rng = np.random.default_rng([*name.encode()])
    held: dict[Any, Any] = {}
    clean = checked(plan, program.module, program.batch, None, True, held)
    yield {"program": name} | clean | {"lines": clean["verdict"]}
    if clean.get("reference") is True:
        source = faults(tuple(clean["parameters"]), clean["written"], rng)
        for kind, where, fault in itertools.islice(source, given.faults):
            row = checked(plan, program.module, program.batch, fault, False, held)
            yield {"program": name, "fault": kind, "where": where, "harm": True} | row


def prepare() -> None:
    """Sets PyTorch to one thread."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


BENCH = replace(
    check_rates.BENCH,
    result="check_rates_torch",
    rows=programs,
    measure=measured,
    options=[
        option("--seeds", type=numbers, default=list(range(40))),
        option("--faults", type=int, default=8, help="per program"),
    ],
    prepare=prepare,
    environment={},
)
