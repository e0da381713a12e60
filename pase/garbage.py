"""Controls Python's garbage collector for work that makes many objects and keeps them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["seldom_collected", "uncollected"]

_YOUNG = 100_000
"""Number of new objects between two collections of the youngest generation. Python's default is 700."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """A context in which the garbage collector runs about a hundred times less often.

    It is for work that makes many objects and keeps most of them, but also leaves some garbage. Collections are
    expensive because jax adds a callback to each.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _YOUNG:
        gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def uncollected() -> Iterator[None]:
    """A context without the garbage collector, for work that makes no garbage.

    Repeated scans of its objects, and of all objects that jax holds, would take a quarter of the time of making tables
    and twice the time of lowering (bench/search/onnx_size.py).
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
