"""Plans and runs a JAX program in one way, and compares it with its unsharded step in float64 over three steps."""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.composer.jax_manners import planned
from bench.composer.jax_optimizers import OPTIMIZERS
from bench.composer.jax_programs import ComposedProgram, draw, program_of
from bench.composer.outcomes import OF_LEVEL, Difference, Outcome, level_of, outcome_of, tolerance
from bench.composer.spec import Spec
from pase.api import Plan

__all__ = ["attempt", "draw", "written"]

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The numbers of a few steps, on the host. losses: one for each step. arrays: parameters and state, by their paths.
    metrics: those of the last step. level: parameters whose gradients are zero up to rounding."""

    losses: list[float]
    arrays: dict[str, np.ndarray]
    metrics: Any
    level: frozenset[str] = frozenset()


def _named(*trees: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of trees and modules by their paths, and the data of random keys."""
    if "flax.nnx" in sys.modules:
        from flax import nnx

        trees = tuple(nnx.state(t) if isinstance(t, nnx.Module) else t for t in trees)
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(trees):
        if isinstance(x, np.ndarray | np.generic | jax.Array):
            raw = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            found[jax.tree_util.keystr(path)] = np.asarray(raw)
    return found


@dataclass(frozen=True, eq=False)
class ProgramTrial:
    """A program and its unsharded steps, which run once for each optimizer."""

    spec: Spec

    @cached_property
    def program(self) -> ComposedProgram:
        return program_of(self.spec)

    @cached_property
    def _unsharded(self) -> dict[tuple[str, int], Trained]:
        return {}

    def unsharded(self, optimizer: str, parts: int = 1) -> Trained:
        """Runs steps as a user would write them, on one device. parts: the number of micro-batches of a step."""
        if (optimizer, parts) not in self._unsharded:
            run = _modules_unsharded if self.program.modules else _unsharded
            self._unsharded[optimizer, parts] = run(self.program, OPTIMIZERS[optimizer](), parts)
        return self._unsharded[optimizer, parts]

    def sharded(self, plan: Plan, lowering: str, optimizer: str) -> Trained:
        """Runs the plan's steps."""
        program, opt = self.program, OPTIMIZERS[optimizer]()
        how: dict[str, Any] = {} if plan.pipeline is not None else {"lowering": lowering}
        step = plan.jax.train_step(opt, **how)
        params, batch, *held = plan.jax.device_put(*program.arguments())
        state, losses, metrics = plan.jax.init(opt, params), [], {}
        for _ in range(STEPS):
            params, state, said = step(params, state, batch, *held)
            if program.aux:
                said, more = said
                metrics = more.get("metrics", {})
                held = [more["state"]] if program.carry else []
            losses.append(float(said))
        arrays = _named(plan.jax.gathered(params), *held)
        return Trained(losses=losses, arrays=arrays, metrics=jax.device_get(metrics))

    def outcome(self, manner: str) -> Outcome:
        word, lowering, optimizer = manner.split("/")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = outcome_of(lambda: self._differences(word, lowering, optimizer))
        return found.warned([str(w.message) for w in said if issubclass(w.category, UserWarning)])

    def _differences(self, word: str, lowering: str, optimizer: str) -> list[Difference] | None:
        plan = planned(self.program, word)
        if plan is None:
            return None
        # State passes through micro-batches in sequence; without state, they are the same as the whole batch.
        whole = self.unsharded(optimizer, plan.accumulate if self.program.holds else 1)
        if not np.max(np.abs(whole.losses)) < 1e3 * (1 + abs(whole.losses[0])):
            return None  # it diverges: rounding grows as fast as the loss
        return differences(self.program, whole, self.sharded(plan, lowering, optimizer))


def _parts(batch: Any, examples: int, parts: int) -> list[Any]:
    """Returns the micro-batches of a batch, each with every n-th example."""
    on = lambda x: np.ndim(x) > 0 and x.shape[0] == examples  # noqa: E731
    return [jax.tree.map(lambda x, k=k: x[k::parts] if on(x) else x, batch) for k in range(parts)]


def _unsharded(program: ComposedProgram, opt: optax.GradientTransformation, parts: int) -> Trained:
    """Runs jitted steps of a function of arrays; parameters that are not floats stay as they are."""
    leaves, tree = jax.tree.flatten(program.params)
    arrays = [isinstance(x, np.ndarray | np.generic | jax.Array) for x in leaves]
    mine = [
        on and jnp.issubdtype(jnp.result_type(x), jnp.inexact) for on, x in zip(arrays, leaves, strict=True)
    ]
    examples = program.batch["x"].shape[0]

    def whole(trained: list[Any]) -> Any:
        given = iter(trained)
        return jax.tree.unflatten(
            tree, [next(given) if on else x for on, x in zip(mine, leaves, strict=True)]
        )

    def value(trained: list[Any], batch: Any, held: Any) -> Any:
        loss, metrics, held = program.run(whole(trained), batch, held, {})
        return loss, (metrics, held)

    @jax.jit
    def step(trained: list[Any], state: Any, batch: Any, held: Any) -> Any:
        losses, summed, metrics = [], [], []
        for part in _parts(batch, examples, parts):
            (loss, (said, held)), grads = jax.value_and_grad(value, has_aux=True)(trained, part, held)
            losses.append(loss)
            summed.append(grads)
            metrics.append(said)
        grads = jax.tree.map(lambda *g: sum(g) / parts, *summed)
        updates, state = opt.update(grads, state, trained)
        said = jax.tree.map(lambda *x: sum(x) / parts, *metrics)
        sizes = jax.tree.map(lambda g: jnp.abs(g).max(initial=0.0), grads)
        return optax.apply_updates(trained, updates), state, sum(losses) / parts, said, held, sizes

    trained = [jnp.asarray(x) for on, x in zip(mine, leaves, strict=True) if on]
    state, losses, metrics, held = opt.init(trained), [], {}, program.state
    level: list[frozenset[str]] = []
    for _ in range(STEPS):
        trained, state, loss, metrics, held, sizes = step(trained, state, program.batch, held)
        losses.append(float(loss))
        level.append(level_of({k: float(g) for k, g in _named(whole(sizes)).items() if g.ndim == 0}))
    ends = _named(whole(trained), *([held] if held else []))
    return Trained(
        losses=losses,
        arrays=ends,
        metrics=metrics if program.metrics else {},
        level=frozenset.intersection(*level),
    )


