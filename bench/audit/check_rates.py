"""False alarms and missed faults of ``plan.jax.check``.

    python -m bench audit.check_rates --seeds 0-20 --zoo mlp gpt2

The programs are those of the composer (float64), in each way to plan and run them, and zoo models in their reduced
sizes (float32). Each is checked as it is, and with planted faults (``bench/audit/check_faults.py``). A fault does harm
if it changes the loss, the next state or a gradient on any device by more than 1e-3 of the largest element; the check
itself does not decide this. Some rows also have the verdict of a check along lines alone, as for a model that no device
can hold. Lines can find faults that leave the loss right; if the loss is wrong, its gradient may still be right.
Writes bench/results/check_rates.json.
"""

from __future__ import annotations

import itertools
import time
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.composer.runner import ENVIRONMENT
from bench.runner import Benchmark, numbers, option

HARM = 1e-3


@dataclass(kw_only=True)
class Checker:
    """Checks one plan. What does not depend on a fault is computed once."""

    plan: Any
    arguments: tuple[Any, ...]
    lowering: str
    made: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def watching(self, *, lowered_again: bool) -> Iterator[None]:
        """Inside this context, a check records the program and the gradients that are not slopes, and runs the
        reference only once."""
        from pase.backends.jax import check as jax_check
        from pase.backends.jax import check_plans
        from pase.backends.jax.check import JaxSteps
        from pase.backends.jax.check_reference import Unsharded
        from pase.plan import gradient_lines

        def once(name: str, owner: Any, attribute: str) -> Any:
            right = getattr(owner, attribute)

            def kept(*args: Any) -> Any:
                if name not in self.made:
                    self.made[name] = right(*args)
                return self.made[name]

            return patch.object(owner, attribute, kept)

        right_check, right_verdicts = check_plans.check_of, gradient_lines.verdicts
        right_driver = jax_check.gradient_check

        def driver(steps: Any, *rest: Any, **named: Any) -> Any:
            self.made["steps"] = steps
            return right_driver(steps, *rest, **named)

        def check_of(program: Any, traced: Any, *rest: Any) -> Any:
            self.made["program"] = program, traced
            return right_check(program, traced, *rest)

        def verdicts(names: Any, found: Any, reference: Any, doubts: Any) -> Any:
            self.made["slopes"] = [
                p.name for p in right_verdicts(names, found, None, {}) if p.verdict == "off"
            ]
            return right_verdicts(names, found, reference, doubts)

        with ExitStack() as patches:
            patches.enter_context(patch.object(check_plans, "check_of", check_of))
            patches.enter_context(patch.object(jax_check, "gradient_check", driver))
            patches.enter_context(patch.object(gradient_lines, "verdicts", verdicts))
            patches.enter_context(once("both", Unsharded, "_both"))
            patches.enter_context(patch.object(JaxSteps, "_compiled", self.made.setdefault("compiled", {})))
            if not lowered_again:
                patches.enter_context(once("lowered", check_plans, "_lowered"))
            yield

    def check(self, against: str, lowered_again: bool) -> Any:
        """Runs a check as a user does."""
        how: dict[str, Any] = {"against": against}
        if self.plan.pipeline is None:
            how["lowering"] = self.lowering
        with self.watching(lowered_again=lowered_again):
            return self.plan.jax.check(*self.arguments, **how)

    def row(self, *, lowered_again: bool = False, lines: bool = True) -> dict[str, Any]:
        """Returns the row of a check. lines: whether to also check along lines alone."""
        from pase.errors import PaseError

        began = time.process_time()
        try:
            found = self.check("auto", lowered_again)
            alone = self.check("none", lowered_again) if lines else None
        except PaseError as e:
            return {"verdict": "refused", "message": str(e).splitlines()[0][:300]}
        out: dict[str, Any] = {
            "verdict": found.verdict,
            "parameters": len(found.parameters),
            "off": [f"{p.name}: {p.why}"[:160] for p in found.by("off")],
            "undecided": [f"{p.name}: {p.why}"[:160] for p in found.by("undecided")],
            "steps": found.steps,
        }
        if alone is not None:
            out |= {
                "lines": alone.verdict,
                "lines_off": [p.name for p in alone.by("off")],
                "lines_undecided": [f"{p.name}: {p.why}"[:160] for p in alone.by("undecided")],
                "not_slopes": self.made["slopes"],
                "lines_steps": alone.steps,
            }
        if (r := found.reference) is not None:
            out["reference"] = r.kind
        out["loss_harm"], out["gradient_harm"] = self._harm()
        return out | {"cpu_s": round(time.process_time() - began, 1)}

    def _harm(self) -> tuple[bool, bool]:
        """Returns whether the loss, and whether gradients or state, differ from the first check of this plan."""
        steps, traced = self.made["steps"], self.made["program"][1]
        state = [steps.results[j] for j in traced.carried.values()]
        mine = [_parts(x) for x in (steps.results[0], *steps.gradients, *state)]
        right = self.made.setdefault("right", mine)
        sizes = [max(float(np.abs(p).max(initial=0)) for p in parts) for parts in right]
        off = [
            not max(float(np.abs(a - b).max(initial=0)) for a, b in zip(x, y, strict=True)) <= HARM * size
            for x, y, size in zip(mine, right, sizes, strict=True)
        ]
        most = max(sizes[1:])
        return off[0], any(o for o, size in zip(off[1:], sizes[1:], strict=True) if size > 1e-6 * most)


def _parts(x: Any) -> list[np.ndarray]:
    """Returns the parts of an array on the devices."""
    import jax

    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    found = [np.asarray(s.data) for s in x.addressable_shards]
    return [p if np.iscomplexobj(p) else p.astype(np.float64) for p in found]


