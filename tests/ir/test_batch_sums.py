"""How values of micro-batches combine: sums, totals that no parameter influences, and examples that meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pase.ir import Tensor, functions, simplify
from pase.ir.batch_sums import BatchSums, ExamplesMeet, batch_sums, counting_ops
from pase.ops import GraphBuilder, nests

B, D = 6, 8


class Model:
    """y = x w for a batch of rows, and labels."""

    def __init__(self) -> None:
        self.b = GraphBuilder("g")
        w = self.b.parameter("w", (D, D), "float32")
        self.x = self.b.input("x", (B, D), "float32")
        self.y = nests.contract(self.b, self.x, w, ([1], [0]))

    def each(self, function: functions.Function, *inputs: Tensor) -> Tensor:
        return nests.elementwise(self.b, function, inputs, ["float32"])[0]

    def over(self, function: functions.Function, x: Tensor, *axes: int) -> Tensor:
        return nests.reduce(self.b, function, [x], axes or range(len(x.shape)), ["float32"])[0]

    def sums(self, out: Tensor) -> BatchSums:
        self.b.output(out)
        return batch_sums(simplify(self.b.finish([out])), ["x"], None, state_of_whole=False)


def test_a_sum_over_the_batch_has_no_totals() -> None:
    m = Model()
    out = m.over(functions.SUM, m.each(functions.SQUARE, m.y))
    made = m.sums(out)
    assert made.totals == {} and set(made.outputs) == {out.name} and made.counting == frozenset()


def test_a_count_that_divides_the_loss_is_a_total() -> None:
    """Every micro-batch must read the count of the whole batch. The ops that count are those behind it."""
    m = Model()
    positive = m.each(functions.FUNCTIONS["sign"], m.x)
    count = m.over(functions.SUM, positive)
    made = m.sums(m.each(functions.DIV, m.over(functions.SUM, m.y), count))
    assert set(made.totals) == {count.name}
    assert {t for _, t in made.counting} == {m.x.name, positive.name, count.name}


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("reduce_max", lambda m: m.over(functions.REDUCE_MAX, m.y)),
        ("exp", lambda m: m.each(functions.EXP, m.over(functions.SUM, m.y))),
        (
            "dot_general",
            lambda m: m.over(functions.SUM, nests.contract(m.b, m.y, m.y, ([1], [1]), name="dot_general")),
        ),
    ],
)
def test_examples_that_meet_are_named_with_the_op(name: str, out: Callable[[Model], Tensor]) -> None:
    """A maximum over examples, a function of a sum that is not linear, and all pairs of rows."""
    m = Model()
    with pytest.raises(ExamplesMeet, match=name):
        m.sums(out(m))


def test_rows_alone_may_use_any_function() -> None:
    m = Model()
    largest = m.over(functions.REDUCE_MAX, m.each(functions.EXP, m.y), 1)
    assert m.sums(m.over(functions.SUM, largest)).totals == {}


def test_counting_ops_are_everything_behind_the_totals() -> None:
    m = Model()
    total = m.over(functions.SUM, m.each(functions.EXP, m.y))
    graph = m.b.finish()
    behind = {t for _, t in counting_ops(graph, [total.name])}
    assert behind == {a.tensor for n in graph.nodes for op in n.ops for a in op.writes}
    assert counting_ops(graph, []) == frozenset()
