"""The compiled event loop of `engine`.

Importing this module imports numba, so import it inside functions only. Kernels are at module level, because numba's
cache cannot find functions that close over another function.
"""

from __future__ import annotations

import numba

from pase.schedule.engine_loop import loop as _python

__all__ = ["loop"]


loop = numba.njit(cache=True)(_python)
