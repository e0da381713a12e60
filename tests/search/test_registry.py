"""Every registered search, against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from pase.search import (
    brute_force,
)
from pase.search.registry import SEARCHES, SearchOptions
from tests.search.answers import answer
from tests.search.random_instances import random_tables


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_is_brute_force(name: str) -> None:
    for seed in range(500 if name == "paper" else 100):
        tables = random_tables(np.random.default_rng(seed))
        found = answer(lambda t: SEARCHES[name].run(t, None, SearchOptions(time_limit=600.0)), tables)
        assert found == answer(brute_force, tables), seed
