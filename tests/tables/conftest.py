"""A graph with repeated layers, traced once for all tests of tables."""

from __future__ import annotations

import pytest

from pase.ir import Graph
from tests.tables.graphs import graph


@pytest.fixture(scope="session")
def unrolled() -> Graph:
    return graph("gpt2?scan=0&layers=6")
