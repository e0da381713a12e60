"""A graph with symbolic sizes, bound to numbers, equals the graph of a trace at these numbers."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax import export

from pase.errors import PaseError
from pase.ir import Graph, from_text, to_text
from tests.ir.graphs import at_sizes, canonical, flops, graph_of

BATCH, SEQ = 24, 40


def symbolic(name: str, symbols: dict[int, Any]) -> Graph:
    fn, params, batch = at_sizes(name, BATCH, SEQ)
    batch = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(tuple(symbols.get(s, s) for s in t.shape), t.dtype), batch
    )
    return graph_of(fn, params, batch)


@pytest.mark.parametrize("name", ["mlp", "llama3_8b", "gpt2", "mixtral_8x7b", "alexnet"])
def test_bound_batch_is_traced_batch(name: str) -> None:
    """The nodes are compared in the text form. Tensors are renumbered, because JAX makes some constants differently."""
    (b,) = export.symbolic_shape("b")
    found = symbolic(name, {BATCH: b})
    assert found.symbols == ("b",)
    assert from_text(to_text(found)) == found
    for batch in (BATCH, 32):
        bound, traced = found.bind(b=batch), graph_of(*at_sizes(name, batch, SEQ))
        assert canonical(bound) == canonical(traced)
        literals = [[op.literals for n in g.nodes for op in n.ops] for g in (bound, traced)]
        assert all(
            a is None or a == b for a, b in zip(*literals, strict=True)
        )  # None: it depends on the batch


@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b"])
def test_bound_sequence_is_traced_sequence(name: str) -> None:
    b, s = export.symbolic_shape("b, s", constraints=[f"s <= {SEQ}", "s >= 8"])
    found = symbolic(name, {BATCH: b, SEQ: s})
    assert found.symbols == ("b", "s")
    bound = found.bind(b=16, s=32)
    concrete = graph_of(*at_sizes(name, 16, 32))
    assert [n.name for n in bound.nodes] == [n.name for n in concrete.nodes]
    assert flops(bound, "matmul") == flops(concrete, "matmul")
    assert bound.symbols == ()


def test_binding_what_is_not_there() -> None:
    (b,) = export.symbolic_shape("b")
    found = symbolic("mlp", {BATCH: b})
    with pytest.raises(PaseError, match="symbolic size q") as e:
        found.bind(q=3)
    assert e.value.fix.endswith(": b")
    assert found.bind() == found
