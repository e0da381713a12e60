"""Keys and values go around the ranks that share positions."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bench.cases.torch_ranks import alone_among, on_ranks
from tests.backends.torch.models import case
from tests.backends.torch.steps import whole

pytestmark = pytest.mark.torch
RANKS = 4


@pytest.mark.some(1)
@pytest.mark.parametrize("mesh", ["4", "2x2"])
def test_keys_and_values_go_around_the_ranks_that_share_positions(mesh: str) -> None:
    """Context parallelism: the loss and gradients are those of the unsharded step. The bytes are those on the plan's
    list. (Under a causal mask, the chunks that are exchanged before and after take more messages than the list has.)"""
    import numpy as np
    import torch

    from pase.api import Plan
    from pase.backends.audit.torch import planned_in_step, sent_by_one_rank
    from pase.compiler.meshes.plans import plan_of
    from pase.machine import mesh_from
    from pase.tables.layouts import configs, ring_of

    c = case("circle", RANKS)
    p, over = c.case.problem, mesh_from(mesh, RANKS)
    chosen = {}
    for n in p.graph.nodes:
        rows, ring = configs(n, over), ring_of(n)
        first = 0 if ring is None else ring.dim
        wanted = (rows == first).all(1) if ring is not None else np.zeros(len(rows), bool)
        along = [i for i, d in enumerate(n.space) if d.size == 32]
        alike = wanted if ring is not None or not along else (rows == along[0]).all(1)
        chosen[n.name] = rows[np.argmax(alike)] if alike.any() else rows[np.argmax((rows == -1).all(1))]
    assert (
        sum(ring_of(n) is not None and (chosen[n.name] == ring_of(n).dim).all() for n in p.graph.nodes) == 3
    )
    plan = Plan.of(plan_of(p, chosen, over, "circle", c.case.traced)).torch
    assert plan.program.ops and plan.leaves

    def on_rank(rank: int) -> Any:
        module = copy.deepcopy(c.module)
        loss = plan.parallelize(module).backward(*c.batch)
        return loss, {k: whole(q.grad) for k, q in module.named_parameters()}

    for loss, gradients in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(loss, c.loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradients, c.gradients, rtol=1e-12, atol=1e-14)
    with alone_among(RANKS, rank=1):
        sent = sent_by_one_rank(plan)

    def by_axes(counts: Any) -> dict[Any, int]:
        keys = {key[:2] for key in counts}
        return {k: sum(key[2] * n for key, n in counts.items() if key[:2] == k) for k in keys}

    assert by_axes(sent) == by_axes(planned_in_step(plan))
    assert any(kind == "permute" for kind, *_ in sent)


def test_a_ring_goes_around_in_the_order_of_the_parts() -> None:
    """Keys whose parts are in another order than the ranks of the group are refused."""
    import torch

    from pase.backends.torch.spmd.process_groups import AxisGroups
    from pase.backends.torch.spmd.rules import RankCall, evaluate
    from pase.backends.torch.spmd.values import NotOnParts
    from pase.machine import Mesh
    from pase.tables.axis_layout import AxisLayout

    mesh = Mesh(names=("x", "y"), sizes=(2, 2))
    part, groups = torch.ones(1, 2, 4, 8), AxisGroups(mesh=mesh, devices=None, place=(0, 0))  # type: ignore[arg-type]
    laid = {n: ((1, 2, 16, 8), AxisLayout([(2, 4), (2, 2)])) for n in ("query", "key", "value")}
    call = RankCall(
        target=torch.ops.aten.scaled_dot_product_attention.default,
        ops=[],
        given=dict.fromkeys(laid, part),
        layouts=laid,
        outs=[laid["query"]],
        groups=groups,
        seed=0,
        whole=[],
    )
    with pytest.raises(NotOnParts, match="ring"):
        evaluate("scaled_dot_product_attention", call)
