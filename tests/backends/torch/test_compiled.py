"""Steps that ``torch.compile`` compiles: results are those of the step that is not compiled."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import alone_among, on_processes, on_ranks
from tests.backends.torch.micro_batches import assert_equal_alone, losses, model
from tests.backends.torch.models import case
from tests.backends.torch.steps import BUCKET

pytestmark = pytest.mark.torch
RANKS = 4


def test_a_compiled_step_counts_too() -> None:
    module, *batch = model()
    assert_equal_alone(module, tuple(batch), losses()["counted"], 4, compile="eager")


def test_a_compiled_step_drops_and_computes_again() -> None:
    """Each step and micro-batch has the masks of the step that is not compiled. Recomputed ops are in the graph
    twice."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop, self.down = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return x + self.down(self.drop(torch.tanh(self.up(x))))

    torch.manual_seed(0)
    module, x = nn.Sequential(*(Layer() for _ in range(3))).double(), torch.randn(8, 8).double()
    products = {}
    for remat in ("none", "all"):
        run = pase.compile(
            module, x, loss=lambda m, x: m(x).square().mean(), devices=1, accumulate=2, remat=remat
        ).torch
        assert run.leaves and run.sums.outputs and run.program.ops

        def on_rank(rank: int, compile: Any, run: Any = run) -> Any:
            mine = copy.deepcopy(module)
            step = run.parallelize(mine, compile=compile)
            step.seed = 7
            losses = [step.backward(x) for _ in range(2)]
            return losses, {k: p.grad.full_tensor() for k, p in mine.named_parameters()}, step._graph

        ((losses, gradients, graph),) = on_ranks(1, partial(on_rank, compile="eager"))
        ((plain, wanted, _),) = on_ranks(1, partial(on_rank, compile=False))
        assert losses[0] != losses[1]
        torch.testing.assert_close((losses, gradients), (plain, wanted), rtol=1e-12, atol=1e-14)
        called = [str(n.target) for n in graph.run._orig_mod.graph.nodes]
        products[remat] = sum(called.count(f"aten.{name}.default") for name in ("mm", "addmm"))
    assert products["none"] < products["all"]


def test_a_compiled_step_sends_gradients_beside_backward() -> None:
    """Its graph has the messages of the step that is not compiled, started where their last gradient is made."""
    from pase.backends.torch.spmd.messages import gradient_messages

    c = case("block", RANKS)
    plan = c.case.plan("data_parallel")
    assert plan is not None
    run = replace(plan.torch, bucket_bytes=2000.0)
    with alone_among(RANKS, rank=1):
        step = run.parallelize(copy.deepcopy(c.module), compile="eager")
        step.backward(*c.batch)
        nodes = [str(n.target) for n in step._graph.run._orig_mod.graph.nodes]
    messages = gradient_messages(run.program, 2000.0)
    started = [i for i, n in enumerate(nodes) if "c10d" in n and "wait" not in n]
    waited = [i for i, n in enumerate(nodes) if "wait_tensor" in n]
    products = [i for i, n in enumerate(nodes) if n == "aten.mm.default"]
    mine, waits = started[-len(messages) :], waited[-len(messages) :]
    assert len(messages) > 4 and sum(i < products[-1] for i in mine) > 2
    assert waits[0] > max(*mine, *products)


def test_a_compiled_step_is_the_unsharded_one() -> None:
    """On two processes, with several messages."""
    assert max(on_processes(2, differences_of_compiled, "forkserver", seconds=300.0)) < 1e-12


def differences_of_compiled(rank: int) -> float:
    """The largest difference of a rank's gradients."""
    import torch

    c = case("tower", 2)
    plan = c.case.plan("fsdp")
    assert plan is not None
    mine = copy.deepcopy(c.module)
    step = replace(plan.torch, bucket_bytes=BUCKET).parallelize(mine, compile="aot_eager")
    step.backward(*c.batch)
    found = {k: p.grad.full_tensor() for k, p in mine.named_parameters()}
    assert found.keys() == c.gradients.keys()
    assert all(torch.isfinite(g).all() for g in found.values())
    return max(float((found[k] - c.gradients[k]).abs().max()) for k in found)
