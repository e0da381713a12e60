"""Plans and runs a PyTorch program in one way, and compares it with its unsharded step in float64 over three steps.

Ranks are threads of one process with PyTorch's threaded process group, and messages between stages go through queues.
The ranks of a compiled step are processes, over Gloo.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from bench.cases.torch_ranks import by_threads, on_processes, on_ranks
from bench.composer.outcomes import OF_LEVEL, Difference, Outcome, level_of, outcome_of, tolerance
from bench.composer.spec import Spec
from bench.composer.torch_manners import planned
from bench.composer.torch_programs import TorchProgramMade, draw, program_of
from pase.errors import PaseError

__all__ = ["attempt", "draw", "written"]

STEPS = 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=1e-2, eps=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
}


COMPILERS = {"graph": "eager", "aot_eager": "aot_eager", "inductor": "inductor"}
"""How a step runs, if not op by op -> the backend of torch.compile."""


@dataclass(frozen=True, kw_only=True)
class TorchTrained:
    """The numbers of a few steps. losses: one for each step. state: parameters and buffers by their paths, whole.
    level: parameters whose gradients are zero up to rounding, such as the shift of a softmax."""

    losses: list[float]
    state: dict[str, np.ndarray]
    level: frozenset[str] = frozenset()


def state_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Returns parameters and buffers under all of their paths, gathered from all ranks."""
    both = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    found = {}
    for path, t in both:
        whole = t.full_tensor() if hasattr(t, "full_tensor") else t
        found[path] = whole.detach().resolve_conj().numpy().copy()
    return found


@dataclass(frozen=True, eq=False)
class TorchTrial:
    """A program and its unsharded steps, which run once for each optimizer."""

    spec: Spec

    @cached_property
    def program(self) -> TorchProgramMade:
        return program_of(self.spec)

    @cached_property
    def before(self) -> dict[str, np.ndarray]:
        return state_of(self.program.module())

    @cached_property
    def _unsharded(self) -> dict[str, TorchTrained]:
        return {}

    def unsharded(self, optimizer: str) -> TorchTrained:
        """Runs steps by PyTorch alone in one process, or by pase on one device if the program draws random numbers."""
        if optimizer not in self._unsharded:
            if self.program.drops:
                found = self.sharded("alone", "eager", optimizer)
                assert found is not None
                (self._unsharded[optimizer],) = found
                return self._unsharded[optimizer]
            self._unsharded[optimizer] = self._alone(optimizer)
        return self._unsharded[optimizer]

    def _alone(self, optimizer: str, moved: float = 0.0) -> TorchTrained:
        """Runs steps by PyTorch alone. moved: the relative change of each parameter before them."""
        module, losses = self.program.module(), []
        with torch.no_grad():
            for p in module.parameters() if moved else ():
                p.mul_(1 + moved * torch.randn(p.shape, dtype=p.dtype).sign())
        by = OPTIMIZERS[optimizer]([p for p in module.parameters() if p.requires_grad])
        level: frozenset[str] | None = None
        for _ in range(STEPS):
            by.zero_grad()
            loss = module(**self.program.batch)
            loss.backward()
            grads = {n: float(p.grad.abs().max()) for n, p in module.named_parameters() if p.grad is not None}
            found = level_of(grads)
            level = found if level is None else level & found
            by.step()
            losses.append(float(loss))
        return TorchTrained(losses=losses, state=state_of(module), level=level or frozenset())

    def sharded(self, word: str, runs: str, optimizer: str) -> list[TorchTrained] | None:
        """Runs the plan's steps on each rank; returns None if the program has no such plan."""
        program, plan = self.program, planned(self.program, word)
        if plan is None or (program.drops and plan.accumulate > 1):  # each micro-batch draws its own numbers
            return None
        run, staged = plan.torch, plan.pipeline is not None
        count = plan.mesh.devices * (len(set(s.rank for s in plan.pipeline.stages)) if staged else 1)
        if staged:
            assert (
                run.stages
                and run.stage_of_parameter
                and all(s.program.ops and s.leaves and s.sums for s in run.splits)
            )
        else:
            assert run.program.ops and run.leaves and run.sums  # computed once, not on each thread
        # Made one after the other, because they draw from the same random state of the process.
        modules = [program.module() for _ in range(count)]
        torch.manual_seed(11)
        how: dict[str, Any] = {} if runs == "eager" else {"compile": COMPILERS[runs]}

        def on_rank(rank: int) -> TorchTrained:
            step = run.train_step(modules[rank], OPTIMIZERS[optimizer], **how)
            losses = [float(step(program.batch)) for _ in range(STEPS)]
            return TorchTrained(losses=losses, state=state_of(modules[rank]))

        if how:
            return _by_processes(count, on_rank)
        with by_threads() if staged else nullcontext():
            return on_ranks(count, on_rank)

    def outcome(self, manner: str) -> Outcome:
        word, runs, optimizer = manner.split("/")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return outcome_of(
                lambda: self._differences(word, runs, optimizer), lambda: self._unstable(optimizer)
            )

    def _unstable(self, optimizer: str) -> bool:
        """Returns whether a change of the parameters by a few roundings changes the steps by ten thousand times the
        allowed difference. Rounding then cannot be told from an error."""
        if self.program.drops:
            return False
        whole, again = self.unsharded(optimizer), self._alone(optimizer, moved=64 * self.program.epsilon)
        bound, epsilon = 1e4 * tolerance(self.program.epsilon), self.program.epsilon
        return bool(differences(self.before, whole, again, bound, epsilon))

    def _differences(self, word: str, runs: str, optimizer: str) -> list[Difference] | None:
        ranks = self.sharded(word, runs, optimizer) if runs in COMPILERS else None  # before any backward
        whole = self.unsharded(optimizer)
        if not np.max(np.abs(whole.losses)) < 1e3 * (1 + abs(whole.losses[0])):
            return None  # it diverges: rounding grows as fast as the loss
        ranks = ranks or self.sharded(word, runs, optimizer)
        if ranks is None:
            return None
        bound, epsilon = tolerance(self.program.epsilon), self.program.epsilon
        found = [d for r in ranks for d in differences(self.before, whole, r, bound, epsilon)]
        missing = set(whole.state) - {k for r in ranks for k in r.state}
        found += [Difference(what=f"no {k}", off=np.inf) for k in sorted(missing)]
        worst: dict[str, Difference] = {}
        for d in found:
            if d.what not in worst or not d.off <= worst[d.what].off:
                worst[d.what] = d
        return list(worst.values())


