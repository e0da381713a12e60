"""Bucket plans in PyTorch: two Gloo processes, each running `ddp_hook_worker`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cases.schedules import link
from pase.backends.emit.ddp_hook import BucketHook, ddp_options, gradient_problem
from pase.errors import PaseError
from pase.schedule import BucketPlan, Options, Update, get_policy, whole

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[3]
WORLD = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("torch")
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.backends.emit.ddp_hook_worker",
                str(r),
                str(WORLD),
                f"{folder}/store",
                f"{folder}/out",
            ],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(WORLD)
    ]
    errors = [p.communicate(timeout=240)[1] for p in running]
    assert [p.returncode for p in running] == [0] * WORLD, "\n".join(errors)
    return [json.loads((folder / f"out.{r}").read_text()) for r in range(WORLD)]


@pytest.mark.parametrize("run", ["plan ddp", "plan bytescheduler", "plan ours", "usual", "large buckets"])
def test_without_staleness_it_is_ddp_to_the_bit(ranks: list[dict[str, Any]], run: str) -> None:
    """Fused and cut messages, two links (process groups), small and large buckets of DDP, and both ``step`` methods."""
    assert all(r[run] == r["ddp"] for r in ranks)


@pytest.mark.parametrize("run", ["late by one", "two merged", "one, two, one"])
def test_delayed_and_merged_updates_are_the_same_by_hand(ranks: list[dict[str, Any]], run: str) -> None:
    """With momentum and weight decay, which would change the weights even if gradients of skipped steps were zero."""
    for r in ranks:
        assert r[run] == pytest.approx(r[f"hand {run}"], rel=1e-5, abs=1e-7)
        assert r[run] != pytest.approx(r["ddp"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("policy", ["ddp", "bytescheduler", "ours"])
def test_all_ranks_issue_the_plans_one_order(ranks: list[dict[str, Any]], policy: str) -> None:
    log = ranks[0][f"log {policy}"]
    n = ranks[0][f"messages {policy}"]
    assert all(r[f"log {policy}"] == log for r in ranks)
    assert log == [[it, m] for it in range(7) for m in range(n)]
    assert n > 1 or policy == "ddp"


def module() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


class Group:
    """The part of a process group that the checks before a run use."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


def test_bucket_sizes_for_ddp_without_a_hook() -> None:
    problem = gradient_problem(module(), (link(alpha_s=1e-6, beta=1e-9),), forward_s=1e-6, backward_s=2e-6)
    messages = (whole(problem, [3, 2]), whole(problem, [1, 0]))
    options = ddp_options(problem, BucketPlan(policy="x", messages=messages))
    sizes = [m.nbytes / 2**20 for m in messages]
    assert options in ({"bucket_cap_mb_list": sizes}, {"bucket_cap_mb": max(sizes)})


def test_what_it_cannot_run_is_said() -> None:
    import torch

    m = module()
    problem = gradient_problem(m, (link("net"),), forward_s=1.0, backward_s=2.0)
    assert [t.name for t in problem.tensors] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    plan = get_policy("fifo").make(problem, Options())

    def hook(**changed: Any) -> BucketHook:
        given = {"module": m, "problem": problem, "plan": plan, "group": Group(2), "groups": {}}
        return BucketHook(**(given | changed))

    scattered = replace(problem, tensors=tuple(replace(t, kind="reduce_scatter") for t in problem.tensors))
    late = replace(plan, updates=(Update(first=1, last=1, at=1),))
    for changed, where, texts in (
        ({"problem": scattered}, "problem 'model'", ("'0.weight'", "reduce_scatter")),
        ({"module": torch.nn.Linear(3, 4)}, "problem 'model'", ("'0.weight'", "weight, bias")),
        (
            {"module": torch.nn.Sequential(*m, torch.nn.Linear(2, 1))},
            "problem 'model'",
            ("2.bias, 2.weight",),
        ),
        ({"groups": {"tape": Group(2)}}, "groups", ("'tape'",)),
        ({"groups": {"net": Group(3)}}, "groups", ("'net'", "3 ranks")),
        ({"plan": late}, "plan 'fifo'", ("iteration 0",)),
    ):
        with pytest.raises(PaseError) as e:
            hook(**changed)
        assert e.value.where == where and all(t in e.value.what for t in texts), str(e.value)
    delayed = hook(plan=replace(plan, updates=(Update(first=0, last=0, at=1),)))
    with pytest.raises(PaseError) as e:
        delayed.step(torch.optim.SGD(m.parameters(), lr=0.1))
    assert "backward" in e.value.fix


class Bucket:
    """The part of DDP's bucket that the hook uses: one parameter's gradient."""

    def __init__(self, parameter: Any) -> None:
        import torch

        self.parameter, self.gradient = parameter, torch.ones(parameter.numel())

    def parameters(self) -> list[Any]:
        return [self.parameter]

    def gradients(self) -> list[Any]:
        return [self.gradient]

    def buffer(self) -> Any:
        return self.gradient

    def is_last(self) -> bool:
        return False


def test_a_bucket_waits_for_messages_that_arrive_meanwhile() -> None:
    """Messages arrive on another thread, which replaces the list of buckets under a lock. Without the lock, a bucket
    that is added at the same time was sometimes lost, and backward waited forever."""
    m = module()
    problem = gradient_problem(m, (link("net"),), forward_s=1.0, backward_s=2.0)
    plan = get_policy("fifo").make(
        problem,
        Options(),
    )  # sends the last layer's gradients first, so nothing is sent here
    hook = BucketHook(module=m, problem=problem, plan=plan, group=Group(2), groups={})
    handing = threading.Thread(target=hook.on_bucket, args=(Bucket(m[0].weight),))
    with hook._lock:  # as held while a message arrives
        handing.start()
        handing.join(0.2)
        assert handing.is_alive()
        assert not hook._buckets
    handing.join(10)
    assert len(hook._buckets) == 1
