"""Builds patterns in PyTorch: random choices, parameters, buffers, inputs, and weights with a transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from bench.composer.maker import PartMaker, Pattern, registered_pattern

__all__ = [
    "TORCH_LAYERS",
    "TORCH_LOSSES",
    "TORCH_TRANSFORMS",
    "TorchApply",
    "TorchEnv",
    "TorchMaker",
    "TorchPart",
    "TransformedWeight",
    "torch_layer",
    "torch_loss",
    "torch_transform",
]

T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Any])
TOKENS = 12


@dataclass(kw_only=True)
class TorchEnv:
    """What all parts of a program see during a call. terms: terms that parts add to the loss."""

    batch: dict[str, Tensor]
    terms: list[Tensor] = field(default_factory=list)


TorchApply = Callable[[Any, Tensor, TorchEnv], Tensor]
"""f(the part's module, x [batch, sequence, width], env) -> x of the same shape; for a loss: -> a number."""


class TorchPart(nn.Module):
    """A layer or a loss: a module with its own parameters, and the function that reads them."""

    run: TorchApply

    def forward(self, x: Tensor, env: TorchEnv) -> Tensor:
        return self.run(self, x, env)


class TransformedWeight(nn.Module):
    """forward() -> a weight, which is a function of this module's parameters."""

    def __init__(self, get: Callable[[Any], Tensor], scale: float) -> None:
        super().__init__()
        self.get, self.scale = get, scale

    def forward(self) -> Tensor:
        return self.get(self) * self.scale


class LinearOfWeight(nn.Module):
    """A product with a weight [in, out] that is a function of parameters."""

    def __init__(self, weight: nn.Module, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight_of, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_of().mT, self.bias)


class ElementwiseParametrization(nn.Module):
    """A module for ``torch.nn.utils.parametrize``."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@dataclass(kw_only=True)
class TorchMaker(PartMaker):
    """Builds one part of a PyTorch program.

    own: the module with the part's parameters. drops: whether it draws random numbers.
    """

    own: Any = field(default_factory=TorchPart)
    drops: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        torch.manual_seed(self.part.seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.tensor(self.values.normal(size=shape) * scale)

    def integers(self, n: int, *shape: int) -> Tensor:
        return torch.tensor(self.values.integers(0, n, shape))

    def param(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> nn.Parameter:
        return nn.Parameter(self.normal(*shape, scale=scale) + shift)

    def common(self, name: str, *shape: int, scale: float = 1.0) -> nn.Parameter:
        """Returns a parameter that all parts with this name share: tied weights."""
        if name not in self.shared:
            made = np.random.default_rng([len(name), *shape]).normal(size=shape) * scale
            self.shared[name] = nn.Parameter(torch.tensor(made))
        return self.shared[name]

    def transformed(self, shape: Sequence[int], scale: float, word: str) -> TransformedWeight:
        self.words.append(f"weight:{word}")
        made = TransformedWeight(lambda own: own.w, scale)
        made.get = TORCH_TRANSFORMS[word].make(self, made, shape)
        return made

    def weight(self, *shape: int, scale: float | None = None) -> nn.Module:
        """Returns a module whose forward() is a weight: a parameter, or a function of parameters. The default scale
        keeps the size of a product."""
        scale = float(np.prod(shape[:-1]) ** -0.5) if scale is None and len(shape) > 1 else (scale or 1.0)
        if self.part.plain or self.transforms.random() < 0.35:
            made = TransformedWeight(lambda own: own.w, 1.0)
            made.w = self.param(*shape, scale=scale)
            return made
        fitting = [n for n, t in TORCH_TRANSFORMS.items() if t.fits(shape)]
        return self.transformed(shape, scale, str(self.transforms.choice(fitting)))

    def vector(self, n: int, shift: float = 0.0) -> nn.Module:
        """Returns a module whose forward() is a bias or a gain."""
        made = self.weight(n, scale=0.3)
        if isinstance(made, TransformedWeight) and shift:
            get = made.get
            made.get = lambda own: get(own) + shift / own.scale
        return made

    def linear(self, i: int, o: int, bias: bool = True) -> nn.Module:
        """Returns a module from x [..., i] to [..., o]: nn.Linear, plain, parametrized, or with a computed weight."""
        if self.part.plain or (how := self.transforms.random()) < 0.4:
            return nn.Linear(i, o, bias=bias)
        if how < 0.75:
            return LinearOfWeight(self.weight(i, o), self.param(o, scale=0.1) if bias else None)
        return self.parametrized(nn.Linear(i, o, bias=bias))

    def parametrized(self, module: nn.Module) -> nn.Module:
        """Returns the module with a weight that is a function of another parameter, by PyTorch's own means."""
        from bench.composer.torch_weights import ELEMENTWISE, PARAMETRIZED

        word = str(self.transforms.choice([*PARAMETRIZED, *ELEMENTWISE]))
        self.words.append(f"parametrized:{word}")
        if word in PARAMETRIZED:
            return PARAMETRIZED[word](module)
        parametrize.register_parametrization(
            module, "weight", ElementwiseParametrization(ELEMENTWISE[word]), unsafe=True
        )
        return module


TORCH_LAYERS: dict[str, Pattern] = {}
TORCH_LOSSES: dict[str, Pattern] = {}
TORCH_TRANSFORMS: dict[str, Pattern] = {}


def torch_layer(odds: float = 1.0, *, whole: bool = False, loops: bool = False) -> Callable[[M], M]:
    """Registers a layer, which makes a ``TorchApply`` from a maker."""
    return registered_pattern(TORCH_LAYERS, odds=odds, whole=whole, loops=loops)


def torch_loss(odds: float = 1.0, *, whole: bool = False) -> Callable[[M], M]:
    """Registers a loss, which makes a ``TorchApply`` that returns a number."""
    return registered_pattern(TORCH_LOSSES, odds=odds, whole=whole)


def torch_transform(fits: Callable[[Sequence[int]], bool] = lambda shape: True) -> Callable[[M], M]:
    """Registers a transform of weights, which makes f(module) -> a tensor of a given shape, from a maker and a module
    for its parameters."""
    return registered_pattern(TORCH_TRANSFORMS, fits=fits)