def checks(
    name: str, checker: Checker, faults: int, lines: int, moves: int, rng: Any
) -> Iterator[dict[str, Any]]:
    """Yields the rows of one program: as it is, and with planted faults."""
    from bench.audit.check_faults import MOVES, moved_wrongly, planted, step_faults

    with moved_wrongly("", -1) as made:
        right = checker.row()
    yield {"program": name} | right
    if right["verdict"] == "refused" or "reference" not in right:
        return
    program, traced = checker.made["program"]
    for k, fault in enumerate(itertools.islice(step_faults(program, traced, rng), faults)):
        with planted(lambda *_, made=fault: made):
            row = checker.row(lines=k < lines)
        yield {"program": name, "fault": fault.kind, "where": fault.where} | _harm(row, right)
    if moves and made:
        kind, number = str(rng.choice(MOVES)), int(rng.integers(len(made)))
        with moved_wrongly(kind, number) as again:
            row = checker.row(lowered_again=True, lines=lines > 0)
        where = again[number] if number < len(again) else ""
        yield {"program": name, "fault": f"a move: {kind}", "where": where} | _harm(row, right)


def _harm(row: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Adds to the row whether its fault does harm. A step that is refused counts as harm: the user sees an error."""
    refused = row["verdict"] == "refused"
    shown = set(row.get("not_slopes", ())) - set(right["not_slopes"])
    return row | {
        "lines_show": bool(shown),
        "harm": refused or row["loss_harm"] or row["gradient_harm"],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts the false alarms of right steps, and the harmful faults that are found and missed."""
    right = [r for r in rows if "fault" not in r and r["verdict"] != "refused"]
    planted = [r for r in rows if "fault" in r]
    harmful = [r for r in planted if r["harm"]]
    seen = [r for r in harmful if "lines" in r]
    backward = [r for r in seen if not r["loss_harm"]]
    kinds: dict[str, Counter[str]] = {}
    for r in harmful:
        kinds.setdefault(r["fault"], Counter())[r["verdict"]] += 1
    return {
        "programs": len({r["program"] for r in right}),
        "right steps": dict(Counter(r["verdict"] for r in right)),
        "right steps, by lines alone": dict(Counter(r["lines"] for r in right)),
        "false alarms of lines alone": sum(r["lines"] == "off" for r in right),
        "planted faults": len(planted),
        "that do harm": len(harmful),
        "found": sum(r["verdict"] in ("off", "refused") for r in harmful),
        "by kind": {k: dict(v) for k, v in sorted(kinds.items())},
        "with lines, and the right loss": len(backward),
        "by lines alone, with the right loss": dict(Counter(r["lines"] for r in backward)),
        "not the slope, with the right loss": sum(r["lines_show"] for r in backward),
        "by lines alone, with a wrong loss": dict(Counter(r["lines"] for r in seen if r["loss_harm"])),
    }


def programs(given: Namespace) -> dict[str, tuple[int | None, str]]:
    """Returns (seed, way to run) of each composed program, and (None, strategy) of each zoo model."""
    from bench.composer.jax_programs import draw

    zoo = {f"zoo:{name} {s}": (None, f"{name} {s}") for name in given.zoo for s in ("ours@2x4", "fsdp")}
    specs = {seed: draw(seed) for seed in given.seeds}
    drawn = {
        f"{seed} {manner}": (seed, manner)
        for seed, spec in specs.items()
        if len(spec.parts) <= given.parts
        for manner in spec.manners
    }
    return zoo | drawn


def checker(seed: int | None, manner: str) -> Checker | None:
    """Returns the checker of one program in one way to run it; None if it has no such plan."""
    from bench.cases.plans import reduced
    from bench.composer.jax_manners import planned
    from bench.composer.jax_programs import draw, program_of
    from pase.errors import PaseError

    if seed is None:
        name, strategy = manner.split()
        case = reduced(name)
        plan, arguments, lowering = case.plan(strategy), case.model.init(0), "manual"
    else:
        program = program_of(draw(seed))
        word, lowering, _ = manner.split("/")
        arguments = (program.params, program.batch)
        try:
            plan = planned(program, word)
        except PaseError:
            return None
    return None if plan is None else Checker(plan=plan, arguments=arguments, lowering=lowering)


def measured(seed: int | None, manner: str, given: Namespace) -> Iterator[dict[str, Any]]:
    """Yields the rows of one program."""
    if (found := checker(seed, manner)) is not None:
        name = f"zoo:{manner}" if seed is None else f"{seed} {manner}"
        rng = np.random.default_rng([*name.encode()])
        yield from checks(name, found, given.faults, given.lines, given.moves, rng)


BENCH = Benchmark(
    "check_rates",
    programs,
    measured,
    named="{program}",
    head=lambda rows: {"summary": summary(rows)},
    line=lambda name, r: f"{r['program']} {r.get('fault', '')}: {r['verdict']}",
    options=[
        option("--seeds", type=numbers, default=list(range(40))),
        option("--parts", type=int, default=4, help="programs of at most this many layers"),
        option("--zoo", nargs="*", default=["mlp", "gpt2"]),
        option("--faults", type=int, default=5, help="faults in what the step computes, per program"),
        option("--lines", type=int, default=2, help="check this many of them by lines alone, too"),
        option("--moves", type=int, default=1, help="0: no fault in a reshard"),
    ],
    prepare=lambda: warnings.simplefilter("ignore"),
    environment=ENVIRONMENT,
    resumes=True,
)
