"""Products by groups, and attention."""

from __future__ import annotations

from typing import Any

import pytest

from pase.errors import PaseError
from pase.frontends import registry
from tests.frontends.torch.formulas import assert_unsharded

pytestmark = pytest.mark.torch


def test_a_product_by_groups_is_as_much_work_as_its_rows() -> None:
    """A device with half of the groups does half of the work. Each group is a product of its own rows."""
    import numpy as np
    import torch

    from pase.machine import mesh_from
    from pase.tables.work import node_work

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.ones(4, 16, 32, dtype=torch.bfloat16))

        def forward(self, x: Any, ends: Any) -> Any:
            return torch.nn.functional.grouped_mm(x, self.up, offs=ends).float().mean()

    batch = (torch.ones(64, 16, dtype=torch.bfloat16), torch.full((4,), 8, dtype=torch.int32))
    graph = registry.trace(Experts(), *batch).graph
    (node,) = (n for n in graph.nodes if n.kind == "matmul")
    assert node.main.einsum == "m k, g k n, e -> m n"
    kinds = {d.name: d.kind for d in node.space}
    assert (kinds["m"], kinds["g"], kinds["e"]) == ("parallel", "reduction", "replicated")
    names = [d.name for d in node.space]
    configs = np.array([[-1], [names.index("g")], [names.index("m")]], dtype=np.int8)
    forward, *backward = (w for w in node_work(graph, node, configs, mesh_from("2", 2)) if w.kind == "matmul")
    assert forward.flops.tolist() == [2 * 64 * 16 * 32, 64 * 16 * 32, 64 * 16 * 32]
    assert forward.mnk is not None
    assert [x.tolist() for x in np.broadcast_arrays(*forward.mnk)] == [[16, 16, 8], [32] * 3, [16] * 3]
    assert len(backward) == 1  # the gradient of the weights; the rows need none


def test_a_product_of_other_groups_is_refused() -> None:
    import torch

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.ones(4, 16, 32, dtype=torch.bfloat16))

        def forward(self, x: Any, y: Any) -> Any:
            return torch.nn.functional.grouped_mm(x, self.up).float().mean()

    x = torch.ones(4, 8, 16, dtype=torch.bfloat16)
    with pytest.raises(PaseError, match=r"\[4, 8, 16\] and \[4, 16, 32\]"):
        registry.trace(Experts(), x, x)


@pytest.mark.parametrize("read", [False, True], ids=["alone", "read elsewhere"])
def test_attention_reads_heads_that_queries_share_without_a_copy_for_each(read: bool) -> None:
    """The copies that a program writes out are made only for other readers, and backward keeps none of them."""
    import torch

    from pase.memory.residuals import kept

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = torch.nn.Linear(24, 24), torch.nn.Linear(24, 8), torch.nn.Linear(24, 8)

        def forward(self, x: Any) -> Any:
            q, k, v = (m(x).unflatten(-1, (-1, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
            k = k.cos()
            wide = k[:, :, None].expand(3, 2, 3, 5, 4).reshape(3, 6, 5, 4)
            y = torch.nn.functional.scaled_dot_product_attention(q, wide, v.repeat_interleave(3, 1))
            return y.square().mean() + (wide.mean() if read else 0)

    graph = registry.trace(Shared(), torch.ones(3, 5, 24)).graph
    (node,) = (n for n in graph.nodes if n.kind == "attention")
    q, k, v = (graph.tensors[a.tensor] for a in node.main.reads)
    assert [t.shape for t in (q, k, v)] == [(3, 6, 5, 4), (3, 2, 5, 4), (3, 2, 5, 4)]
    wide = {t.name for t in graph.tensors.values() if t.shape == (3, 2, 3, 5, 4)}
    assert bool(wide) == read
    assert k.name in kept(graph) and not wide & kept(graph).keys()


@pytest.mark.parametrize("kind", ["grids", "extremes", "windows", "filters"])
def test_the_step_is_the_unsharded_one(kind: str) -> None:
    assert_unsharded(kind)
