"""A pipelined plan of a PyTorch model, run by ``plan.torch``: losses, gradients and updated parameters are those of the
model alone, in float64."""

from __future__ import annotations

import copy
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from bench.cases.torch_ranks import alone_among, on_processes
from pase.errors import PaseError
from tests.backends.torch_pipelines import (
    MICRO_BATCHES,
    RANKS,
    alone,
    check,
    compared,
    funnel,
    on_rank,
    planned,
    staged,
    words,
)

pytestmark = pytest.mark.torch
CASES = (
    ("1f1b", 1, (1, 3), 0),
    ("gpipe", 1, (3, 1), 1),
    ("interleaved", 2, (1, 1, 1, 1), 2),
    ("zb-h1", 1, (2, 2), 3),
    ("zb-v", 2, (1, 1, 1, 1), 4),  # the first and the last stage are on one rank
)


@cache
def model() -> tuple[Any, ...]:
    """(module, batch, plan, what PyTorch alone makes of it)."""
    module, batch = words()
    return module, batch, planned(module, batch), alone(module, batch)


@pytest.mark.parametrize(("name", "chunks", "cuts", "seed"), CASES)
def test_stages_under_any_schedule_are_the_model_alone(
    name: str, chunks: int, cuts: tuple[int, ...], seed: int
) -> None:
    """Two steps of AdamW; labels are counted over all micro-batches, and embeddings are tied. Each stage is split at
    random."""
    module, batch, plan, wanted = model()
    check(staged(plan, name, chunks, cuts, seed), module, batch, wanted)


def test_a_model_without_equal_layers_is_cut_between_its_units() -> None:
    """The plan's own cuts and splits."""
    module, batch = funnel()
    plan = planned(module, batch)
    assert plan.pipeline is not None and plan.pipeline.narrow
    assert {len(s.enters) for s in plan.torch.stages} == {0, 1}
    check(plan, module, batch, alone(module, batch))


def test_recomputed_stages_are_the_model_alone() -> None:
    module, batch, _, wanted = model()
    plan = planned(module, batch, remat="all")
    assert plan.torch.splits[0].blocks
    check(staged(plan, "zb-h1", 1, (1, 3), 5), module, batch, wanted)


def in_processes() -> list[dict[str, Any]]:
    """What four processes make of a plan; called where ``backward`` has not run yet, so that they can be forked."""
    module, batch = words()
    run = staged(planned(module, batch), "1f1b", 1, (1, 3), 0).torch
    assert run.stages and run.splits[0].mesh.devices == 2
    return on_processes(2 * RANKS, lambda rank: on_rank(run, module, batch), "fork", 300)


def test_four_processes_give_the_same() -> None:
    """Over Gloo: two stages, each on two ranks."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as alone_there:
        compared(alone_there.submit(in_processes).result(), model()[-1])


def test_what_stages_cannot_do_is_said() -> None:
    import torch

    module, _, plan, _ = model()
    with pytest.raises(PaseError, match="cannot be compiled yet"):
        plan.torch.parallelize(copy.deepcopy(module), compile=True)
    with alone_among(2, rank=0), pytest.raises(PaseError, match="for 4 devices, but there are 2 ranks"):
        plan.torch.parallelize(copy.deepcopy(module))
    uneven = replace(plan, pipeline=replace(plan.pipeline, groups=("fast", "slow")))
    with pytest.raises(PaseError, match="ranks on unequal groups of devices, which"):
        _ = uneven.torch

    class Counted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
            self.register_buffer("seen", torch.zeros(16))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            self.seen += self.layers[0].bias.detach()
            return x.square().mean()

    counted, x = Counted(), torch.randn(4 * MICRO_BATCHES, 16)
    with pytest.raises(PaseError, match="stages cannot write buffers yet"):
        _ = planned(counted, (x,)).torch
