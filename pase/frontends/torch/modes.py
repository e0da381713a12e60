"""PyTorch's dispatch modes (fake tensors, traces), entered by one thread at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["DISPATCH_MODES", "no_stale_mode"]

DISPATCH_MODES = threading.RLock()
"""Held wherever a dispatch mode is entered.

PyTorch keeps in a global variable whether any mode is on, and each mode puts back what it found. If one thread enters a
mode, a second thread another, and the first leaves before the second, the variable stays on for good. Then PyTorch
no longer compiles the bodies of ``cond``, ``scan`` and ``map`` in this process, and cannot export them.
"""


@contextlib.contextmanager
def no_stale_mode() -> Iterator[None]:
    """With the lock; the variable is turned off first if no mode is on, because threads may have left it on."""
    import torch
    from torch.utils import _python_dispatch as state

    with DISPATCH_MODES:
        if not torch._C._len_torch_dispatch_stack():
            for name in [n for n, x in vars(state).items() if n.startswith("_is_in_") and x is True]:
                setattr(state, name, False)
        yield
