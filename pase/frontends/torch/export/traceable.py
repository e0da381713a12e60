"""What PyTorch's export leaves out of a graph, or refuses to trace, made such that the graph shows it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pase.frontends.torch.derivatives import derivatives_traced
from pase.frontends.torch.reasons import lines_kept
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CHECKPOINTED", "traceable"]

CHECKPOINTED = "pase_again"
"""Mark of what ran under ``torch.utils.checkpoint``: which call of it."""


@contextlib.contextmanager
def traceable(step_file: str) -> Iterator[None]:
    """The ways to write a step that the exported graph would not show are made such as it does: regions without a
    gradient, and calls of ``torch.utils.checkpoint``, whose nodes are marked. step_file: see ``lines_kept``."""
    import torch.fx.traceback as traceback

    with contextlib.ExitStack() as stack:
        for change in (
            traceback.preserve_node_meta(),
            lines_kept(step_file),
            _checkpoints_marked(),
            _flex_traced(),
            _inference_traced(),
            _distributions_unchecked(),
            derivatives_traced(),
        ):
            stack.enter_context(change)
        yield


@contextlib.contextmanager
def _inference_traced() -> Iterator[None]:
    """``torch.inference_mode`` and ``tensor.data`` leave no trace in an exported graph; switching gradients off and
    ``detach``, which they do too, leave one."""
    import torch

    mode = torch.inference_mode
    data = torch.Tensor.data
    enter, leave = mode.__enter__, mode.__exit__

    def entered(self: Any) -> None:
        self._pase_before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(not self.mode)

    def left(self: Any, *error: object) -> None:
        torch._C._set_grad_enabled(self._pase_before)

    def of_data(self: Tensor) -> Tensor:
        return self.detach()

    mode.__enter__, mode.__exit__ = entered, left  # type: ignore[method-assign, assignment]
    torch.Tensor.data = property(of_data, data.__set__)  # type: ignore[assignment, attr-defined]
    try:
        yield
    finally:
        del torch.Tensor.data  # it is its parent's again
        mode.__enter__, mode.__exit__ = enter, leave  # type: ignore[method-assign]


@contextlib.contextmanager
def _distributions_unchecked() -> Iterator[None]:
    """``torch.distributions`` looks at the values of its parameters, which do not exist in a trace. The numbers of a
    step do not depend on that check; one that the user asks for (``validate_args=True``) is still refused."""
    from torch.distributions import Distribution

    usual = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(usual)


@contextlib.contextmanager
def _checkpoints_marked() -> Iterator[None]:
    """``torch.utils.checkpoint`` runs its function plainly, under a mark. What it calls is replaced: programs hold the
    function itself under names of their own."""
    import torch
    import torch.fx.traceback as traceback
    import torch.utils.checkpoint as checkpoint

    calls = itertools.count(1)

    def around(function: Callable[..., Tree], *_: object, **__: object) -> Iterator[None]:
        with traceback.annotate({CHECKPOINTED: next(calls)}):
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Tree], preserve: bool, *args: Tree) -> Tree:
            # Its backward starts at its operands: if none has a gradient, its result has none.
            watched = any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
            with (
                traceback.annotate({CHECKPOINTED: next(calls)}),
                contextlib.nullcontext() if watched else torch.no_grad(),
            ):
                return function(*args)

    held = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction
    checkpoint._checkpoint_without_reentrant_generator = around  # type: ignore[assignment]
    checkpoint.CheckpointFunction = Reentrant  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction = held  # type: ignore[misc]


@contextlib.contextmanager
def _flex_traced() -> Iterator[None]:
    """PyTorch refuses to run flex_attention's backward on a CPU, where the fake tensors are: here none runs."""
    from torch.nn.attention import flex_attention as flex

    usual = flex._validate_device
    flex._validate_device = lambda query, key, value: None
    try:
        yield
    finally:
        flex._validate_device = usual
