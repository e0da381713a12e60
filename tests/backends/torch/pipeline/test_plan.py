"""A pipelined plan of a PyTorch model, run by ``plan.torch``: losses, gradients and updated parameters equal those of
the model alone, in float64."""

from __future__ import annotations

import copy
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cases.torch_ranks import alone_among, on_processes, on_ranks
from pase.errors import PaseError
from tests.backends.torch.pipeline.pipelines import (
    MICRO_BATCHES,
    RANKS,
    alone,
    by_threads,
    compared,
    model,
    on_rank,
    planned,
    resumed,
    staged,
    words,
)

pytestmark = pytest.mark.torch


def test_a_checkpoint_of_stages_is_read_under_other_stages(tmp_path: Path) -> None:
    """A checkpoint has the parameters, and the optimizer's state by the parameters' names."""
    module, batch, plan, _ = model()
    before, after = (
        staged(plan, *how).torch for how in (("1f1b", 1, (1, 3), 0), ("zb-v", 2, (1, 1, 1, 1), 1))
    )
    assert all(s.program.ops and s.sums for run in (before, after) for s in run.splits if run.stages)
    with by_threads():
        made = on_ranks(2 * RANKS, lambda rank: resumed(before, after, module, batch, tmp_path))
    compared(made, {k: v for k, v in alone(module, batch, steps=2).items() if k.startswith("after")})


def in_processes() -> list[dict[str, Any]]:
    """The results of four processes. It must be called before ``backward`` has run, so that they can be forked."""
    module, batch = words()
    run = staged(planned(module, batch), "1f1b", 1, (1, 3), 0).torch
    assert run.stages and run.splits[0].mesh.devices == 2
    return on_processes(2 * RANKS, lambda rank: on_rank(run, module, batch), "fork", 300)


@pytest.mark.minutes
def test_four_processes_give_the_same() -> None:
    """Over Gloo: two stages, each on two ranks."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as alone_there:
        compared(alone_there.submit(in_processes).result(), model()[-1])


def test_what_stages_cannot_do_is_said() -> None:
    import torch

    module, _, plan, _ = model()
    with pytest.raises(PaseError) as e:
        plan.torch.parallelize(copy.deepcopy(module), compile=True)
    assert e.value.where == "compile" and "compile=False" in e.value.fix
    for name, ask in (("code", plan.torch.code), ("memory", plan.torch.memory)):
        with pytest.raises(PaseError) as e:
            ask(rank=1)
        assert e.value.where == f"plan.torch.{name}" and "pipeline='none'" in e.value.fix
    with alone_among(2, rank=0), pytest.raises(PaseError, match="for 4 devices, but there are 2 ranks"):
        plan.torch.parallelize(copy.deepcopy(module))
    uneven = replace(plan, pipeline=replace(plan.pipeline, groups=("fast", "slow")))
    with pytest.raises(PaseError, match="unequal groups"):
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
    with pytest.raises(PaseError) as e:
        _ = planned(counted, (x,)).torch
    assert "'seen'" in e.value.what and "pipeline='none'" in e.value.fix
