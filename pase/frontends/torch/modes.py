"""PyTorch's dispatch modes (fake tensors, traces), entered by one thread at a time."""

from __future__ import annotations

import threading

__all__ = ["DISPATCH_MODES"]

DISPATCH_MODES = threading.RLock()
"""Held wherever a dispatch mode is entered.

PyTorch keeps in a global variable whether any mode is on, and each mode puts back what it found. If one thread enters a
mode, a second thread another, and the first leaves before the second, the variable stays on for good. Then PyTorch
no longer compiles the bodies of ``cond``, ``scan`` and ``map`` in this process, and cannot export them.
"""
