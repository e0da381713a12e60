"""Values that are computed when they are first used."""

import copy
import pickle

import pytest

from pase.later import Later, Once


def test_it_is_made_once_and_is_a_dict_elsewhere() -> None:
    calls: list[int] = []

    def make() -> dict[str, int]:
        calls.append(1)
        return {"b": 2, "a": 1}

    later = Later(make)
    assert not calls
    assert list(later.items()) == [("b", 2), ("a", 1)] and later == {"a": 1, "b": 2} and len(later) == 2
    assert repr(later) == "{'b': 2, 'a': 1}"
    for copied in (copy.copy(later), copy.deepcopy(later), pickle.loads(pickle.dumps(later))):
        assert type(copied) is dict and list(copied) == ["b", "a"]
    assert calls == [1]


def test_what_was_interrupted_is_tried_again() -> None:
    tries: list[int] = []

    def make() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise KeyboardInterrupt
        return 3

    once = Once(make)
    with pytest.raises(KeyboardInterrupt):
        once()
    assert once() == once() == 3 and len(tries) == 2
