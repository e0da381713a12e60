"""How values that depend on no data compare on two sizes of batch, against the values themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.ir.constants import Constant, of_contents
from pase.ir.functions import ADD, CUMSUM, IOTA, MUL, REDUCE_MAX, SUM
from pase.ir.parameters import Cumulative, Iota
from pase.ir.two_batches import FullGraph, TwoBatches
from pase.ops import GraphBuilder, nests

K, SMALL = 3, 4
WIDE = 6
"""The size of a dim that is not the batch's."""
STEPS = (
    "places",
    "features",
    "count",
    "merge",
    "part",
    "turn",
    "sum 0",
    "sum -1",
    "max 0",
    "so far 0",
    "so far -1",
)
STEPS += ("times itself", "plus itself", "times places", "times features", "times count", "wide")


@pytest.mark.parametrize(
    "of_batch, power, periods",
    [
        (lambda n: np.float32(1 / n), -1, ()),
        (lambda n: np.full((n, 2), n**2), 2, (1, 0)),
        (lambda n: np.tile([1.0, np.nan], (n, 1)), 0, (1, 0)),
        (lambda n: "a buffer", 0, ()),
    ],
)
def test_contents(of_batch: Any, power: int, periods: tuple[int, ...]) -> None:
    found = of_contents(of_batch(SMALL * K), lambda: of_batch(SMALL), K)
    assert found is not None and (found.power, found.periods) == (power, periods)


@pytest.mark.parametrize(
    "of_batch", [np.arange, lambda n: n + 1, lambda n: n > 4, lambda n: f"buffer {n}", lambda n: None]
)
def test_contents_that_differ(of_batch: Any) -> None:
    assert of_contents(of_batch(SMALL * K), of_batch(SMALL), K) is None


class Program:
    """A program without data on a batch of n examples: its graph, and its value."""

    def __init__(self, n: int, steps: list[str]) -> None:
        self.n, self.b = n, GraphBuilder("g")
        self.start("features")
        for step in steps:
            self.step(step)

    def start(self, what: str) -> None:
        n, at = self.n, Iota(axis=0 if what == "places" else 1, start=0, step=1)
        if what == "count":
            self.value = np.full((n, WIDE), float(n))
            self.tensor = self.b.constant((n, WIDE), "float64", float(n))
            return
        self.value = np.broadcast_to(
            np.arange(float(n))[:, None] if what == "places" else np.arange(float(WIDE)), (n, WIDE)
        )
        self.tensor = nests.generate(self.b, IOTA, (n, WIDE), "float64", parameters=at)

    def step(self, step: str) -> None:
        b, x, v = self.b, self.tensor, self.value
        words = step.split()
        if words[0] in ("places", "features", "count"):
            self.start(step)
        elif step in ("merge", "part"):
            wanted = (
                (v.size,)
                if step == "merge"
                else (self.n, v.size // self.n)
                if v.size % self.n == 0
                else v.shape
            )
            self.tensor, self.value = nests.reshape(b, x, wanted), v.reshape(wanted)
        elif step == "turn":
            self.tensor, self.value = nests.transpose(b, x, range(v.ndim)[::-1]), v.T
        elif step == "wide" and v.ndim < 3:
            self.tensor = nests.broadcast(b, x, (self.n, *v.shape), range(1, v.ndim + 1))
            self.value = np.broadcast_to(v, (self.n, *v.shape))
        elif words[0] in ("sum", "max") and v.ndim:
            axis, of = int(words[1]) % v.ndim, {"sum": (SUM, np.sum), "max": (REDUCE_MAX, np.max)}[words[0]]
            (self.tensor,) = nests.reduce(b, of[0], [x], [axis], [x.dtype])
            self.value = of[1](v, axis)
        elif words[0] == "so" and v.ndim:
            axis = int(words[2]) % v.ndim
            along = Cumulative(axis=axis, reverse=False, exclusive=False)
            (self.tensor,) = nests.sequential(b, CUMSUM, [x], axis, [(x.shape, x.dtype)], parameters=along)
            self.value = np.cumsum(v, axis)
        elif words[0] in ("times", "plus"):
            if words[1] != "itself":
                self.start(words[1])
                if self.value.shape != v.shape:
                    self.tensor, self.value = x, v
            function, of = (MUL, np.multiply) if words[0] == "times" else (ADD, np.add)
            (self.tensor,) = nests.elementwise(b, function, [x, self.tensor], [x.dtype])
            self.value = of(v, self.value)


def compared(steps: list[str]) -> tuple[Constant | None, np.ndarray, np.ndarray]:
    whole, part = (Program(n, steps) for n in (SMALL * K, SMALL))
    sides = (FullGraph(graph=p.b.finish()) for p in (whole, part))
    found = TwoBatches(whole=next(sides), part=next(sides), k=K).constants[part.tensor.name]
    return found, whole.value, part.value


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=6))
def test_what_is_said_of_a_value_is_true(steps: list[str]) -> None:
    found, whole, part = compared(steps)
    if found is None:
        return
    index = np.indices(whole.shape)
    for period, at in zip(found.periods, index, strict=True):
        at[...] = at % period if period else at
    np.testing.assert_allclose(whole, part[tuple(index)] * float(K) ** found.power, rtol=1e-9)
    assert not found.uniform or np.unique(part).size == np.unique(whole).size == 1


@pytest.mark.parametrize(
    "steps, power, periods",
    [
        (["merge"], 0, (WIDE,)),
        (["merge", "part", "sum 0"], 1, (0,)),
        (["times features", "sum -1", "sum 0"], 1, ()),
        (["count", "times count", "max 0"], 2, (0,)),
        (["sum -1", "wide", "so far -1"], None, ()),
        (["turn", "merge"], None, ()),
        (["places"], None, ()),
        (["count", "turn", "merge"], 1, (1,)),
        (["so far -1"], 0, (1, 0)),
    ],
)
def test_what_is_known(steps: list[str], power: int | None, periods: tuple[int, ...]) -> None:
    found, *_ = compared(steps)
    assert (found and (found.power, found.periods)) == (None if power is None else (power, periods))
