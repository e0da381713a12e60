"""A train step that checks its gradients at its first call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pase.plan.gradient_check import GradientCheck
from pase.pytree import Tree

__all__ = ["CheckedStep"]


@dataclass(kw_only=True)
class CheckedStep:
    """step(params, opt_state, *batch) of ``train_step(optimizer, check=True)``. All else is the step's own.

    check: (params, *batch) -> the check. result: of the first call; None before it.
    """

    step: Tree
    check: Callable[..., GradientCheck]
    result: GradientCheck | None = None

    def __call__(self, params: Tree, opt_state: Tree, *batch: Tree) -> Tree:
        if self.result is None:
            found = self.check(params, *batch)
            found.raise_if_off()
            self.result = found
        return self.step(params, opt_state, *batch)

    def __getattr__(self, name: str) -> Tree:
        return getattr(self.step, name)
