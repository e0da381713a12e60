"""JAX programs: drawn from a seed, and made from a spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.composer import blocks, loops, losses, values, weights  # noqa: F401 they register patterns
from bench.composer.jax_manners import MANNERS
from bench.composer.maker import LAYERS, LOSSES, Env, Maker, Pattern
from bench.composer.spec import ProgramPart, Spec

__all__ = ["ComposedProgram", "draw", "program_of"]

SIZES = (
    (8, 4, 8),
    (8, 6, 8),
    (8, 4, 16),
    (16, 4, 8),
    (8, 8, 8),
    (8, 3, 8),
    (8, 5, 12),
    (12, 4, 8),
    (16, 8, 16),
)


@dataclass(frozen=True, kw_only=True)
class ComposedProgram:
    """loss(params, batch) -> a number, or (a number, metrics) if ``metrics``.

    patterns: names of what it is made of. epsilon: the machine epsilon of the narrowest type in it.
    """

    loss: Callable[..., Any]
    params: dict[str, Any]
    batch: dict[str, Any]
    metrics: bool
    patterns: tuple[str, ...]
    epsilon: float


def _drawn(rng: np.random.Generator, of: dict[str, Pattern]) -> ProgramPart:
    odds = np.array([p.odds for p in of.values()])
    name = str(rng.choice(list(of), p=odds / odds.sum()))
    return ProgramPart(pattern=name, seed=int(rng.integers(1 << 16)), plain=bool(rng.random() < 0.2))


def draw(seed: int) -> Spec:
    """The program of a seed: one to four layers and a loss, run in one or two ways that apply to it."""
    rng = np.random.default_rng([seed, 32])
    shape = SIZES[int(rng.integers(len(SIZES)))]
    parts = tuple(_drawn(rng, LAYERS) for _ in range(int(rng.choice([1, 2, 3, 4], p=[0.3, 0.35, 0.25, 0.1]))))
    loss = _drawn(rng, LOSSES)
    made = [*(LAYERS[p.pattern] for p in parts), LOSSES[loss.pattern]]
    whole, looped = any(p.whole for p in made), any(p.loops for p in made)
    fitting = {
        name: m.odds
        for name, m in MANNERS.items()
        if not (m.micro_batches and whole) and not (m.layers and not looped)
    }
    odds = np.array(list(fitting.values()))
    kinds = rng.choice(list(fitting), size=1 + int(rng.random() < 0.3), replace=False, p=odds / odds.sum())
    return Spec(shape=shape, parts=parts, loss=loss, manners=tuple(MANNERS[str(k)].drawn(rng) for k in kinds))


def program_of(spec: Spec) -> ComposedProgram:
    """The program of a spec, with its arrays. The same spec always gives the same program."""
    batch: dict[str, Any] = {"x": np.random.default_rng(7).normal(size=spec.shape)}
    shared: dict[str, Any] = {}
    made, makers = [], []
    for i, part in enumerate((*spec.parts, spec.loss)):
        last = i == len(spec.parts)
        m = Maker(
            part=part,
            name="loss" if last else f"{part.pattern}{i}",
            shape=spec.shape,
            batch=batch,
            shared=shared,
        )
        made.append((LOSSES if last else LAYERS)[part.pattern].make(m))
        makers.append(m)
    params: dict[str, Any] = {m.name: m.params for m in makers} | {"shared": shared}
    if not jax.tree.leaves(params):
        params["scale"] = np.ones(spec.shape[2])
    metrics = spec.loss.seed % 2 == 0

    def loss(params: Any, batch: Any) -> Any:
        env = Env(batch=batch, shared=params["shared"], params=params)
        x = batch["x"] * params["scale"] if "scale" in params else batch["x"]
        env.metrics["mean"] = jnp.mean(x)
        for m, apply in zip(makers[:-1], made[:-1], strict=True):
            x = apply(params[m.name], x, env)
        value = made[-1](params["loss"], x, env) + sum(env.terms)
        return (value, env.metrics) if metrics else value

    return ComposedProgram(
        loss=loss,
        params=params,
        batch=batch,
        metrics=metrics,
        patterns=tuple(sorted({m.part.pattern for m in makers} | {w for m in makers for w in m.words})),
        epsilon=max(m.epsilon for m in makers),
    )
