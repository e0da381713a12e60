"""Cost tables refuse graphs that no search takes."""

from __future__ import annotations

import numpy as np
import pytest

from pase.tables.types import CostTables, EdgeTable


def test_self_loop_is_refused() -> None:
    cls = np.zeros(1, np.int32)
    edge = EdgeTable(src=0, dst=0, cost=np.zeros((1, 1)), src_class=cls, dst_class=cls)
    with pytest.raises(ValueError, match="itself"):
        CostTables(node_costs=(np.zeros(1),), edges=(edge,))
