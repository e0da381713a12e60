"""Places, scopes and source lines are read back from their text."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.ir import Place, PlacePart, Scope, ScopeKind, SourceLine

paths = st.from_regex(r"[0-9a-z./_]{1,8}", fullmatch=True)
parts = st.sampled_from([p for p in get_args(PlacePart) if p != "out"])
few = st.lists(st.integers(0, 30), max_size=2).map(tuple)
places = (
    st.builds(Place, paths)
    | st.builds(Place, paths, parts, few)
    | st.builds(Place, paths, st.just("out"), st.tuples(st.integers(0, 9), st.integers(0, 9)))
)


@given(places)
def test_places_are_read_back(place: Place) -> None:
    assert Place.parse(str(place)) == place


@given(st.builds(Scope, st.sampled_from(get_args(ScopeKind)), paths))
def test_scopes_are_read_back(scope: Scope) -> None:
    assert Scope.parse(str(scope)) == scope


@pytest.mark.parametrize("text", ["", "turn3", "loops", "3."])
def test_what_is_no_scope_is_refused(text: str) -> None:
    with pytest.raises(PaseError, match="is not a scope"):
        Scope.parse(text)


def test_a_scope_encloses_the_lists_of_equations_inside_it() -> None:
    outer, inner = Scope("loop", "3."), Scope("remat", "3.1.")
    assert outer.encloses("3.") and outer.encloses("3.1.") and inner.encloses("3.1.")
    assert not inner.encloses("3.") and not outer.encloses("30.")


def test_number_in_a_list_is_that_of_the_equation_around() -> None:
    at = Place("3.14.2")
    assert [at.number_in(prefix) for prefix in ("", "3.", "3.14.", "4.")] == [3, 14, 2, None]
    assert Place("layer.relu").number_in("") is None


def test_files_are_named_from_the_folder_that_they_are_imported_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The nearest such folder counts."""
    inner = tmp_path / "work"
    monkeypatch.syspath_prepend(str(tmp_path))
    line = SourceLine(f"{inner}/net.py:7", "loss")
    assert line.from_root() == SourceLine("work/net.py:7", "loss")
    monkeypatch.syspath_prepend(str(inner))
    assert line.from_root() == SourceLine("net.py:7", "loss")
    assert SourceLine("net.py:7").from_root() == SourceLine("net.py:7")
