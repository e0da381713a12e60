"""A file is read and solved, and its choice is compared with the best one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pase.errors import Infeasible
from pase.search import solve, verify
from pase.search.instances.readers import read_instance


def compare(path: Path, want: float, exact: bool = True) -> None:
    tables, memory = read_instance(path)
    if not np.isfinite(want):
        with pytest.raises(Infeasible):
            solve(tables, memory)
        return
    found = solve(tables, memory)
    cost = verify(tables, found, memory)
    assert found.optimal and (cost == want if exact else cost == pytest.approx(want, rel=1e-12, abs=1e-12))
