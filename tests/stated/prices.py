"""A small Llama, and prices of it under stated strategies."""

from __future__ import annotations

from dataclasses import replace

from pase import costmodels, machine, zoo
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from pase.stated.price import price_strategy
from pase.stated.program import PROGRAMS
from pase.stated.strategy import parse

H100 = machine.load("h100x8")
MODEL = costmodels.get("analytic", H100)


def graph_of(batch=16, seq=512, **shape):  # type: ignore[no-untyped-def]
    m = zoo.get("llama3_8b", batch=batch, seq=seq, layers=4, attention="fused", remat=0, **shape)
    return named(simplify(trace(m.loss_fn, m.params, m.batch).graph))


GRAPH = graph_of()
AHEAD = replace(
    PROGRAMS["eager"], executor=replace(PROGRAMS["eager"].executor, host_s=(1e-7, 1e-7))
)  # the host is ahead of the device


def price(text, devices=8, program="compiled", graph=GRAPH, examples=16, model=MODEL):  # type: ignore[no-untyped-def]
    s = parse(text, devices)
    s = replace(s, micro=s.micro or examples // s.ranks, remat=s.remat or "none")
    return price_strategy(
        graph, s, PROGRAMS[program] if isinstance(program, str) else program, model, examples
    )
