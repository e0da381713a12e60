"""The branches of a conditional: their chances, and where their results meet."""

from __future__ import annotations

import pytest

from pase.errors import PaseError
from pase.ir import verify
from pase.ops import GraphBuilder
from pase.ops.branches import SELDOM, chances, leave, meet, told


def test_the_first_of_the_most_expensive_branches_is_taken() -> None:
    assert chances([1.0, 3.0, 3.0]) == (SELDOM, 1.0, SELDOM)
    assert chances([0.0]) == (1.0,)


@pytest.mark.parametrize("given", [(0.5,), (0.5, 0.6), (1.5, -0.5), ()])
def test_chances_that_are_none_are_refused(given: tuple[float, ...]) -> None:
    with pytest.raises(PaseError, match="chances") as e:
        told("cond0", given, 2)
    assert e.value.where == "conditional 'cond0'" and "2 numbers" in e.value.fix


def test_a_branch_is_never_free() -> None:
    """The search must still choose a layout for it."""
    assert told("cond0", (1, 0), 2) == (1.0, SELDOM)


def test_results_meet_without_moving_data() -> None:
    b = GraphBuilder("g")
    index = b.input("index", (), "int32")
    made = [leave(b, b.input(f"x{i}", (4, 6), "float32")) for i in range(2)]
    out = meet(b, index, made)
    (op,) = verify(b.finish([out])).nodes[-1].ops
    assert out.shape == (4, 6) and op.worked == () and op.writes[0].sparse
    assert [a.sparse for a in op.reads] == [True, True, False]
