"""Patches PyTorch so that an exported graph also contains what the export would leave out or refuse to trace."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pase.frontends.torch.derivatives import derivatives_traced
from pase.frontends.torch.export.unchecked import checks_left_out
from pase.frontends.torch.reasons import lines_kept
from pase.frontends.torch.types import FxNode
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CHECKPOINTED", "DATA", "traceable"]

CHECKPOINTED = "pase_again"
"""Mark of the nodes that ran under ``torch.utils.checkpoint``. Its value is the number of the call."""
DATA = "pase_data"
"""Mark of the nodes that are ``tensor.data``."""


@contextlib.contextmanager
def traceable(step_file: str) -> Iterator[None]:
    """Within, ``torch.export`` works with all patches of this file.

    Exported graphs then contain regions without a gradient, calls of ``torch.utils.checkpoint`` (marked), derivative
    rules that the user wrote, and the source lines of nodes. step_file: see ``lines_kept``.
    """
    import torch.fx.traceback as traceback

    with contextlib.ExitStack() as stack:
        for change in (
            traceback.preserve_node_meta(),
            lines_kept(step_file),
            _checkpoints_marked(),
            _flex_traced(),
            _masks_unread(),
            _inference_traced(),
            checks_left_out(),
            _regions_in_autocast_kept(),
            derivatives_traced(),
            _failures_unprinted(),
        ):
            stack.enter_context(change)
        yield


@contextlib.contextmanager
def _failures_unprinted() -> Iterator[None]:
    """Within, a failed export prints nothing. PyTorch prints the graph so far, or the stack of an op that failed, to
    standard error, at each attempt; the error that is raised has the line and the reason."""
    from torch._subclasses import fake_tensor
    from torch.export import _trace
    from torch.fx.experimental import symbolic_shapes

    names, logs = vars(_trace), (symbolic_shapes.log, fake_tensor.log)
    before, names["print"] = [log.level for log in logs], lambda *_, **__: None
    symbolic_shapes.log.setLevel(logging.ERROR)
    fake_tensor.log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        del names["print"]
        for log, level in zip(logs, before, strict=True):
            log.setLevel(level)


@contextlib.contextmanager
def _inference_traced() -> Iterator[None]:
    """Within, ``torch.inference_mode`` disables gradients and ``tensor.data`` is ``detach``.

    The originals leave no trace in an exported graph.
    """
    import torch
    import torch.fx.traceback as traceback

    inference_mode = torch.inference_mode
    original_data = torch.Tensor.data
    enter, leave = inference_mode.__enter__, inference_mode.__exit__

    def enter_traced(self: Any) -> None:
        self._pase_before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(not self.mode)

    def exit_traced(self: Any, *error: object) -> None:
        torch._C._set_grad_enabled(self._pase_before)

    def detached(self: Tensor) -> Tensor:
        with traceback.annotate({DATA: 1}):
            return self.detach()

    inference_mode.__enter__, inference_mode.__exit__ = enter_traced, exit_traced  # type: ignore[method-assign, assignment]
    torch.Tensor.data = property(detached, original_data.__set__)  # type: ignore[assignment, attr-defined]
    try:
        yield
    finally:
        del torch.Tensor.data  # the parent class's attribute becomes visible again
        inference_mode.__enter__, inference_mode.__exit__ = enter, leave  # type: ignore[method-assign]


@contextlib.contextmanager
def _regions_in_autocast_kept() -> Iterator[None]:
    """Within, ``torch.no_grad`` inside of an autocast stays a region of the exported graph.

    PyTorch cuts the graph where gradients are switched on or off, and enters the autocast anew in each part. It then
    takes only a part that begins with the switch for a region, and drops the switch of any other.
    """
    from torch._export.passes import replace_set_grad_with_hop_pass as regions

    original = regions._is_set_grad_enabled_sub_mod

    def sets_grad(node: FxNode, omit_if_same_with_ambient: bool = False) -> bool:
        import torch

        if node.op != "call_module":
            return False
        part: Any = getattr(node.graph.owning_module, str(node.target))
        casts = torch.amp.autocast_mode._enter_autocast
        first = next((n for n in part.graph.nodes if n.op != "placeholder" and n.target is not casts), None)
        if first is None or first.target is not torch._C._set_grad_enabled:
            return False
        return not omit_if_same_with_ambient or first.args[0] != torch.is_grad_enabled()

    regions._is_set_grad_enabled_sub_mod = sets_grad  # type: ignore[assignment]
    try:
        yield
    finally:
        regions._is_set_grad_enabled_sub_mod = original


@contextlib.contextmanager
def _checkpoints_marked() -> Iterator[None]:
    """Within, ``torch.utils.checkpoint`` runs its function directly and marks the nodes.

    The internals of the function are replaced, because programs hold references to ``checkpoint`` itself.
    """
    import torch
    import torch.fx.traceback as traceback
    import torch.utils.checkpoint as checkpoint

    calls = itertools.count(1)

    # The original is a generator that does its work before and after the function's call.
    def marked(function: Callable[..., Tree], *_: object, **__: object) -> Iterator[None]:
        with traceback.annotate({CHECKPOINTED: next(calls)}):
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Tree], preserve: bool, *args: Tree) -> Tree:
            # The original's backward starts at the operands: if none needs a gradient, the result has none.
            needs_grad = any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
            with (
                traceback.annotate({CHECKPOINTED: next(calls)}),
                contextlib.nullcontext() if needs_grad else torch.no_grad(),
            ):
                return function(*args)

    originals = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction
    checkpoint._checkpoint_without_reentrant_generator = marked  # type: ignore[assignment]
    checkpoint.CheckpointFunction = Reentrant  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction = originals  # type: ignore[misc]


@contextlib.contextmanager
def _flex_traced() -> Iterator[None]:
    """Within, flex_attention accepts any device.

    PyTorch refuses its backward on the CPU, where the fake tensors are, but no backward is run here.
    """
    from torch.nn.attention import flex_attention as flex

    original = flex._validate_device
    flex._validate_device = lambda query, key, value: None
    try:
        yield
    finally:
        flex._validate_device = original


@contextlib.contextmanager
def _masks_unread() -> Iterator[None]:
    """Within, ``torch.nn.Transformer``, its encoder and its decoder do not read the values of an attention mask.

    They do so to see whether a mask is causal, if the caller does not say it (``is_causal``), and the values do not
    exist in a trace. The answer is only a hint, so that attention may leave the mask out: a mask that is not called
    causal is applied as it is.
    """
    from torch.nn.modules import transformer

    original = transformer._detect_is_causal_mask

    def stated(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return bool(is_causal)

    transformer._detect_is_causal_mask = stated
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original
