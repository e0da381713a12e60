"""Linear algebra: the work of a matrix by its size, and a batch of matrices that may be split."""

from __future__ import annotations

from typing import Any

import pytest

from pase.frontends import registry
from tests.frontends.torch.formulas import assert_unsharded
from tests.ir.graphs import flops

pytestmark = pytest.mark.torch


def node_of(op: Any, *shape: int) -> Any:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(shape))

        def forward(self, x: Any) -> Any:
            made = op(self.w + x)
            return sum(y.sum() for y in (made if isinstance(made, tuple) else (made,)))

    graph = registry.trace(Model(), torch.zeros(shape)).graph
    (node,) = (n for n in graph.nodes if n.kind == "opaque" or "linalg" in n.main.name)
    return graph, node


@pytest.mark.parametrize(
    ("name", "factor"), [("cholesky", 1 / 3), ("qr", 4 / 3), ("inv", 2.0), ("svdvals", 21.0)]
)
def test_a_batch_of_matrices_is_split_and_a_matrix_is_not(name: str, factor: float) -> None:
    """As in Golub and Van Loan: a multiple of n³ for each of the six matrices."""
    import torch

    graph, node = node_of(getattr(torch.linalg, name), 6, 8, 8)
    assert [(d.size, d.kind) for d in node.space if d.kind == "parallel"] == [(6, "parallel")]
    assert {d.kind for d in node.space} == {"parallel", "replicated"}
    assert flops(graph, node.kind) == pytest.approx(6 * factor * 8**3)


@pytest.mark.some(4)
@pytest.mark.parametrize("kind", ["svdvals", "eigh", "qr", "cholesky", "solve", "slogdet", "of a batch"])
def test_the_step_is_the_unsharded_one(kind: str) -> None:
    assert_unsharded(kind)
