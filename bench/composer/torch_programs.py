"""Draws PyTorch programs from a seed, and makes them from a spec."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.composer import (  # noqa: F401 they register patterns
    torch_blocks,
    torch_losses,
    torch_state,
    torch_structures,
    torch_values,
    torch_weights,
)
from bench.composer.maker import Pattern
from bench.composer.spec import ProgramPart, Spec
from bench.composer.torch_maker import TORCH_LAYERS, TORCH_LOSSES, TorchEnv, TorchMaker
from bench.composer.torch_manners import TORCH_MANNERS
from pase.frontends.torch.frontend import TracedTorch

__all__ = ["TorchProgramMade", "draw", "program_of"]

SIZES = ((8, 4, 8), (8, 6, 8), (8, 4, 16), (16, 4, 8), (8, 8, 8), (8, 3, 8), (8, 5, 12), (12, 4, 8))


class ComposedModule(nn.Module):
    """forward(**batch) -> the loss."""

    def __init__(self, parts: list[Any]) -> None:
        super().__init__()
        self.layers, self.loss = nn.ModuleList(parts[:-1]), parts[-1]
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        env = TorchEnv(batch=others)
        x = x * self.scale
        for layer in self.layers:
            x = layer(x, env)
        return sum(env.terms, self.loss(x, env))


@dataclass(frozen=True)
class TorchProgramMade:
    """A program of a spec; each call of ``module`` makes an equal module."""

    spec: Spec

    @cached_property
    def _first(self) -> tuple[nn.Module, dict[str, Tensor], list[TorchMaker]]:
        spec = self.spec
        batch = {"x": torch.tensor(np.random.default_rng(7).normal(size=spec.shape))}
        shared: dict[str, nn.Parameter] = {}
        makers = []
        for i, part in enumerate((*spec.parts, spec.loss)):
            last = i == len(spec.parts)
            m = TorchMaker(
                part=part,
                name="loss" if last else f"{part.pattern}{i}",
                shape=spec.shape,
                batch=batch,
                shared=shared,
            )
            m.own.run = (TORCH_LOSSES if last else TORCH_LAYERS)[part.pattern].make(m)
            makers.append(m)
        torch.manual_seed(0)
        return ComposedModule([m.own for m in makers]).double(), batch, makers

    def module(self) -> nn.Module:
        return TorchProgramMade(self.spec)._first[0]

    @cached_property
    def traced(self) -> TracedTorch:
        """The program as pase reads it."""
        from pase.frontends.torch.frontend import trace

        return trace(self.module(), self.batch)

    @property
    def batch(self) -> dict[str, Tensor]:
        return self._first[1]

    @property
    def patterns(self) -> tuple[str, ...]:
        makers = self._first[2]
        return tuple(sorted({m.part.pattern for m in makers} | {w for m in makers for w in m.words}))

    @property
    def epsilon(self) -> float:
        return max(m.epsilon for m in self._first[2])

    @property
    def drops(self) -> bool:
        return any(m.drops for m in self._first[2])


def program_of(spec: Spec) -> TorchProgramMade:
    """Returns the program of a spec. The same spec always gives the same program."""
    return TorchProgramMade(spec)


def _drawn(rng: np.random.Generator, of: dict[str, Pattern]) -> ProgramPart:
    odds = np.array([p.odds for p in of.values()])
    name = str(rng.choice(list(of), p=odds / odds.sum()))
    return ProgramPart(pattern=name, seed=int(rng.integers(1 << 16)), plain=bool(rng.random() < 0.2))


def draw(seed: int) -> Spec:
    """Returns the program of a seed: one to four layers and a loss, with one or two ways to run it that apply."""
    rng = np.random.default_rng([seed, 33])
    shape = SIZES[int(rng.integers(len(SIZES)))]
    parts = tuple(
        _drawn(rng, TORCH_LAYERS) for _ in range(int(rng.choice([1, 2, 3, 4], p=[0.3, 0.4, 0.2, 0.1])))
    )
    loss = _drawn(rng, TORCH_LOSSES)
    made = [*(TORCH_LAYERS[p.pattern] for p in parts), TORCH_LOSSES[loss.pattern]]
    whole, looped = any(p.whole for p in made), any(p.loops for p in made)
    fitting = {
        name: m.odds
        for name, m in TORCH_MANNERS.items()
        if not (m.micro_batches and whole) and not (m.layers and not looped)
    }
    odds = np.array(list(fitting.values()))
    kinds = rng.choice(list(fitting), size=1 + int(rng.random() < 0.4), replace=False, p=odds / odds.sum())
    manners = tuple(TORCH_MANNERS[str(k)].drawn(rng) for k in kinds)
    return Spec(shape=shape, parts=parts, loss=loss, manners=manners)
