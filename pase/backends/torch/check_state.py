"""The module that a check of gradients runs on one rank, and the restoration of its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.rules import random_state
from pase.errors import PaseError
from pase.pytree import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module, Parameter

    from pase.backends.torch.parallel import ParallelModule

__all__ = ["CheckedModule", "HeldState", "gradient_of", "local_of"]


@dataclass(frozen=True, kw_only=True)
class CheckedModule:
    """A parallel module as the check runs it.

    backward: (*batch) -> the detached loss. It adds gradients to the parameters' ``grad``.
    module: the module with the sharded parameters.
    parts: the objects that store this rank's parameters: the module's step, or its stages.
    names: the paths of the trained parameters, the same on every rank.
    mine: index in ``names`` -> the parameter, for parameters of which this rank has a part.
    """

    backward: Callable[..., Tensor]
    module: Module
    parts: tuple[ParallelModule, ...]
    batch: tuple[Tree, ...]
    names: tuple[str, ...]
    mine: Mapping[int, Parameter]

    @property
    def device(self) -> torch.device:
        return self.parts[0].device


def local_of(x: Tensor) -> Tensor:
    """This rank's part of a tensor. It shares the DTensor's memory."""
    return x.to_local() if hasattr(x, "to_local") else x


@dataclass(kw_only=True)
class HeldState:
    """The parameters, gradients, buffers, step counts and random state at the time when this object is created."""

    run: CheckedModule
    parameters: list[tuple[Tensor, Tensor]] = field(init=False)
    """(this rank's part of a parameter, a copy of its values)."""
    buffers: list[tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        import torch

        with torch.no_grad():
            self.parameters = [(x, x.clone()) for x in map(local_of, self.run.mine.values())]
            written = [local_of(p.buffer(path)) for p in self.run.parts for path in p.buffers.written]
            self.buffers = [(x, x.clone()) for x in written]
        self._steps = [p.steps for p in self.run.parts]
        self._gradients = [p.grad for p in self._all]
        self._random = random_state(self.run.device)

    @cached_property
    def _all(self) -> list[Parameter]:
        return list(self.run.module.parameters())

    def before_step(self) -> None:
        """Restore everything except parameters, and clear the gradients."""
        self._back(self.buffers)
        for part, steps in zip(self.run.parts, self._steps, strict=True):
            part.steps = steps
        for p in self._all:
            p.grad = None
        self._random()

    def put_back(self) -> None:
        """Restore everything."""
        self.before_step()
        self._back(self.parameters)
        for p, gradient in zip(self._all, self._gradients, strict=True):
            p.grad = gradient

    @staticmethod
    def _back(pairs: list[tuple[Tensor, Tensor]]) -> None:
        import torch

        with torch.no_grad():
            for x, was in pairs:
                x.copy_(was)


def gradient_of(p: Parameter) -> Tensor:
    """This rank's part of a parameter's gradient, in the parameter's layout; zeros if it has none."""
    import torch

    if p.grad is None:
        return torch.zeros_like(local_of(p).detach())
    if getattr(p.grad, "placements", None) != getattr(p, "placements", None):
        raise PaseError(
            "a gradient has another layout than its parameter",
            where="check",
            fix="report this as a bug in pase.backends",
        )
    return local_of(p.grad).detach()
