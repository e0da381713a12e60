"""Keys are numbered the same by sorting and by the compiled hash table."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.tables.distinct import hashed, in_order


@given(st.lists(st.integers(0, (1 << 62) - 1) | st.integers(0, 5), max_size=40))
@settings(max_examples=200, deadline=None)
def test_the_hash_table_finds_the_same_keys_equal(keys: list[int]) -> None:
    array = np.array(keys, np.int64)
    for number in (hashed, in_order):
        first, index = number(array)
        assert array[first][index].tolist() == keys
        assert sorted(array[first].tolist()) == sorted(set(keys))
        assert all(keys.index(keys[i]) == i for i in first.tolist())
