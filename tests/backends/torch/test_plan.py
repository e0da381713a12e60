"""A plan run by PyTorch: loss, gradients, updated parameters and buffers equal those of the unsharded step, and exactly
the collectives on the plan's list are sent."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import alone_among
from pase.errors import Infeasible, PaseError
from tests.backends.torch.models import case
from tests.backends.torch.steps import BUCKET, one_step

pytestmark = pytest.mark.torch
RANKS = 4
MANY = 32
BLIND = ("random1@2x2", "random4@2x2")
STRATEGIES = {
    "block": (
        "data_parallel",
        "fsdp",
        "zero2",
        "megatron/megatron_2x2",
        "megatron/megatron_sp_2x2",
        "ours@2x2",
        *BLIND,
    ),
    "pixels": (
        "data_parallel",
        "random1@2x2",
        "random7@2x2",
    ),  # the random ones split dims along which a window moves
    "peaks": ("random1@2x2", "random3@2x2", "random5@2x2"),
    "pairs": ("data_parallel", "random2@2x2", "random5@2x2"),
    "t5": ("ours@2x2", "random1@2x2"),  # parts of masks that are not split are copied
    "experts": ("fsdp", "megatron/megatron_2x2", "random4@2x2", "random12@2x2"),
    "llama": ("fsdp", "megatron/megatron_sp_2x2", "megatron/megatron_1x4", "random1@2x2"),
    "gpt2": ("zero2", "megatron/megatron_sp_2x2"),
    "bert": ("fsdp", "random2@2x2"),
}
BLIND_AMONG_MANY = {"llama": ("random1@4x8",), "gpt2": ("random2@4x8",)}


def bytes_of(sent: Counter[tuple[str, tuple[str, ...], int]]) -> Counter[tuple[str, tuple[str, ...]]]:
    """(kind, mesh axes) -> bytes in a step."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for (kind, axes, nbytes), times in sent.items():
        found[kind, axes] += nbytes * times
    return found


PAIRS = [(m, s) for m, every in STRATEGIES.items() for s in every]


@pytest.mark.some(12)
@pytest.mark.parametrize(("model", "strategy"), PAIRS)
def test_the_step_is_the_unsharded_one(model: str, strategy: str) -> None:
    """In float64. Models of transformers always compute norms and losses in float32."""
    import torch

    c = case(model, RANKS)
    near = 2e-6 if model in ("llama", "gpt2", "bert", "t5") else 1e-12
    for loss, gradients, after in one_step(c, strategy):
        torch.testing.assert_close(loss, c.loss, rtol=near, atol=near)
        torch.testing.assert_close(gradients, c.gradients, rtol=near, atol=near)
        torch.testing.assert_close(after, c.after, rtol=near, atol=near)