def _by_processes(count: int, on_rank: Callable[[int], TorchTrained]) -> list[TorchTrained]:
    """Returns the result of each rank. A PaseError of a rank is raised as a PaseError."""

    def tried(rank: int) -> TorchTrained | str:
        try:
            return on_rank(rank)
        except PaseError as e:
            return str(e)

    found = on_processes(count, tried, seconds=600)
    for said in found:
        if isinstance(said, str):
            raise PaseError(said)
    return found


def differences(
    before: Mapping[str, np.ndarray], whole: TorchTrained, rank: TorchTrained, bound: float, epsilon: float
) -> list[Difference]:
    """Returns the losses, parameters and buffers that differ on a rank by more than rounding, by name."""
    found = []
    for i, (right, mine) in enumerate(zip(whole.losses, rank.losses, strict=True)):
        found.append(Difference(what=f"loss {i}", off=abs(right - mine) / (max(abs(right), 1e-3) * bound)))

    def wide(x: np.ndarray) -> np.ndarray:
        return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)

    change = {k: apart(wide(a), wide(before[k])) for k, a in whole.state.items() if a.size}
    moved = max(change.values(), default=0.0)
    for path, got in rank.state.items():
        want = whole.state.get(path)
        if want is None or want.shape != got.shape:
            found.append(Difference(what=f"another {path}", off=np.inf))
        elif want.size:
            size = float(np.abs(wide(want)[np.isfinite(want)]).max(initial=0.0))
            allowed = bound * (change[path] + 1e-3 * moved) + 32 * epsilon * size
            if path in whole.level:
                allowed += OF_LEVEL * moved
            off = apart(wide(want), wide(got))
            found.append(Difference(what=path, off=off / allowed if allowed else float(off > 0) * np.inf))
    return [d for d in found if not d.off <= 1]


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the largest difference; equal infinities do not differ."""
    return float(np.where(a == b, 0.0, np.abs(a - b)).max())


def attempt(spec: Spec) -> dict[str, Any]:
    """Returns the row of a program: its patterns, and how each way to run it ended."""
    torch.set_num_threads(1)
    trial, began = TorchTrial(spec), time.process_time()
    row: dict[str, Any] = {"program": str(spec), "patterns": list(trial.program.patterns)}
    if trial.program.epsilon > 2.0**-52:
        row["epsilon"] = trial.program.epsilon
    ends = {m: trial.outcome(m).row() for m in sorted(spec.manners, key=lambda m: "/eager/" in m)}
    row["ends"] = {m: ends[m] for m in spec.manners}
    return row | {"cpu_s": round(time.process_time() - began, 2)}


def written(spec: Spec) -> str:
    """Returns the program as PyTorch exports it."""
    program = program_of(spec)
    try:
        code = program.traced.program.graph.code
    except PaseError as e:
        code = str(e)
    return f"{spec}\n{program.module()}\n{code}"
