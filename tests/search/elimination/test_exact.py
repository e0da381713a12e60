"""Exact search by elimination: names that are refused, and the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pase.search import (
    find_best_strategy,
    solve,
)
from pase.tables.types import CostTables


def test_orders_and_kernels_of_other_names_are_refused() -> None:
    tables = CostTables(node_costs=(np.zeros(2),), edges=())
    with pytest.raises(ValueError, match="order"):
        find_best_strategy(tables, (0, 0))
    with pytest.raises(ValueError, match="'fortran'"):
        solve(tables, kernel="fortran")  # type: ignore[arg-type]


def test_the_documentation_runs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "explanation" / "search.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["found"].cost == 3.0 and names["found"].optimal
    assert names["found"].choice.tolist() == [1, 1]
