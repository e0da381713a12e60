"""Compiled: the event loop of `engine`.

This file imports numba when it is imported: import it inside functions only. Kernels are at module level, because
numba's cache does not find a function that closes over another one again.
"""

from __future__ import annotations

import numba

from pase.schedule.engine_loop import loop as _python

__all__ = ["loop"]


loop = numba.njit(cache=True)(_python)
