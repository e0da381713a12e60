"""Two graphs are one program on two sizes of batch, or it is said in what they differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pase.ir import Tensor
from pase.ir.functions import DIV, MUL, SUM
from pase.ir.two_batches import FullGraph, Otherwise, PowersInGraph, TwoBatches
from pase.ops import GraphBuilder, nests

K, SMALL = 4, 2
Rest = Callable[[GraphBuilder, Tensor, int], Tensor]


def compared(rest: Rest) -> TwoBatches:
    """A program of a product [n 8], on 8 and on 2 examples. rest: (builder, product, n) -> the result."""

    def of_batch(n: int) -> FullGraph:
        b = GraphBuilder("g")
        x, w = b.input("x", (n, 8), "float32"), b.parameter("w", (8, 8), "float32")
        out = rest(b, nests.contract(b, x, w, ([1], [0])), n)
        return FullGraph(graph=b.finish([out]), contents=b.contents, attributes=b.attributes)

    return TwoBatches(whole=of_batch(SMALL * K), part=of_batch(SMALL), k=K)


def divided(b: GraphBuilder, y: Tensor, n: float) -> Tensor:
    return nests.elementwise(b, DIV, [y, n], [y.dtype])[0]


def read(b: GraphBuilder, y: Tensor, contents: object) -> Tensor:
    return nests.elementwise(b, MUL, [y, b.constant((8,), y.dtype, contents=contents)], [y.dtype])[0]


def told(b: GraphBuilder, y: Tensor, attributes: object) -> Tensor:
    b.tell(attributes)
    return nests.opaque(b, "fft", [nests.reduce(b, SUM, [y], [0], [y.dtype])[0]], [((8,), y.dtype)])[0]


@pytest.mark.parametrize(
    "rest, power",
    [
        (lambda b, y, n: divided(b, y, 3.0), 0),
        (lambda b, y, n: divided(b, y, n * n), 2),
        (lambda b, y, n: read(b, y, "a buffer"), 0),
        (lambda b, y, n: read(b, y, [1 / n] * 8), -1),
        (lambda b, y, n: read(b, y, None), None),
        (lambda b, y, n: read(b, y, f"buffer {n}"), None),
        (lambda b, y, n: told(b, y, "forward"), 0),
    ],
)
def test_powers(rest: Rest, power: int | None) -> None:
    both = compared(rest)
    last = both.part.graph.nodes[-1].ops[-1]
    assert PowersInGraph(both=both, graph=both.part.graph).power(last) == power
    assert both.cut == {"x"}


@pytest.mark.parametrize(
    "rest, what",
    [
        (lambda b, y, n: divided(b, y, 3.0 if n > SMALL else 2.0), "numbers in div"),
        (lambda b, y, n: divided(b, y, 3.0) if n > SMALL else y, "numbers of ops"),
        (lambda b, y, n: divided(b, y, 3.0) if n > SMALL else read(b, y, 3.0), "operations"),
        (lambda b, y, n: nests.part(b, "split", y, 1, 2, int(n > SMALL)), "parameters of split"),
        (lambda b, y, n: nests.part(b, "split", y, 1, 16 // n, 0), "parameters of split"),
        (lambda b, y, n: nests.restrict(b, "slice", [y], (n, n), [True, False]), "sizes of slice"),
        (lambda b, y, n: told(b, y, "forward" if n > SMALL else "backward"), "parameters of fft"),
        (
            lambda b, y, n: nests.reduce(b, SUM, [y], [int(n > SMALL)], [y.dtype])[0],
            "shapes of reduce_sum|types",
        ),
    ],
)
def test_what_differs_is_said(rest: Rest, what: str) -> None:
    with pytest.raises(Otherwise, match=f"other ({what})"):
        compared(rest)
