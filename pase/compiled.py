"""Kernels compiled by numba, which is imported when the first one is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["jit"]

NumbaLoop = TypeVar("NumbaLoop", bound=Callable[..., object])


def jit(*signature: str) -> Callable[[NumbaLoop], NumbaLoop]:
    """Decorator: njit, cached on disk where a folder is writable. signature: of the one type that it is called with.

    >>> jit()(lambda x: x + 1)(1)
    2
    """

    import numba

    def compiled(kernel: NumbaLoop) -> NumbaLoop:
        try:
            return numba.njit(*signature, cache=True, nogil=True)(kernel)  # type: ignore
        except RuntimeError:  # "cannot cache function": a read-only install without a home
            return numba.njit(*signature, nogil=True)(kernel)  # type: ignore

    return compiled
