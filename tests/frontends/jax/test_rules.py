"""The FLOPs that the rules give to a graph, against independent counts."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest

from pase import zoo
from tests.ir.graphs import flops, raw, simple

PRODUCTS = ("matmul", "conv", "attention")
UNROLLED = [m for m in zoo.names() if {"scan", "remat"} <= zoo.entry(m).settings.keys()]
NO_LOOP = [m for m in zoo.names() if m not in UNROLLED and m != "rnnlm"]


def unrolled(model: str) -> str:
    return f"{model}?scan=0&remat=0" if model in UNROLLED else model


def counted(jaxpr: Any) -> float:
    """The FLOPs of a jaxpr's products, from shapes: 2·|out|·(contracted, or filter window × channels of a group)."""
    total = 0.0
    for eqn in jaxpr.eqns:
        p = eqn.params
        size = math.prod(eqn.outvars[0].aval.shape) if eqn.outvars else 0
        shapes = [v.aval.shape for v in eqn.invars]
        if eqn.primitive.name == "dot_general":
            total += 2.0 * size * math.prod(shapes[0][i] for i in p["dimension_numbers"][0][0])
        elif eqn.primitive.name == "conv_general_dilated":
            _, channels, *window = p["dimension_numbers"].rhs_spec
            total += 2.0 * size * math.prod(shapes[1][i] for i in (channels, *window))
        else:
            times = p.get("length", 1) if eqn.primitive.name == "scan" else 1
            inner = [x for x in p.values() if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
            total += times * sum(counted(getattr(x, "jaxpr", x)) for x in inner)
    return total


@pytest.mark.some(8)
@pytest.mark.parametrize("model", zoo.names())
def test_products_are_those_of_the_jaxpr(model: str) -> None:
    """They are equal, rolled and unrolled, before and after simplifying."""
    m = zoo.reduced(unrolled(model))
    wanted = counted(jax.make_jaxpr(m.loss_fn)(m.params, m.batch).jaxpr)
    for name in (model, unrolled(model)):
        assert flops(raw(name), *PRODUCTS) == flops(simple(name), *PRODUCTS) == wanted


@pytest.mark.some(8)
@pytest.mark.parametrize("model", [*UNROLLED, *NO_LOOP])
def test_products_are_near_xlas_count(model: str) -> None:
    """XLA's own cost analysis of the lowered forward pass counts all ops. It leaves out a convolution's products with
    padding (up to 9% in these small images) and adds one FLOP per elementwise op (up to 19%)."""
    m = zoo.reduced(unrolled(model))
    cost = jax.jit(m.loss_fn).lower(m.params, m.batch).cost_analysis()
    assert cost is not None
    ratio = cost["flops"] / flops(simple(model), *PRODUCTS)
    convolves = flops(simple(model), "conv") > 0
    assert (0.90 if convolves else 1.0) <= ratio <= 1.20


def test_lstm_by_formula() -> None:
    """Per layer and token 2·4·(in + hidden)·hidden, then the classifier."""
    s = zoo.reduced("rnnlm").params
    (wx, wh), (out_in, vocabulary) = (
        ((s["lstm"][0][k].shape for k in ("wx", "wh"))),
        s["classifier"]["w"].shape,
    )
    per_token = sum(2 * math.prod(cell[k].shape) for cell in s["lstm"] for k in ("wx", "wh"))
    batch, sequence = zoo.reduced("rnnlm").batch["tokens"].shape
    assert wx[-1] == wh[-1] == out_in
    assert flops(simple("rnnlm"), "matmul") == batch * sequence * (per_token + 2 * out_in * vocabulary)
