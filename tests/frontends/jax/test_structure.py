"""Errors about pytrees name the leaves that are missing or too many, not the whole structure."""

from __future__ import annotations

import jax
import pytest

from pase.errors import PaseError
from pase.frontends.jax.structure import check_arguments, check_structure
from pase.pytree import Tree

WANTED = {"x": 0, "y": [0, 0]}


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"x": 0}, "it lacks 'y.0', 'y.1'"),
        ({"x": 0, "y": [0, 0], "z": 0}, "it has 'z', which the plan was not compiled for"),
        ({"X": 0, "y": [0, 0]}, "it lacks 'x'; it has 'X', which the plan was not compiled for"),
        ({"x": 0, "y": (0, 0)}, "it is PyTreeDef({'x': *, 'y': (*, *)}), but"),
        (0, "it is PyTreeDef(*), but"),
    ],
)
def test_the_leaves_that_differ_are_named(given: Tree, what: str) -> None:
    form = jax.tree.structure
    with pytest.raises(PaseError) as e:
        check_structure(form(given), form(WANTED), where="argument 2 of the step", fix="do this")
    assert e.value.what.startswith(what) and (e.value.where, e.value.fix) == (
        "argument 2 of the step",
        "do this",
    )
    check_structure(form(WANTED), form(WANTED), where="", fix="")


def test_arguments_are_counted_and_named() -> None:
    form = jax.tree.structure
    params, wanted = {f"w{i}": 0 for i in range(9)}, form(({}, WANTED))
    with pytest.raises(PaseError, match="there are 1 arguments, but the plan was compiled for 2"):
        check_arguments(form(({},)), wanted)
    check_arguments(form(({},)), wanted, first=True)
    with pytest.raises(PaseError) as e:
        check_arguments(form((params, WANTED)), wanted)
    assert e.value.where == "argument 0 (params)" and "'w3' and 5 more" in e.value.what
    with pytest.raises(PaseError) as e:
        check_arguments(form(({}, {"x": 0})), wanted)
    assert e.value.where == "argument 1 (of the batch)" and e.value.what == "it lacks 'y.0', 'y.1'"