def _modules_unsharded(program: ComposedProgram, opt: optax.GradientTransformation, parts: int) -> Trained:
    """Runs steps of a function of modules, as in Flax's guides."""
    from flax import nnx

    model, batch = program.arguments()
    optimizer = nnx.Optimizer(model, opt, wrt=nnx.Param)
    examples = batch["x"].shape[0]

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        values, summed = [], []
        for part in _parts(batch, examples, parts):
            value, grads = nnx.value_and_grad(program.loss, has_aux=program.aux)(model, part)
            values.append(value if program.aux else (value, {}))
            summed.append(grads)
        grads = jax.tree.map(lambda *g: sum(g) / parts, *summed)
        optimizer.update(model, grads)
        sizes = jax.tree.map(lambda g: jnp.abs(g).max(initial=0.0), grads)
        return jax.tree.map(lambda *x: sum(x) / parts, *values), sizes

    losses, more, level = [], {}, []
    for _ in range(STEPS):
        (loss, more), sizes = step(model, optimizer, batch)
        losses.append(float(loss))
        level.append(level_of({k: float(g) for k, g in _named(sizes).items()}))
    return Trained(
        losses=losses,
        arrays=_named(model),
        metrics=more.get("metrics", {}),
        level=frozenset.intersection(*level),
    )


def differences(program: ComposedProgram, whole: Trained, split: Trained) -> list[Difference]:
    """Returns the losses, metrics and parameters that differ by more than rounding, by name."""
    bound = tolerance(program.epsilon)
    params, _, *held = program.arguments()
    before = _named(params, *held)
    found = []
    for i, (right, mine) in enumerate(zip(whole.losses, split.losses, strict=True)):
        found.append(Difference(what=f"loss {i}", off=abs(right - mine) / (max(abs(right), 1e-3) * bound)))
    if not before.keys() == whole.arrays.keys() == split.arrays.keys():
        names = sorted(before.keys() ^ split.arrays.keys() | before.keys() ^ whole.arrays.keys())
        return [Difference(what=name, off=np.inf) for name in names]
    rows: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]] = []
    for name, start in before.items():
        if start.size:
            wide = np.complex128 if np.iscomplexobj(start) else np.float64
            rows.append((name, *(t[name].astype(wide) for t in (before, whole.arrays, split.arrays))))
    moved = max((float(np.abs(a - start).max()) for _, start, a, _ in rows), default=0.0)
    for name, start, a, b in rows:
        mine = float(np.abs(a - start).max())
        # Optimizers that divide by |g| + 1e-3 multiply a gradient that is zero up to rounding by 1,000.
        noise = program.epsilon * (1e3 * moved + 32 * float(np.abs(a).max()))
        allowed = bound * (mine + 1e-3 * moved) + noise + OF_LEVEL * moved * (name in whole.level)
        off = float(np.abs(a - b).max())
        found.append(Difference(what=name, off=off / allowed if allowed else float(off > 0) * np.inf))
    metrics = [jax.tree_util.tree_leaves_with_path(jax.device_get(t.metrics)) for t in (whole, split)]
    for (path, said), (_, got) in zip(*metrics, strict=True):
        other = np.asarray(got)
        if np.ndim(other) > np.ndim(said):  # in a step of micro-batches, the metrics of each are stacked
            other = other.mean(0)
        size, apart = float(np.abs(said).max()), float(np.abs(said - other).max())
        name = f"metric {jax.tree_util.keystr(path)}"
        found.append(Difference(what=name, off=apart / (bound * max(size, 1e-3))))
    return [d for d in found if not d.off <= 1]


def attempt(spec: Spec) -> dict[str, Any]:
    """Returns the row of a program: its patterns, and how each way to run it ended."""
    trial, began = ProgramTrial(spec), time.process_time()
    row: dict[str, Any] = {"program": str(spec), "patterns": list(trial.program.patterns)}
    if trial.program.epsilon > 2.0**-52:
        row["epsilon"] = trial.program.epsilon
    row["ends"] = {m: trial.outcome(m).row() for m in spec.manners}
    return row | {"cpu_s": round(time.process_time() - began, 2)}


def written(spec: Spec) -> str:
    """Returns the program as JAX traces it."""
    program = program_of(spec)
    if program.modules or not all(hasattr(x, "dtype") for x in jax.tree.leaves(program.arguments())):
        return str(spec)
    return f"{spec}\n{jax.make_jaxpr(program.loss)(*program.arguments())}"
