"""A pipelined plan of a PyTorch model, run by ``plan.torch``: losses, gradients and updated parameters equal those of
the model alone, in float64."""

from __future__ import annotations

import copy
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.cases.torch_ranks import alone_among, on_processes, on_ranks
from pase.errors import PaseError
from pase.pipeline.registry import SCHEDULES
from tests.backends.torch.pipeline.pipelines import (
    MICRO_BATCHES,
    RANKS,
    alone,
    branching,
    by_threads,
    check,
    compared,
    funnel,
    on_rank,
    planned,
    resumed,
    staged,
    words,
)

pytestmark = pytest.mark.torch
LAYERS = 4


@cache
def model() -> tuple[Any, ...]:
    """(module, batch, plan, the results of PyTorch alone)."""
    module, batch = words()
    return module, batch, planned(module, batch), alone(module, batch)


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_under_any_schedule_are_the_model_alone(name: str) -> None:
    """A step of AdamW. Labels are counted over all micro-batches, and embeddings are tied (zb-v and dualpipev have the
    first and the last stage on one rank). Each stage is split at random, and sums gradients either per micro-batch or
    once per step. Within stages, exactly the collectives on the plan's list are sent."""
    module, batch, plan, wanted = model()
    chunks, seed = max(SCHEDULES[name].chunks[0], 1), list(SCHEDULES).index(name)
    cuts = (1,) * LAYERS if chunks == 2 else ((1, 3), (2, 2), (3, 1))[seed % 3]
    check(staged(plan, name, chunks, cuts, seed), module, batch, wanted)


def test_a_model_without_equal_layers_is_cut_between_its_units() -> None:
    """With the cuts and splits that the plan chose."""
    module, batch = funnel()
    plan = planned(module, batch)
    assert plan.pipeline is not None and plan.pipeline.cut_points
    assert {len(s.enters) for s in plan.torch.stages} == {0, 1}
    check(plan, module, batch, alone(module, batch))


@pytest.mark.minutes
def test_branches_within_layers_run_in_stages() -> None:
    """What is sent is not compared, because the plan lists the messages of both branches."""
    module, batch = branching()
    plan, wanted = planned(module, batch), alone(module, batch)
    cuts = (1, sum(plan.pipeline.cuts) - 1)
    check(staged(plan, "1f1b", 1, cuts, 1), module, batch, wanted, counted=False)


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


def test_what_crosses_is_what_the_plan_says() -> None:
    """Bytes per micro-batch from a device of one stage to the next stage, and of gradients back."""
    import torch

    from pase.backends.torch.pipeline.p2p import Letter, StageLinks
    from pase.backends.torch.spmd.process_groups import AxisGroups

    for plan in (model()[2], planned(*funnel())):
        run, device = plan.torch, torch.device("cpu")
        groups = AxisGroups(mesh=plan.mesh, devices=None, place=(0,))  # type: ignore[arg-type]
        links = StageLinks(plan=run, groups=groups, device=device, rank=0, inner=0, channels={})
        for k, stage in enumerate(plan.pipeline.stages[:-1]):
            letters = Letter("there", k, k + 1, 0), Letter("back", k + 1, k, 0)
            there, back = (sum(x.nbytes for x in links.blank(letter)) for letter in letters)
            assert (there, back) == (stage.send_bytes, stage.back_bytes) and there and back


def test_recomputed_stages_are_the_model_alone() -> None:
    module, batch, _, wanted = model()
    plan = planned(module, batch, remat="all")
    assert plan.torch.splits[0].blocks
    check(staged(plan, "zb-h1", 1, (1, 3), 5), module, batch, wanted)


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
