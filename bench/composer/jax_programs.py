"""Draws JAX programs from a seed, and makes them from a spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.composer import (  # noqa: F401 they register patterns
    arrays,
    blocks,
    calls,
    loops,
    losses,
    stateful,
    values,
    weights,
)
from bench.composer.draws import Family, drawn_spec
from bench.composer.jax_manners import MANNERS
from bench.composer.maker import LAYERS, LOSSES, Env, Maker
from bench.composer.spec import Spec

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
    """A program: loss(params, batch) -> a number, or (a number, {"metrics": …, "state": …}).

    state: what one call passes to the next; the program is then loss(params, batch, state). modules: functions that
    make the model's modules of Flax NNX; the program is then loss(model, batch), and the model has the parameters and
    the state as Variables. patterns: the names of its patterns. epsilon: the machine epsilon of its narrowest type.
    """

    run: Callable[..., Any]
    """run(params, batch, state, modules) -> (a number, metrics, next state)."""
    params: dict[str, Any]
    batch: dict[str, Any]
    state: dict[str, Any]
    modules: Mapping[str, Callable[[], Any]]
    metrics: bool
    patterns: tuple[str, ...]
    epsilon: float

    @property
    def carry(self) -> dict[int, Any] | None:
        """What a call passes to the next, as the argument of ``pase.compile``."""
        return {1: (1, "state")} if self.state and not self.modules else None

    @property
    def holds(self) -> bool:
        """Whether a call passes anything to the next."""
        return bool(self.state or self.modules)

    @property
    def aux(self) -> bool:
        """Whether the program returns more than the loss."""
        return self.metrics or self.carry is not None

    def arguments(self) -> tuple[Any, ...]:
        """The arguments of ``loss``, with new modules."""
        if self.modules:
            from bench.composer.nnx_model import ComposedModel

            made = {name: make() for name, make in self.modules.items()}
            return ComposedModel(self.params, made), self.batch
        return (self.params, self.batch, self.state) if self.state else (self.params, self.batch)

    def loss(self, params: Any, batch: Any, state: Any = None) -> Any:
        """The user's function."""
        modules = {}
        if self.modules:
            modules, params = {name: getattr(params, name) for name in self.modules}, params.params()
        value, metrics, after = self.run(params, batch, state, modules)
        more = ({"metrics": metrics} if self.metrics else {}) | ({"state": after} if self.carry else {})
        return (value, more) if more else value


FAMILY = Family(
    number=32,
    sizes=SIZES,
    layers=LAYERS,
    losses=LOSSES,
    manners=MANNERS,
    depths=(0.3, 0.35, 0.25, 0.1),
    twice=0.3,
)


def draw(seed: int) -> Spec:
    """Returns the program of a seed."""
    return drawn_spec(FAMILY, seed)


def program_of(spec: Spec) -> ComposedProgram:
    """Returns the program of a spec, with its arrays. The same spec always gives the same program."""
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

    def run(params: Any, batch: Any, state: Any, modules: Any) -> Any:
        env = Env(
            batch=batch, shared=params["shared"], params=params, state=dict(state or {}), modules=modules
        )
        x = batch["x"] * params["scale"] if "scale" in params else batch["x"]
        env.metrics["mean"] = jnp.mean(x)
        for m, apply in zip(makers[:-1], made[:-1], strict=True):
            x = apply(params[m.name], x, env)
        return made[-1](params["loss"], x, env) + sum(env.terms), env.metrics, env.state

    return ComposedProgram(
        run=run,
        params=params,
        batch=batch,
        state={name: x for m in makers for name, x in m.state.items()},
        modules={name: make for m in makers for name, make in m.modules.items()},
        metrics=spec.loss.seed % 2 == 0,
        patterns=tuple(sorted({m.part.pattern for m in makers} | {w for m in makers for w in m.words})),
        epsilon=max(m.epsilon for m in makers),
    )
