"""Compiles kernels with numba, which is imported when the first kernel is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from numba.core.types import Type

__all__ = ["BreakEven", "compiled_copies", "is_compiled", "jit"]

NumbaLoop = TypeVar("NumbaLoop", bound=Callable[..., object])


def jit(*signature: str, inline: bool = False) -> Callable[[NumbaLoop], NumbaLoop]:
    """Decorator: numba's njit, cached on disk if a folder is writable.

    signature: the signature of the kernel, if it is called with only one. It is then compiled at once.
    inline: whether the kernel is copied into the kernels that call it.

    >>> jit()(lambda x: x + 1)(1)
    2
    """

    import numba

    how = {"nogil": True, "inline": "always" if inline else "never"}

    def compiled(kernel: NumbaLoop) -> NumbaLoop:
        try:
            made: NumbaLoop = numba.njit(*signature, cache=True, **how)(kernel)  # type: ignore
        except (
            RuntimeError
        ):  # "cannot cache function": pase is installed read-only and there is no home directory
            made = numba.njit(*signature, **how)(kernel)  # type: ignore
        return _for_any_number(made)

    return compiled


def compiled_copies(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Compiled copies of a module's functions, by name; they call one another. The module keeps its own, which run
    without numba.

    numba's cache notices a change of this module's file only, so the functions call no others.
    """
    names = dict(vars(module))
    own = {k: f for k, f in names.items() if isinstance(f, FunctionType) and f.__module__ == module.__name__}
    copies = {k: jit()(FunctionType(f.__code__, names, k)) for k, f in own.items()}
    names |= copies
    return {**copies}


def _for_any_number(made: NumbaLoop) -> NumbaLoop:
    """Make a kernel compile once for all literal numbers that other kernels pass to it.

    By default, numba compiles a function again for each literal number in a call (``clear(w, 4)``, ``clear(w, 5)``),
    which doubles the number of compiled functions.
    """
    from numba import types

    typed = getattr(made, "get_call_template", None)
    if typed is None:  # NUMBA_DISABLE_JIT
        return made

    def get_call_template(args: Sequence[Type], named: Mapping[str, Type]) -> tuple[object, ...]:
        general = {name: types.unliteral(t) for name, t in named.items()}
        found: tuple[object, ...] = typed(tuple(map(types.unliteral, args)), general)
        return found

    made.get_call_template = get_call_template  # type: ignore[attr-defined]
    return made


def is_compiled(kernel: Callable[..., object]) -> bool:
    """Whether a kernel of ``jit`` is already compiled, in this process or in numba's cache.

    True if numba is disabled.

    >>> is_compiled(jit()(lambda x: x + 1))
    False
    """
    source = getattr(kernel, "py_func", None)  # an attribute of numba's dispatcher
    if source is None or bool(getattr(kernel, "signatures", False)):
        return True
    code, folder = source.__code__, getattr(kernel, "stats").cache_path  # noqa: B009 - numba has no types
    index = f"{Path(code.co_filename).stem}.{source.__qualname__}-{code.co_firstlineno}.*.nbi"
    file = Path(code.co_filename)
    if folder is None or not file.exists():  # written in a session: numba has nothing to name its cache by
        return False
    written = file.stat().st_mtime  # numba compiles again what was changed since
    return any(p.stat().st_mtime >= written for p in Path(folder).glob(index))


@dataclass(kw_only=True)
class BreakEven:
    """Decides in a process when a compiled kernel replaces Python, which gives the same bits.

    It does once Python has worked for as long as it takes to get the kernel, which costs at most twice the least time
    (as with skis, which are rented until buying them would have cost as much).

    load_s: seconds to import numba and to load the kernel from numba's cache. compile_s: seconds to compile it, if
    that takes longer. cached: whether numba's cache has it; asked only once loading would pay, because it imports
    numba.

    >>> loop = BreakEven(load_s=1.0)
    >>> loop.pays(0.6), loop.pays(0.3), loop.pays(0.2), loop.pays(0.0)
    (False, False, True, True)
    """

    load_s: float
    compile_s: float = 0.0
    cached: Callable[[], bool] = bool
    worked_s: float = 0.0
    reached: bool = False

    def pays(self, seconds: float, soon: float = 0.0) -> bool:
        """Whether to take the kernel for a task. If not, Python's time for it is counted.

        seconds: about how long Python takes. soon: the same for tasks that are expected to follow.
        """
        total = self.worked_s + seconds + soon
        if not self.reached and total >= self.load_s:
            self.reached = total >= self.compile_s or self.cached()
        self.worked_s += 0.0 if self.reached else seconds
        return self.reached
