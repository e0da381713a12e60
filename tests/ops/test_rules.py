"""A user's derivative rule in the graph: gradients enter and leave in the layout of their values."""

from __future__ import annotations

from pase.ir import functions, verify
from pase.ops import GraphBuilder, nests
from pase.ops.rules import cotangent, hand_back


def test_a_gradient_enters_a_rule_and_is_handed_back() -> None:
    b = GraphBuilder("g")
    w = b.parameter("w", (4, 6), "float32")
    with b.without_gradient():
        (value,) = nests.elementwise(b, functions.EXP, [w], ["float32"])
    out, gradient = cotangent(b, value)
    assert out.needs_grad and not value.needs_grad and not gradient.needs_grad
    with b.in_backward():
        with b.without_gradient():
            (made,) = nests.elementwise(b, functions.MUL, [gradient, value], ["float32"])
        hand_back(b, w, made)
    graph = verify(b.finish([out]))
    enters, last = (next(n for n in graph.nodes if n.kind == kind) for kind in ("cotangent", "gradient"))
    assert [a.map for a in enters.ops[0].writes] == [enters.ops[0].reads[0].map] * 2
    assert [(a.tensor, a.gradient) for a in last.ops[0].reads] == [(made.name, False), (w.name, True)]
    assert last.ops[0].backward and not last.ops[0].writes
