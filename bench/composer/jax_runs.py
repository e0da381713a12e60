"""One JAX program, planned and run in one way, beside its unsharded step in float64 over three steps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.composer.jax_manners import planned
from bench.composer.jax_programs import ComposedProgram, draw, program_of
from bench.composer.outcomes import Difference, Outcome, outcome_of, tolerance
from bench.composer.spec import Spec

__all__ = ["attempt", "draw", "written"]

STEPS = 3
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(1e-2, eps=1e-3),
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The numbers of a few steps, on the host. losses: one for each step; metrics: of the last."""

    losses: list[float]
    params: Any
    metrics: Any


@dataclass(frozen=True, eq=False)
class ProgramTrial:
    """A program and its unsharded steps, which are run once for each optimizer."""

    spec: Spec

    @cached_property
    def program(self) -> ComposedProgram:
        return program_of(self.spec)

    @cached_property
    def _unsharded(self) -> dict[str, Trained]:
        return {}

    def unsharded(self, optimizer: str) -> Trained:
        """As any user would write it: on one device, jitted, with the parameters that are not of floats kept."""
        if optimizer in self._unsharded:
            return self._unsharded[optimizer]
        opt, program = OPTIMIZERS[optimizer](), self.program
        leaves, tree = jax.tree.flatten(program.params)
        arrays = [isinstance(x, np.ndarray | jax.Array | float) for x in leaves]
        mine = [
            on and jnp.issubdtype(jnp.result_type(x), jnp.inexact)
            for on, x in zip(arrays, leaves, strict=True)
        ]

        def value(trained: list[Any], batch: Any) -> Any:
            given = iter(trained)
            out = program.loss(
                jax.tree.unflatten(
                    tree, [next(given) if on else x for on, x in zip(mine, leaves, strict=True)]
                ),
                batch,
            )
            return out if program.metrics else (out, {})

        @jax.jit
        def step(trained: list[Any], state: Any, batch: Any) -> Any:
            (loss, metrics), grads = jax.value_and_grad(value, has_aux=True)(trained, batch)
            updates, state = opt.update(grads, state, trained)
            return optax.apply_updates(trained, updates), state, loss, metrics

        trained = [jnp.asarray(x) for on, x in zip(mine, leaves, strict=True) if on]
        state, losses, metrics = opt.init(trained), [], {}
        for _ in range(STEPS):
            trained, state, loss, metrics = step(trained, state, program.batch)
            losses.append(float(loss))
        given = iter(trained)
        params = jax.tree.unflatten(
            tree, [next(given) if on else x for on, x in zip(mine, leaves, strict=True)]
        )
        self._unsharded[optimizer] = Trained(losses=losses, params=jax.device_get(params), metrics=metrics)
        return self._unsharded[optimizer]

    def sharded(self, word: str, lowering: str, optimizer: str) -> Trained | None:
        """The plan's steps; None if the program has no such plan."""
        program, opt = self.program, OPTIMIZERS[optimizer]()
        plan = planned(program, word)
        if plan is None:
            return None
        how: dict[str, Any] = {} if plan.pipeline is not None else {"lowering": lowering}
        step = plan.jax.train_step(opt, **how)
        params, batch = plan.jax.device_put(program.params, program.batch)
        state, losses, metrics = plan.jax.init(opt, params), [], {}
        for _ in range(STEPS):
            params, state, said = step(params, state, batch)
            if program.metrics:
                said, metrics = said
            losses.append(float(said))
        if plan.pipeline is not None:
            params = plan.jax.gathered(params)
        elif hasattr(plan.jax, "unpadded"):
            params = plan.jax.unpadded(params)
        return Trained(losses=losses, params=jax.device_get(params), metrics=jax.device_get(metrics))

    def outcome(self, manner: str) -> Outcome:
        word, lowering, optimizer = manner.split("/")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = outcome_of(lambda: self._differences(word, lowering, optimizer))
        return found.warned([str(w.message) for w in said if issubclass(w.category, UserWarning)])

    def _differences(self, word: str, lowering: str, optimizer: str) -> list[Difference] | None:
        whole = self.unsharded(optimizer)
        if not np.max(np.abs(whole.losses)) < 1e3 * (1 + abs(whole.losses[0])):
            return None  # it diverges: rounding grows as fast as the loss
        split = self.sharded(word, lowering, optimizer)
        return None if split is None else differences(self.program, whole, split)


def differences(program: ComposedProgram, whole: Trained, split: Trained) -> list[Difference]:
    """What differs by more than rounding, by its name: a loss, a metric, a parameter."""
    bound = tolerance(program.epsilon)
    before = jax.tree_util.tree_leaves_with_path(program.params)
    found = []
    for i, (right, mine) in enumerate(zip(whole.losses, split.losses, strict=True)):
        found.append(Difference(what=f"loss {i}", off=abs(right - mine) / (max(abs(right), 1e-3) * bound)))
    after = [jax.tree.leaves(t.params) for t in (whole, split)]
    rows: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]] = []
    for (path, start), a, b in zip(before, *after, strict=True):
        if not isinstance(start, np.ndarray | jax.Array):
            continue
        wide = np.complex128 if np.iscomplexobj(start) else np.float64
        first, whole_end, split_end = (np.asarray(x).astype(wide) for x in (start, a, b))
        if first.size:
            rows.append((jax.tree_util.keystr(path), first, whole_end, split_end))
    moved = max((float(np.abs(a - start).max()) for _, start, a, _ in rows), default=0.0)
    for name, start, a, b in rows:
        mine = float(np.abs(a - start).max())
        allowed = bound * (mine + 1e-3 * moved) + 32 * program.epsilon * float(np.abs(a).max())
        off = float(np.abs(a - b).max())
        found.append(Difference(what=name, off=off / allowed if allowed else float(off > 0) * np.inf))
    metrics = [jax.tree_util.tree_leaves_with_path(jax.device_get(t.metrics)) for t in (whole, split)]
    for (path, said), (_, got) in zip(*metrics, strict=True):
        other = np.asarray(got)
        if np.ndim(other) > np.ndim(said):  # of a step in micro-batches, those of each are stacked
            other = other.mean(0)
        size, apart = float(np.abs(said).max()), float(np.abs(said - other).max())
        name = f"metric {jax.tree_util.keystr(path)}"
        found.append(Difference(what=name, off=apart / (bound * max(size, 1e-3))))
    return [d for d in found if not d.off <= 1]


def attempt(spec: Spec) -> dict[str, Any]:
    """The row of a program: what it is made of, and how each of its ways to be run ended."""
    trial, began = ProgramTrial(spec), time.process_time()
    row: dict[str, Any] = {"program": str(spec), "patterns": list(trial.program.patterns)}
    if trial.program.epsilon > 2.0**-52:
        row["epsilon"] = trial.program.epsilon
    row["ends"] = {m: trial.outcome(m).row() for m in spec.manners}
    return row | {"cpu_s": round(time.process_time() - began, 2)}


def written(spec: Spec) -> str:
    """The program as JAX traces it."""
    program = program_of(spec)
    return f"{spec}\n{jax.make_jaxpr(program.loss)(program.params, program.batch)}"
