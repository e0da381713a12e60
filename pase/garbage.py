"""Making many objects that are all kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["seldom_collected", "uncollected"]

_YOUNG = 100_000
"""Objects made between two looks at the youngest; Python's own number is 700."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """With the garbage collector at work a hundred times less often: for work that makes many objects, keeps most of
    them, and leaves some garbage, too. jax has a callback of its own at every collection."""
    before = gc.get_threshold()
    if 0 < before[0] < _YOUNG:
        gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector: nothing made here is garbage yet, and looking at all of it, and at all that jax
    holds, time and again takes a quarter of the time of tables and twice that of lowering
    (bench/search/onnx_size.py)."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
