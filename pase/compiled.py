"""Kernels compiled by numba, which is imported when the first one is compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["is_compiled", "jit"]

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


def is_compiled(kernel: Callable[..., object]) -> bool:
    """Whether a kernel of ``jit`` was called in this process, or lies in numba's cache; True where numba is told not to
    compile.

    >>> is_compiled(jit()(lambda x: x + 1))
    False
    """
    source = getattr(kernel, "py_func", None)  # numba's dispatcher has it
    if source is None or bool(getattr(kernel, "signatures", False)):
        return True
    code, folder = source.__code__, getattr(kernel, "stats").cache_path  # noqa: B009 - numba has no types
    index = f"{Path(code.co_filename).stem}.{code.co_qualname}-{code.co_firstlineno}.*.nbi"
    return folder is not None and any(Path(folder).glob(index))
