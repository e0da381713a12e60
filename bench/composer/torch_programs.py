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
from bench.composer.draws import Family, drawn_spec
from bench.composer.spec import Spec
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


FAMILY = Family(
    number=33,
    sizes=SIZES,
    layers=TORCH_LAYERS,
    losses=TORCH_LOSSES,
    manners=TORCH_MANNERS,
    depths=(0.3, 0.4, 0.2, 0.1),
    twice=0.4,
)


def draw(seed: int) -> Spec:
    """Returns the program of a seed."""
    return drawn_spec(FAMILY, seed)
