"""A GraphDef as plain data: only what the outputs need, with every reference as NODE:NUMBER."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

from pase.errors import PaseError
from pase.frontends.tf.graph_def import graph_of
from tests.frontends.tf.graphs import graph

CHAIN = [
    ("y", "MatMul", ["x", "w:0", "^unread"], {}),
    ("z", "Split", ["axis", "y"], {}),
    ("axis", "Range", ["w"], {}),
    ("unread", "Exp", ["x"], {}),
    ("o", "Neg", ["z:1"], {}),
]


def test_only_what_the_outputs_need_is_kept_in_an_order_that_can_be_run() -> None:
    made = graph_of(graph(*CHAIN), ["o"])
    names = [n.name for n in made.main.nodes]
    assert set(names) == {"x", "w", "y", "axis", "z", "o"}
    inputs = {n.name: n.inputs for n in made.main.nodes}
    assert inputs["y"] == ("x:0", "w:0") and inputs["o"] == ("z:1",)
    for name, refs in inputs.items():
        assert all(names.index(r.partition(":")[0]) < names.index(name) for r in refs)
    assert made.main.outputs == ("o:0",)


def test_what_feeds_an_argument_is_left_out() -> None:
    made = graph_of(graph(*CHAIN), ["o", "z:0"], ["y:0"])
    assert {n.name for n in made.main.nodes} == {"w", "axis", "z", "o"}
    assert made.main.args == ("y:0",) and made.main.outputs == ("o:0", "z:0")


@pytest.mark.parametrize("ref", ["y:one", "y:-1", "y:12345678"])
def test_a_reference_that_is_no_number_is_refused(ref: str) -> None:
    with pytest.raises(PaseError, match="NODE or NODE:NUMBER"):
        graph_of(graph(("y", "Exp", ["x"], {})), [ref])
