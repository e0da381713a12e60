"""What a loop's body reads and makes."""

from __future__ import annotations

from pase.ir import Scope, functions
from pase.ops import GraphBuilder, nests
from pase.ops.loops import body_flops, loop_copy, stack, unstack


def test_a_slice_and_a_stack_touch_one_iterations_elements() -> None:
    """The stacking dim may not be split."""
    b = GraphBuilder("g")
    x = b.parameter("w", (5, 4, 6), "float32")
    piece = unstack(b, x)
    node = b.nodes[-1]
    assert piece.shape == (4, 6) and node.ops[0].worked == ("d1", "d2") and node.ops[0].reads[0].sparse
    assert {d.name: d.kind for d in node.space}["d0"] == "replicated"
    whole = stack(b, piece, 5, (5, 4, 6))
    node = b.nodes[-1]
    assert whole.shape == (5, 4, 6) and node.ops[0].worked == ("d0", "d1") and node.ops[0].writes[0].sparse
    assert str(node.ops[0].writes[0].map) == "l d0 d1"


def test_a_loop_of_one_iteration_has_no_stacking_dim() -> None:
    b = GraphBuilder("g")
    stack(b, b.input("x", (4,), "float32"), 1, (1, 4))
    assert str(b.nodes[-1].ops[0].writes[0].map) == "1 d0"


def test_flops_of_a_body_count_trips_and_chances() -> None:
    b = GraphBuilder("g")
    x, w = b.input("x", (4, 8), "float32"), b.parameter("w", (8, 8), "float32")
    loop_copy(b, w, "loop_constant")  # it moves data, but computes nothing
    with b.region("loop", "0.", times=3):
        nests.contract(b, x, w, ([1], [0]))
        with b.region("branch", "0.1.", chance=0.5):
            nests.elementwise(b, functions.EXP, [x], ["float32"])
    product, branch = 3 * 2 * 4 * 8 * 8, 3 * 0.5 * 10 * 4 * 8
    assert body_flops(b) == product + branch
    assert body_flops(b, scope=Scope("branch", "0.1.")) == branch
    assert body_flops(b, first=len(b.nodes) - 1) == branch
