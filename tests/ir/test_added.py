"""What the searched graph has beyond the model's own nodes: copies, states and rings."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest

from pase.errors import PaseError
from pase.ir import Graph, functions, verify
from pase.ir.added import with_copies, with_rings, with_states
from pase.ir.simplify import simplify
from pase.ops import GraphBuilder, nests
from pase.ops.attention import attention


def forked(*, loop: bool = False) -> Graph:
    """h = w + x; h is read by sin and cos, of which the second may be in a loop."""
    b = GraphBuilder("g")
    w, x = b.parameter("w", (4, 8), "float32"), b.input("x", (4, 8), "float32")
    (h,) = nests.elementwise(b, functions.ADD, [w, x], ["float32"])
    nests.elementwise(b, functions.EXP, [h], ["float32"])
    nests.elementwise(b, functions.LOG, [h], ["float32"])
    if loop:
        with b.region("loop", "3.", times=5):
            for name in ("sub", "div"):
                nests.elementwise(b, functions.FUNCTIONS[name], [h, x], ["float32"])
    return b.finish()


def copies(graph: Graph) -> dict[str, set[str]]:
    """Copy -> the names of the ops that read it."""
    made = [n for n in graph.nodes if n.kind == "copy"]
    return {
        n.ops[0].writes[0].tensor: {
            op.name
            for m in graph.nodes
            for op in m.ops
            if n.ops[0].writes[0].tensor in {a.tensor for a in op.reads}
        }
        for n in made
    }


def test_several_readers_share_one_copy() -> None:
    """Its pending dim holds their gradients. Inputs, which are small, are read by everyone themselves."""
    graph = verify(with_copies(forked()))
    assert copies(graph) == {"t3c": {"exp", "log"}}
    (copy,) = (n for n in graph.nodes if n.kind == "copy")
    assert [d.kind for d in copy.space] == ["parallel", "parallel", "pending"]
    assert graph.tensors["t3c"].copy_of == "t3"


def test_readers_in_a_loop_have_a_copy_of_their_own() -> None:
    graph = verify(with_copies(forked(loop=True)))
    assert copies(graph) == {"t3c": {"exp", "log"}, "t3c1": {"sub", "div"}}
    inside = graph.node["copy.t3c1"].ops[0]
    assert inside.times == 5 and [str(s) for s in inside.scope] == ["loop3."]


def read_in_two_forms(*, loop: bool = False) -> Graph:
    """w + x, and (w cast to bfloat16) + y; the cast and its reader may be in a loop."""
    b = GraphBuilder("g")
    w, x, y = (
        b.parameter("w", (4, 8), "float32"),
        b.input("x", (4, 8), "float32"),
        b.input("y", (4, 8), "bfloat16"),
    )
    nests.elementwise(b, functions.ADD, [w, x], ["float32"])
    with b.region("loop", "3.", times=5) if loop else nullcontext():
        (cast,) = nests.elementwise(b, functions.CAST, [w], ["bfloat16"])
        nests.elementwise(b, functions.ADD, [cast, y], ["bfloat16"])
    return simplify(b.finish())


def test_a_parameter_that_is_read_as_it_is_and_cast_has_one_copy() -> None:
    """The copy's node makes the cast, so both gradients arrive there before they are summed over devices."""
    graph = verify(read_in_two_forms())
    (copy,) = (n for n in graph.nodes if n.kind == "copy")
    assert [(op.function, op.reads[0].tensor) for op in copy.ops] == [
        (functions.COPY, "t1"),
        (functions.CAST, copy.ops[0].writes[0].tensor),
    ]
    (stored,) = (n for n in graph.nodes if n.kind == "parameter")
    assert len(stored.ops) == 1 and [e.dst for e in graph.edges if e.src == stored.name] == [copy.name]


def test_a_cast_in_a_loop_is_not_made_outside_of_it() -> None:
    graph = verify(read_in_two_forms(loop=True))
    assert not [n for n in graph.nodes if n.kind == "copy" and len(n.ops) > 1]


def test_a_parameter_of_one_element_keeps_the_forms_in_which_it_is_read() -> None:
    """It needs no copy: every reader has its own edge, over which the gradient comes back."""
    b = GraphBuilder("g")
    w, x = b.parameter("w", (1,), "float32"), b.input("x", (8, 1), "float32")
    for f in (functions.ADD, functions.MUL):
        nests.elementwise(b, f, [x, nests.broadcast(b, w, (1, 1), (1,))], ["float32"])
    graph = simplify(b.finish())
    (stored,) = (n for n in graph.nodes if n.kind == "parameter")
    assert len(stored.ops) == 3 and not [n for n in graph.nodes if n.kind == "copy"]
    assert len([e for e in graph.edges if e.src == stored.name]) == 2


def test_a_graph_whose_pass_lost_a_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader would count as a reader of a constant, without a gradient."""

    def losing(graph: Graph) -> Graph:
        return replace(graph, nodes=tuple(n for n in graph.nodes if n.kind != "parameter"))

    monkeypatch.setattr(sys.modules[simplify.__module__], "with_states", losing)
    with pytest.raises(PaseError, match="nothing writes it") as e:
        read_in_two_forms()
    assert "report" in e.value.fix


def test_one_reader_needs_no_copy() -> None:
    b = GraphBuilder("g")
    x = b.parameter("w", (4,), "float32")
    nests.elementwise(b, functions.EXP, [x], ["float32"])
    graph = b.finish()
    assert with_copies(graph) == graph


def test_trained_parameters_have_states() -> None:
    b = GraphBuilder("g")
    b.parameter("w", (4, 8), "float32")
    b.parameter("tokens", (4,), "int32")
    b.input("x", (4,), "float32")
    graph = with_states(b.finish())
    assert [n.name for n in graph.nodes if "state" in n.space] == ["parameter.1"]
    assert [d.kind for d in graph.nodes[0].space] == ["parallel", "parallel", "state"]


@pytest.mark.parametrize(
    ("keys", "causal", "mask", "ring"),
    [
        (16, False, False, True),
        (16, True, False, True),
        (12, False, False, True),
        (12, True, False, False),
        (16, False, True, False),
    ],
)
def test_attention_without_a_mask_may_run_in_a_ring(keys: int, causal: bool, mask: bool, ring: bool) -> None:
    """Queries and keys of a causal attention must be equally many."""
    b = GraphBuilder("g")
    q = b.input("q", (2, 16, 4, 8), "float32")
    k, v = (b.input(n, (2, keys, 4, 8), "float32") for n in "kv")
    extra = [b.input("mask", (1, 1, 16, keys), "bool")] if mask else []
    attention(b, q, k, v, extra, causal=causal)
    graph = verify(with_rings(b.finish()))
    assert ("ring" in graph.nodes[-1].space) == ring
    if ring:
        assert graph.nodes[-1].ops[0].einsum.startswith("b (ring q) h d, b (ring s) h d")
