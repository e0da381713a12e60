"""A trace with symbolic sizes, bound to numbers, equals the trace at these numbers."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax import export

from pase import zoo
from pase.errors import PaseError
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, from_text, named, simplify, to_text, verify
from tests.ir.graphs import canonical, flops

BATCH, SEQ = 24, 40


def model(name: str, batch: int, seq: int) -> tuple[Any, Any, Any]:
    settings = {"batch": batch} | ({"seq": seq} if "seq" in zoo.entry(name).settings else {})
    m = zoo.reduced(name, **settings)
    return m.loss_fn, m.params, m.batch


def graph(fn: Any, params: Any, batch: Any) -> Graph:
    return verify(named(simplify(trace(fn, params, batch, name="m").graph)))


def symbolic(name: str, symbols: dict[int, Any]) -> Graph:
    fn, params, batch = model(name, BATCH, SEQ)
    batch = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(tuple(symbols.get(s, s) for s in t.shape), t.dtype), batch
    )
    return graph(fn, params, batch)


@pytest.mark.parametrize("name", ["mlp", "llama3_8b", "gpt2", "mixtral_8x7b", "alexnet"])
def test_bound_batch_is_traced_batch(name: str) -> None:
    """The nodes are compared in the text form. Tensors are renumbered, because JAX makes some constants differently."""
    (b,) = export.symbolic_shape("b")
    found = symbolic(name, {BATCH: b})
    assert found.symbols == ("b",)
    assert from_text(to_text(found)) == found
    for batch in (BATCH, 32):
        assert canonical(found.bind(b=batch)) == canonical(graph(*model(name, batch, SEQ)))


@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b"])
def test_bound_sequence_is_traced_sequence(name: str) -> None:
    b, s = export.symbolic_shape("b, s", constraints=[f"s <= {SEQ}", "s >= 8"])
    found = symbolic(name, {BATCH: b, SEQ: s})
    assert found.symbols == ("b", "s")
    bound = found.bind(b=16, s=32)
    concrete = graph(*model(name, 16, 32))
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


def test_dims_bind_before_tracing() -> None:
    """The jaxpr then has concrete sizes, so that a backend can run it."""
    fn, params, batch = model("mlp", BATCH, SEQ)
    (b,) = export.symbolic_shape("b")
    loose = jax.tree.map(
        lambda t: jax.ShapeDtypeStruct(tuple(b if s == BATCH else s for s in t.shape), t.dtype), batch
    )
    found = trace(fn, params, loose, name="m", dims={"b": BATCH})
    assert canonical(verify(named(simplify(found.graph)))) == canonical(graph(fn, params, batch))
    assert all(isinstance(s, int) for v in found.jaxpr.jaxpr.invars for s in v.aval.shape)
    with pytest.raises(PaseError, match="symbolic size 'q'") as e:
        trace(fn, params, loose, name="m", dims={"q": 3})
    assert e.value.where == "model 'm'" and e.value.fix.endswith(": b")
    with pytest.raises(PaseError) as e:
        trace(fn, params, loose, name="m", dims={"b": 0})
    assert e.value.where == "dim b" and "0" in e.value.what
