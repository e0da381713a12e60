"""The parts of a model: the embedding, a block, and the head."""

from __future__ import annotations

from dataclasses import replace

from pase import zoo
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from pase.stated.parts import parts_of
from pase.stated.place import place
from pase.stated.program import PROGRAMS
from pase.stated.strategy import parse
from tests.stated.prices import GRAPH, MODEL, price


def test_the_first_stage_has_the_embedding_and_the_last_one_a_copy_of_a_tied_one():
    def parts(graph):  # type: ignore[no-untyped-def]
        s = replace(parse("dp=2", 2), micro=8, remat="none")
        return parts_of(graph, place(graph, s, MODEL), s, PROGRAMS["megatron"], MODEL)

    m = zoo.get("gpt2", batch=16, seq=128, layers=4, remat=0)
    tied = named(simplify(trace(m.loss_fn, m.params, m.batch).graph))
    embedding = 50257 * 768
    got = parts(tied)
    assert embedding < got.first.parameters < 1.1 * embedding
    assert got.tied.parameters == embedding and got.last.parameters < 0.1 * embedding
    two = price("dp=2,pp=2,micro=1", 4, "megatron", graph=tied)
    assert "sums of tied gradients" in two.collectives_s
    assert "sums of tied gradients" not in price("dp=4", 4, graph=tied).collectives_s
    apart = parts(GRAPH)
    embedding = 128256 * 4096
    assert apart.tied.parameters == 0 and apart.first.parameters == embedding <= apart.last.parameters
