"""Variants of a problem cost what a user would write."""

import pytest

from pase.baselines import Baseline, baselines
from pase.compiler.meshes.plans import plan_of
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import Variant
from pase.compiler.resolve import resolve
from pase.frontends.jax.blocks import blocks_of, micro
from pase.frontends.jax.frontend import trace
from pase.machine import mesh_from
from tests.compiler.meshes.models import WIDE, wide


def test_blocks_computed_again_cost_what_the_users_own_remat_does():
    """A loop's body as a block, and the same body under jax.checkpoint, have equal seconds and bytes per baseline."""
    given = {}
    small = "&layers=4&batch=16&seq=64&vocab=512"
    for remat in (0, 1):
        traced = resolve(f"zoo:gpt2?remat={remat}{small}")
        p = SplitProblem.of(traced.graph, 4, None, "analytic", "adam")
        assert len(blocks_of(traced)) == 1 - remat
        p = p.varied(traced, Variant(blocks=blocks_of(traced)))
        for b in baselines(p.graph, 4, p.machine, p.model, only=("data_parallel", "zero2", "fsdp")):
            assert isinstance(b, Baseline)
            plan = plan_of(p, b.strategy, b.mesh, "gpt2", traced)
            given.setdefault(b.name, []).append((plan.cost, plan.memory.total))
    assert len(given) == 3
    for name, (block, by_hand) in given.items():
        assert block == pytest.approx(by_hand, rel=1e-9), name


def test_a_micro_batch_is_the_model_on_a_part_of_the_batch():
    """k micro-batches have the same arithmetic, k times the gathers, one update, and the activations of one."""
    traced = trace(wide, *WIDE)
    p = SplitProblem.of(traced.graph, 2, None, "paper", "adam")
    mesh = mesh_from("2", 2)
    by_batch = {}
    for k in (1, 4):
        q = p.varied(traced, Variant(accumulate=k))
        (dp,) = baselines(q.graph, 2, q.machine, q.model, only=("data_parallel",))
        by_batch[k] = plan_of(q, dp.strategy, mesh, "wide", traced)
    one, four = by_batch[1], by_batch[4]
    assert sum(n.cost.compute for n in four.nodes) == pytest.approx(
        sum(n.cost.compute for n in one.nodes), rel=1e-3
    )
    assert four.communication == pytest.approx(4 * one.communication)
    assert four.memory.optimizer == one.memory.optimizer
    kept = {k: sum(n.keeps.get("gradients", 0) for n in by_batch[k].nodes) for k in by_batch}
    assert kept[4] == 2 * kept[1] and four.memory.gradients == kept[4]
    assert four.inputs["x"].shape == one.inputs["x"].shape == WIDE[1].shape
    assert four.memory.activations < one.memory.activations
    assert micro(traced, 4).graph.inputs[0].shape == (1024, 8)
