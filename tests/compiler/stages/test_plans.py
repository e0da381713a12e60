"""What a pipelined plan states, and who reads it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pase.backends.registry import emit
from pase.errors import PaseError
from pase.files.codec import to_tree
from pase.plan.layout import from_json
from pase.questions.sensitivity import sensitivity
from tests.command import printed, reported
from tests.compiler.stages.staged import SCANNED, staged


def test_a_pipelined_plan_states_its_stages_its_bound_and_what_else_there_is():
    plan = staged()
    p = plan.pipeline
    assert p is not None and p.degree == 2 and p.micro_batches == plan.accumulate == 4
    assert sum(p.cuts) == 8 and len(p.stages) == len(p.cuts) == 2 * p.chunks
    assert plan.bound <= p.cuts_bound * (1 + 1e-6) and p.cuts_bound <= plan.cost * (1 + 1e-9)
    assert all(s >= plan.cost * (1 - 2e-3) for s in p.others.values()) and {"1f1b", "gpipe"} <= set(p.others)
    # A rank's own work is at most the step. The mean over ranks is the step without the bubble.
    work = np.bincount([s.rank for s in p.stages], [4 * (s.forward_s + s.backward_s) for s in p.stages])
    assert work.max() <= plan.cost and 1 - work.mean() / plan.cost == pytest.approx(p.bubble)
    assert work.max() / work.mean() - 1 == pytest.approx(p.imbalance)
    text = str(plan)
    assert "2 ranks" in text and "bubble" in text and "runs it in JAX, stage by stage" in text
    assert from_json(json.loads(json.dumps(to_tree_of(plan)))).pipeline == p


def to_tree_of(plan):  # type: ignore[no-untyped-def]
    from pase.plan.layout import to_json

    return to_tree(to_json(plan))


def test_what_does_not_take_it_says_so(tmp_path):
    plan = staged()
    for attempt in (
        lambda: emit(plan, "dtensor", tmp_path / "x"),
        plan.scheduled,
        lambda: plan.bucket_plan,
    ):
        with pytest.raises(PaseError, match=r"pipeline .2 ranks") as e:
            attempt()
        assert e.value.where.startswith("the plan for 'zoo:llama3_8b") and "plan.jax" in e.value.fix


@pytest.mark.torch
def test_pytorch_reads_its_schedule(tmp_path):
    """PyTorch's own check, sends and receives, and simulation accept every list."""
    from torch.distributed.pipelining import schedules as torch_schedules

    plan, p = staged(), staged().pipeline
    for name, chunks in [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("zb-h1", 1),
        ("zb-v", 2),
        ("dualpipev", 2),
    ]:
        stages = (p.stages * 2)[: 2 * chunks]
        other = replace(p, schedule=name, chunks=chunks, stages=stages, cuts=(1,) * len(stages))
        said = emit(replace(plan, pipeline=other), "torch-schedule", tmp_path / "schedule.csv")
        lines = (tmp_path / "schedule.csv").read_text().splitlines()
        actions = {
            r: [torch_schedules._Action.from_str(a) for a in row.split(",")] for r, row in enumerate(lines)
        }
        ranks = torch_schedules._validate_schedule(actions, 2, 2 * chunks, 4)
        assert (
            f"{name}; ranks of stages 0 … {2 * chunks - 1}: {', '.join(str(ranks[k]) for k in sorted(ranks))}"
            in said
        )
        sent = torch_schedules._add_send_recv(actions, lambda s, of=ranks: of[s], 2 * chunks)
        torch_schedules._simulate_comms_compute(sent, lambda s, of=ranks: of[s], 2 * chunks)
    with pytest.raises(PaseError, match="pipeline=N"):
        emit(replace(plan, pipeline=None), "torch-schedule", tmp_path / "none.csv")


def test_explain_says_the_bubble_and_what_other_schedules_would_cost(tmp_path):
    staged().save(tmp_path / "layout.json")
    text = printed("explain", tmp_path / "layout.json")
    assert "bubble" in text and "imbalance" in text and "other schedules, each with its own best cuts" in text
    assert "alternatives are not priced for a pipelined plan" in " ".join(text.split())
    told = reported("explain", tmp_path / "layout.json")["pipeline"]
    assert told["degree"] == 2 and told["others"] == dict(staged().pipeline.others)
    with pytest.raises(PaseError, match="leave out pipeline=2"):
        sensitivity(SCANNED, devices=8, pipeline=2, vary=["bandwidth=1,2"])


def test_a_layout_whose_stages_do_not_agree_is_refused():
    tree = to_tree_of(staged())
    tree["pipeline"]["degree"] = 4
    with pytest.raises(PaseError, match="not 8 devices in 4 ranks") as e:
        from_json(tree)
    assert e.value.where == "layout: at mesh"
    tree = to_tree_of(staged())
    tree["pipeline"]["stages"][0]["strategy"] = 99
    with pytest.raises(PaseError, match="strategy 99") as e:
        from_json(tree)
    assert e.value.where == "layout: at pipeline/stages/0"
