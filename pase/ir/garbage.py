"""Making many objects that are all kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector: nothing made here is garbage yet, and looking at all of it, and at all that jax
    holds, time and again takes a quarter of the time of tables and twice that of lowering (bench/onnx_size.py)."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
