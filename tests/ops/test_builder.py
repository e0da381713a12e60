"""A graph under construction: nests get the position at which they are added."""

from __future__ import annotations

import pytest

from pase.errors import PaseError
from pase.ir import Scope, Tensor, functions, verify
from pase.ops import GraphBuilder, builder, nests


def add(b: GraphBuilder, x: Tensor) -> Tensor:
    return nests.elementwise(b, functions.EXP, [x], ["float32"])[0]


def start() -> tuple[GraphBuilder, Tensor]:
    b = GraphBuilder("g")
    return b, b.parameter("w", (4,), "float32")


def test_regions_multiply_trip_counts_and_chances() -> None:
    b, w = start()
    with (
        b.region("loop", "0.", times=3),
        b.region("branch", "0.1.", chance=0.5),
        b.region("loop", "0.1.2.", times=4),
    ):
        inner = add(b, w)
    outer = add(b, inner)
    op, after = (b.nodes[k].ops[0] for k in (-2, -1))
    assert op.times == 12 and op.chance == 0.5
    assert op.scope == (Scope("loop", "0."), Scope("branch", "0.1."), Scope("loop", "0.1.2."))
    assert (after.times, after.chance, after.scope) == (1, 1.0, ()) and outer.needs_grad


def test_what_is_saved_does_not_run_again() -> None:
    b, w = start()
    with b.region("remat", "0.", remat=True):
        b.saved = True
        saved = add(b, w)
        b.saved = False
        add(b, saved)
    assert [n.ops[0].remat for n in b.nodes[1:]] == [False, True]


def test_a_value_that_is_made_later_gets_its_first_position() -> None:
    b, w = start()
    with b.region("loop", "0.", times=3):
        at = b.here()
    with b.standing(at):
        add(b, w)
    add(b, w)
    assert [n.ops[0].times for n in b.nodes[1:]] == [3, 1]


def test_a_branchs_chance_may_be_set_after_it_was_lowered() -> None:
    b, w = start()
    first, scope = len(b.nodes), Scope("branch", "0.")
    with b.region("branch", "0."):
        add(b, w)
    add(b, w)
    b.weigh(first, scope, 0.25)
    assert [n.ops[0].chance for n in b.nodes[1:]] == [0.25, 1.0]


def test_gradients_pass_only_what_is_trained_and_floating() -> None:
    b, w = start()
    x, tokens = b.input("x", (4,), "float32"), b.parameter("tokens", (4,), "int32")
    assert w.needs_grad and not x.needs_grad and not tokens.needs_grad
    assert add(b, w).needs_grad and not add(b, x).needs_grad
    assert not nests.elementwise(b, functions.CAST, [w], ["int32"])[0].needs_grad
    with b.without_gradient():
        assert not add(b, w).needs_grad


def test_ops_of_a_rules_backward_are_marked_and_not_recomputed() -> None:
    b, w = start()
    with b.region("remat", "0.", remat=True), b.in_backward():
        add(b, w)
    assert b.nodes[-1].ops[0].backward and not b.nodes[-1].ops[0].remat


def test_a_carry_enters_and_leaves_in_one_layout() -> None:
    """The initial value and the body's result are read by one node, with the same map."""
    b, w = start()
    carried = b.carry(w, b.eqn)
    with b.region("loop", "0.", times=3):
        b.close_carry(carried, add(b, carried))
    (node,) = (n for n in b.nodes if n.kind == "carry")
    enters, back = node.ops
    assert enters.reads[0].map == back.reads[0].map and not back.writes and back.times == 3
    verify(b.finish())


def test_a_leaf_is_threaded_unless_it_keeps_its_value() -> None:
    b, w = start()
    b.thread(w, w)
    assert len(b.nodes[0].ops) == 1
    b.thread(w, add(b, w))
    assert [op.kind for op in b.nodes[0].ops] == ["parameter", "carry"]
    assert not b.nodes[0].ops[1].differentiable


def test_a_remark_is_made_once() -> None:
    b, _ = start()
    for _ in range(2):
        b.remark_unknown("mystery")
    (remark,) = b.finish().remarks
    assert "no rule for 'mystery'" in remark.what


def test_too_many_ops_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_MAX_NODES", 3)
    b, w = start()
    with pytest.raises(PaseError, match="more than 3 ops") as e:
        for _ in range(3):
            w = add(b, w)
    assert "scan" in e.value.fix


def test_a_parameter_and_an_input_of_one_name_are_refused() -> None:
    b, _ = start()
    b.input("w", (4,), "float32")
    with pytest.raises(PaseError, match="both called 'w'"):
        b.finish()
