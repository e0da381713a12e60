"""Facts of a graph: as text and back; texts of earlier versions are read, and digests stay."""

from __future__ import annotations

import hashlib

import pytest

from pase.errors import PaseError
from pase.ir import Remark, digest, from_text, to_text
from pase.ir.facts import GraphFacts, facts_text, read_facts
from pase.ops import GraphBuilder

EVERY = GraphFacts(
    frontend="onnx",
    dims={"batch": 8, "seq": 4},
    precision="fp8",
    hoisted="gathers",
    micro_batches=3,
    decomposed=True,
    eager=True,
    frees_gathered=True,
    constant_bytes=12,
)


def test_text_is_read_back() -> None:
    assert facts_text(GraphFacts()) == {} and read_facts({}) == GraphFacts()
    assert facts_text(EVERY) == {
        "frontend": "onnx",
        "dims": '{"batch": 8, "seq": 4}',
        "precision": "fp8",
        "hoisted": "gathers",
        "accumulate": "3",
        "decompose": "products",
        "eager": "calls",
        "frees": "gathered",
        "constant_bytes": "12",
    }
    assert read_facts(facts_text(EVERY)) == EVERY


def test_a_former_key_is_read() -> None:
    assert read_facts({"once": "all"}) == GraphFacts(hoisted="all")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("colour", "blue"),
        ("hoisted", "some"),
        ("accumulate", "0"),
        ("accumulate", "-1"),
        ("accumulate", "two"),
        ("accumulate", "9" * 40),
        ("decompose", "sums"),
        ("constant_bytes", "-1"),
        ("constant_bytes", "9" * 40),
        ("dims", "8"),
        ("dims", '{"batch": "8"}'),
        ("dims", '{"batch": true}'),
        ("dims", "{"),
        ("dims", "[" * 100_000),
    ],
)
def test_any_other_text_is_refused(key: str, value: str) -> None:
    with pytest.raises(PaseError):
        read_facts({key: value})


def test_a_fault_has_its_line() -> None:
    with pytest.raises(PaseError) as e:
        from_text("graph g\nmeta frontend jax\nmeta accumulate none\n")
    assert "line 3" in e.value.where


def test_a_graph_has_its_facts_in_its_text() -> None:
    b = GraphBuilder("g")
    made = b.finish([b.input("x", (2,), "float32")], frontend="onnx", dims={"n": 2})
    assert 'meta frontend onnx\nmeta dims "{\\"n\\": 2}"\n' in to_text(made)
    assert made.meta == {"frontend": "onnx", "dims": '{"n": 2}'} and from_text(to_text(made)) == made


def test_a_digest_with_remarks_has_them_after_the_other_facts() -> None:
    b = GraphBuilder("g")
    b.remarks.append(Remark("assumed", "what", "where"))
    made = b.finish([b.input("x", (2,), "float32")], frontend="jax")
    lines = to_text(made, sources=False, functions=False).split("\n")
    told = f'meta remarks "{made.remarks[0]}"'
    text = "\n".join([*lines[:2], told, *lines[2:]])
    assert digest(made, remarks=True) == hashlib.sha256(text.encode()).hexdigest() != digest(made)