@pytest.mark.some(2)
@pytest.mark.parametrize("strategy", ["data_parallel", "fsdp", "random1@2x2"])
def test_the_user_may_call_backward(strategy: str) -> None:
    """Each gradient is then sent by itself, where backward makes it."""
    import torch

    c = case("block", RANKS)
    for loss, gradients, after in one_step(c, strategy, at_once=False):
        torch.testing.assert_close(loss, c.loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients, c.gradients, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(after, c.after, rtol=1e-12, atol=1e-12)


@pytest.mark.some(2)
@pytest.mark.parametrize("model", STRATEGIES)
def test_what_is_sent_is_the_plans_list(model: str) -> None:
    """Every collective of a step, by kind, axes and bytes: on one rank of 32, on fake tensors."""
    from pase.backends.audit.torch import planned, planned_in_step, sent_by_one_rank

    c = case(model, MANY)
    simple = () if model in BLIND_AMONG_MANY else ("data_parallel", "zero2")
    for strategy in (*simple, "fsdp", "megatron/megatron_sp_8x4", *BLIND_AMONG_MANY.get(model, ())):
        plan = c.case.plan(strategy)
        if plan is None:
            continue
        run = replace(plan.torch, bucket_bytes=BUCKET)
        with alone_among(MANY, rank=5):
            sent = sent_by_one_rank(run)
        assert sent == planned_in_step(run), strategy
        assert bytes_of(sent) == bytes_of(planned(run.program)), strategy


def test_a_batch_written_into_the_code_is_not_cut() -> None:
    """An explicit number of micro-batches is an error. Under a memory limit, other variants are tried."""
    import torch
    from torch import nn

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return self.one(x.view(8, 4, 16)).square().mean()

    module, x = Fixed(), torch.randn(8, 64)
    with pytest.raises(PaseError, match="2 micro-batches") as e:
        pase.compile(module, x, devices=2, accumulate=2)
    assert e.value.where == "Fixed" and "batch size" in e.value.fix
    said: list[str] = []
    with pytest.raises(Infeasible):
        pase.compile(module, x, devices=2, memory_limit="1KiB", progress=said.append)
    assert any("one of 2 micro-batches" in line for line in said)


def test_a_saved_plan_finds_its_module_again(tmp_path: Path) -> None:
    import torch

    c = case("tower", RANKS)

    def loss(module: Any, x: Any, y: Any) -> Any:
        return 2.0 * module(x, y)

    made = pase.compile(c.module, *c.batch, devices=RANKS, loss=loss)
    made.save(tmp_path / "layout.json")
    loaded = pase.load(tmp_path / "layout.json")
    with pytest.raises(PaseError, match="loaded without its model") as e:
        _ = loaded.torch
    assert "plan.bind(module" in e.value.fix
    with pytest.raises(PaseError, match="not the model"):
        loaded.bind(torch.nn.Linear(3, 3), torch.ones(3, 3), loss=lambda m, x: m(x).sum())
    assert loaded.bind(c.module, *c.batch, loss=loss).torch.program == made.torch.program


def test_rows_and_experts_are_split() -> None:
    """The random strategies above include splits of the rows of a grouped product, of its experts, and of both."""
    program = {s: plan_program("experts", s) for s in STRATEGIES["experts"]}
    split = {
        (
            any(isinstance(x, tuple) and x[0] == 0 for x in op.operands[0].layout),
            any(isinstance(x, tuple) and x[0] == 0 for x in op.operands[1].layout),
        )
        for p in program.values()
        for op in p.ops
        if op.op.name == "ragged_dot"
    }
    assert split >= {(True, False), (False, True), (True, True)}


def plan_program(model: str, strategy: str) -> Any:
    plan = case(model, RANKS).case.plan(strategy)
    assert plan is not None
    return plan.torch.program


def test_what_does_not_fit_is_said() -> None:
    import torch

    c = case("tower", RANKS)
    plan = c.case.plan("fsdp")
    assert plan is not None
    with pytest.raises(PaseError) as e:
        plan.torch.parallelize(copy.deepcopy(c.module))
    assert e.value.where == "torch.distributed" and "torchrun" in e.value.fix
    with alone_among(2, rank=0), pytest.raises(PaseError, match="4 devices, but there are 2 ranks"):
        plan.torch.parallelize(copy.deepcopy(c.module))
    with alone_among(RANKS, rank=0):
        with pytest.raises(PaseError) as e:
            plan.torch.parallelize(torch.nn.Linear(3, 3))
        assert e.value.where.partition(".")[0] == "module"
        step = plan.torch.parallelize(copy.deepcopy(c.module))
        with pytest.raises(PaseError) as e:
            step(torch.ones(7, 4, 16).double(), c.batch[1])
        assert "input" in e.value.where and "[7, 4, 16]" in e.value.what
        with pytest.raises(PaseError, match="a batch of 2 tensors, but got 1"):
            step(c.batch[0])
    with pytest.raises(PaseError, match="read by the jax frontend"):
        _ = pase.compile("zoo:mlp", devices=2).torch
