"""Two runs of nodes are the same up to their names and to what may be replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pase.frontends.torch.export.alike import same_nodes

pytestmark = pytest.mark.torch


def runs(*makes: Any) -> tuple[bool, bool]:
    """Whether two runs on weights w and v are the same: if v stands for w, and if nothing stands for anything."""
    import torch

    g = torch.fx.Graph()
    x, w, v = (g.placeholder(name) for name in "xwv")
    both = []
    for make, weight in zip(makes, (w, v), strict=True):
        before = len(g.nodes)
        end = make(g, x, weight)
        nodes = list(g.nodes)[before:]
        for n in nodes:
            n.meta["val"] = torch.zeros(2)
        both.append((nodes, (end,), {}))
    exported: Any = SimpleNamespace(
        graph_signature=SimpleNamespace(inputs_to_lifted_tensor_constants={}),
        constants={},
        graph_module=torch.fx.GraphModule(torch.nn.Module(), g),
    )
    pair: Any = tuple(both)
    return same_nodes(exported, pair, {w: v}), same_nodes(exported, pair, {})


def layer(g: Any, x: Any, w: Any, *, alpha: float = 1.0, twice: bool = False, mark: Any = None) -> Any:
    import torch

    y = g.call_function(torch.mul, (x, w))
    made = g.call_function(torch.add, (y, x), {"alpha": alpha})
    if mark is not None:
        made.meta["custom"] = {"pase_again": mark}
    return g.call_function(torch.neg, (made,)) if twice else made


def test_equal_layers_with_other_weights_are_the_same() -> None:
    assert runs(layer, layer) == (True, False)


@pytest.mark.parametrize("other", [{"alpha": 2.0}, {"alpha": 1}, {"twice": True}, {"mark": 1}])
def test_a_number_an_op_or_a_mark_makes_the_difference(other: dict[str, Any]) -> None:
    assert runs(layer, lambda g, x, w: layer(g, x, w, **other)) == (False, False)


def test_marks_may_have_other_numbers_if_these_correspond() -> None:
    """The number of a checkpointed call differs from layer to layer."""
    marked = [lambda g, x, w, n=n: layer(g, x, w, mark=n) for n in (1, 2)]
    assert runs(*marked)[0]

    def two(g: Any, x: Any, w: Any, marks: tuple[int, int]) -> Any:
        return layer(g, layer(g, x, w, mark=marks[0]), w, mark=marks[1])

    assert not runs(lambda g, x, w: two(g, x, w, (1, 1)), lambda g, x, w: two(g, x, w, (1, 2)))[0]
