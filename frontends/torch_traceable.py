"""What PyTorch's export leaves out of a graph, or refuses to trace, made such that the graph shows it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pase.frontends.torch_derivatives import derivatives_traced
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["AGAIN", "traceable"]

AGAIN = "pase_again"
"""Mark of what ran under ``torch.utils.checkpoint``: which call of it."""


@contextlib.contextmanager
def traceable(module: Module) -> Iterator[None]:
    """The ways to write a step that the exported graph would not show are made such as it does: regions without a
    gradient, and calls of ``torch.utils.checkpoint``, whose nodes are marked."""
    import torch.fx.traceback as traceback

    with contextlib.ExitStack() as stack:
        for change in (
            traceback.preserve_node_meta(),
            _checkpoints_marked(module),
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


_CHECKPOINT_OPTIONS = frozenset(
    {"use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"}
)


@contextlib.contextmanager
def _checkpoints_marked(module: Module) -> Iterator[None]:
    """``torch.utils.checkpoint`` runs its function plainly, under a mark; transformers holds the function under a name
    of its own in each layer."""
    import torch.fx.traceback as traceback
    import torch.utils.checkpoint

    calls = itertools.count(1)

    def plainly(function: Callable[..., Tree], *args: Tree, **kwargs: Tree) -> Tree:
        own = {k: v for k, v in kwargs.items() if k not in _CHECKPOINT_OPTIONS}
        with traceback.annotate({AGAIN: next(calls)}):
            return function(*args, **own)

    name = "_gradient_checkpointing_func"
    holders = [(m.__dict__, name, m.__dict__[name]) for m in module.modules() if name in m.__dict__]
    usual = torch.utils.checkpoint.checkpoint
    torch.utils.checkpoint.checkpoint = plainly
    for held, key, _ in holders:
        held[key] = plainly
    try:
        yield
    finally:
        torch.utils.checkpoint.checkpoint = usual
        for held, key, before in holders:
            held[key] = before


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
