"""A PyTorch model's pipelined plan, run by PyTorch's own pipeline runtime on two Gloo processes. The results equal
those of the model alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import pase
from bench.cases.torch_ranks import on_processes
from pase.backends.registry import emit
from pase.pipeline.registry import SCHEDULES, schedule
from tests.backends.emit.torch_stages import LAYERS, MICRO_BATCHES, Staged, model, run

pytestmark = pytest.mark.torch
RANKS = 2
RUN = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))


def test_its_schedule_runs_and_gives_the_numbers_of_the_model_alone(tmp_path: Path) -> None:
    """This includes the schedule that the search chose, with its cuts. Stages of other schedules are cut unequally."""
    module, x, y = model()
    plan = pase.compile(
        module,
        x,
        y,
        devices=RANKS,
        pipeline=RANKS,
        baselines=False,
        accumulate=MICRO_BATCHES,
        memory_limit="none",
    )
    p = plan.pipeline
    assert p is not None and sum(p.cuts) == LAYERS and p.schedule in SCHEDULES
    assert "torch.distributed.pipelining" in str(plan) and "plan.jax" not in str(plan)
    staged = []
    for name, chunks, cuts in [
        (p.schedule, p.chunks, p.cuts),
        *(
            (n, c, (LAYERS - 2 * RANKS * c + 2, *[2] * (RANKS * c - 1)) if c == 1 else (1, 3, 2, 2))
            for n, c in RUN
        ),
    ]:
        stages = (p.stages * RANKS * chunks)[: RANKS * chunks]
        other = replace(p, schedule=name, chunks=chunks, cuts=cuts, stages=stages)
        file = tmp_path / f"{len(staged)}.csv"
        emit(replace(plan, pipeline=other), "torch-schedule", file)
        ranks = schedule(name, RANKS, MICRO_BATCHES, chunks).rank_of
        staged.append(Staged(name, file, cuts, ranks))
    loss = module(x, y)
    loss.backward()
    alone = {k: w.grad.flatten().tolist() for k, w in module.named_parameters()}
    for plan_run, *ranks_made in zip(
        staged, *on_processes(RANKS, partial(run, staged), "forkserver"), strict=True
    ):
        made = {k: v for one in ranks_made for k, v in one.items() if k != "losses"}
        losses = [v for one in ranks_made for v in one["losses"]]
        assert sum(losses) / MICRO_BATCHES == pytest.approx(float(loss), rel=1e-12), plan_run.name
        assert made.keys() == alone.keys()
        for k, v in alone.items():
            assert made[k] == pytest.approx(v, rel=1e-10, abs=1e-14), (plan_run.name, k)
