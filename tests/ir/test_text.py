"""The text form prints and parses exactly, and errors say where a text cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.ir import Graph, Remark, SourceLine, digest, from_text, to_text
from tests.ir.graphs import graphs, raw, simple


@settings(max_examples=60)
@given(graphs())
def test_text_round_trip(graph: Graph) -> None:
    text = to_text(graph)
    again = from_text(text)
    assert again == graph
    assert list(again.tensors) == list(graph.tensors)
    assert to_text(again) == text


@pytest.mark.parametrize("model", ["mlp", "rnnlm", "mixtral_8x7b", "gpt2"])
def test_models_round_trip(model: str) -> None:
    assert from_text(to_text(raw(model))) == raw(model)
    assert from_text(to_text(simple(model))) == simple(model)


@pytest.mark.parametrize("model", ["mlp", "gpt2", "alexnet", "rnnlm", "mixtral_8x7b"])
def test_golden(model: str, golden: Callable[[str, str], None]) -> None:
    golden(model, to_text(simple(model), sources=False))


@settings(max_examples=100)
@given(st.data())
def test_garbage_is_a_clear_error(data: st.DataObject) -> None:
    """Cut, doubled or overwritten anywhere, the text is parsed or is refused with line and column."""
    text = to_text(simple("mlp"))
    at = data.draw(st.integers(0, len(text)))
    n = data.draw(st.integers(0, 30))
    junk = data.draw(st.text(max_size=8) | st.sampled_from(["[", "{", '"', "->", "|", "\n", "node x", "="]))
    try:
        from_text(text[:at] + junk + text[at + n :])
    except PaseError as e:
        assert e.where.startswith("graph text line ") and ", column " in e.where


HEAD = "graph g\ntensor t float32[4] activation\nnode n (a=4)\n"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", "line 1, column 1", "empty"),
        ("tensor t", "line 1, column 1", "'graph NAME', not 'tensor'"),
        ("graph g\ngraph h", "line 2, column 1", "second 'graph'"),
        ("graph g\ntensors t", "line 2, column 1", "'tensors' is none of"),
        ("graph g\n  view x ->", "line 2, column 1", "before the first node"),
        ("graph g\ntensor t float32[4", "line 2, column 19", "expected ',', found the end of the line"),
        ("graph g\ntensor t float32[{b+}] activation", "line 2, column 18", "'b+' is not a size"),
        ("graph g\ntensor t float32[4] weight", "line 2, column 21", "'weight' is not a role"),
        (HEAD + "tensor t float32[] input", "line 4, column 1", "tensor t is declared twice"),
        (HEAD + "  vieww x ->", "line 4, column 3", "'vieww' is not an op's kind; known are matmul"),
        (HEAD + "  view x t[a b@0] ->", "line 4, column 12", "access map 'a b@0': cannot read 'b@0'"),
        (HEAD + "  view x t[a ->", "line 4, column 11", "'[' is not closed"),
        (HEAD + "  view x t[a] -> t[a] | flopss=3", "line 4, column 25", "expected fn=, flops=, over="),
        (HEAD + "  view x t[a] -> | flops=x", "line 4, column 26", "expected a number, found 'x'"),
        (HEAD + "  view x t[a] -> | eqn=1 eqn=2", "line 4, column 26", "'eqn' occurs twice"),
        (HEAD + "  view x t[a] -> | scope=turn3", "line 4, column 26", "'turn3' is not a scope"),
        (HEAD + "  view x t[a] t[a] ->", "line 4, column 15", "expected ','"),
        ("graph g\nnode n (a=4 big)", "line 2, column 13", "'big' is not a dim's kind; known are parallel"),
        ("graph g extra", "line 1, column 9", "found 'extra'"),
        ('graph g\nmeta "a\\q" b', "line 2, column 6", "JSON"),
    ],
)
def test_errors_name_line_and_column(text: str, where: str, what: str) -> None:
    with pytest.raises(PaseError) as e:
        from_text(text)
    assert e.value.where == f"graph text {where}"
    assert what in e.value.what


def test_texts_of_earlier_versions_are_read_and_have_the_same_digest() -> None:
    remark = Remark("trip_count", "priced as one iteration", "a.py:3")
    g = replace(simple("gpt2"), remarks=(remark,))
    former = to_text(g).replace(" recompute t", " again t").replace("remark trip_count", "remark turns")
    assert former.count(" again t") > 10
    assert from_text(former) == g
    unlocated = to_text(g, sources=False, functions=False).replace(" recompute t", " again t")
    assert digest(g) == sha256(unlocated.encode()).hexdigest()


def test_digest_is_of_the_model_not_of_where_it_lies() -> None:
    g = simple("mlp")
    line = SourceLine("/else/x.py:1")
    moved = replace(
        g, nodes=tuple(replace(n, ops=tuple(replace(o, source=line) for o in n.ops)) for n in g.nodes)
    )
    assert digest(moved) == digest(g) and len(digest(g)) == 64
    wider = replace(g, tensors={k: replace(t, dtype="float16") for k, t in g.tensors.items()})
    assert digest(wider) != digest(g)
