"""Improving a stated strategy never makes it more expensive, and keeps its number of devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from pase import costmodels, machine, zoo
from pase.errors import Infeasible
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, named, simplify
from pase.stated.better import better, changes, neighbours
from pase.stated.price import Priced, price_strategy
from pase.stated.program import PROGRAMS
from pase.stated.strategy import Strategy, parse

MODEL = costmodels.get("analytic", machine.load("h100x8"))


@cache
def graph_of(batch: int) -> Graph:
    m = zoo.get("llama3_8b", batch=batch, seq=512, layers=2, attention="fused", remat=0)
    return named(simplify(trace(m.loss_fn, m.params, m.batch).graph))


def price(s: Strategy) -> Priced:
    at_once = (s.micro or 1) * s.ranks
    graph = graph_of(max(at_once, 2))
    return price_strategy(graph, s, PROGRAMS["megatron"], MODEL, 32, doubled=at_once == 1)


def test_neighbours_keep_the_devices_and_are_written_as_they_are_read():
    for text in (
        "dp=16,tp=2,sp,pp=2,micro=1",
        "fsdp=8,tp=8,micro=2,remat=full",
        "dp=2,fsdp=8,pp=4,vp=2,micro=1",
    ):
        start = parse(text, 64)
        found = list(neighbours(start))
        assert start not in found and len(found) == len(set(found)) > 8
        for s in found:
            assert s.devices == 64 and (s.chunks == 1 or s.pipeline > 1)
            assert changes(start, s) and not changes(s, s)
            if s.chunks == start.chunks and s.ranks % s.expert == 0:
                again = parse(str(s), 64)
                assert replace(again, remat=s.remat) == s


@dataclass(frozen=True)
class Told:
    strategy: Strategy
    step_s: float
    fits: bool


def test_what_fits_comes_first():
    """A start that does not fit is replaced by a slower neighbor that fits."""

    def told(s: Strategy, least: int) -> Any:
        return Told(s, 1.0 + 0.1 * s.tensor, s.tensor >= least)

    start = Strategy(tensor=1, data=8)
    near = better(told(start, 2), lambda s: told(s, 2)).priced
    assert near.fits and near.strategy.tensor == 2
    never = better(told(start, 99), lambda s: told(s, 99)).priced
    assert not never.fits and never.step_s == told(start, 99).step_s


@pytest.mark.some(1)
@pytest.mark.parametrize("text", ["fsdp=8,micro=1,remat=full", "dp=1,tp=8,sp,micro=1,remat=none"])
def test_ours_is_never_above_what_it_began_with(text):
    start = price(parse(text, 8))
    found = better(start, price)
    assert found.priced.step_s < start.step_s and found.priced.fits
    assert found.priced.step_s == price(found.priced.strategy).step_s
    assert changes(start.strategy, found.priced.strategy)
    # Nothing one change away is cheaper.
    for s in neighbours(found.priced.strategy):
        try:
            p = price(s)
        except Infeasible:
            continue
        assert not p.fits or p.step_s >= found.priced.step_s
