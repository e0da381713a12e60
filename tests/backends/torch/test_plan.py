"""A plan run by PyTorch: loss, gradients, updated parameters and buffers equal those of the unsharded step, and exactly
the collectives on the plan's list are sent."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import alone_among, on_ranks
from pase.errors import Infeasible, PaseError
from tests.backends.torch.models import TorchCase, case, optimizer, tower_of

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
    "experts": ("fsdp", "megatron/megatron_2x2", "random4@2x2", "random12@2x2"),
    "llama": ("fsdp", "megatron/megatron_sp_2x2", "random1@2x2"),
    "gpt2": ("zero2", "megatron/megatron_sp_2x2"),
    "bert": ("fsdp", "random2@2x2"),
}
BLIND_AMONG_MANY = {"llama": ("random1@4x8",), "gpt2": ("random2@4x8",)}
PAIRS = [(m, s) for m, every in STRATEGIES.items() for s in every]


def whole(t: Any) -> Any:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def one_step(c: TorchCase, strategy: str) -> list[Any]:
    """On each rank: loss, gradients, and the whole state after an update."""
    plan = c.case.plan(strategy)
    assert plan is not None, f"no strategy {strategy}"
    run = plan.torch
    assert run.program.ops and run.leaves  # computed once here, not once per thread

    def on_rank(rank: int) -> Any:
        module = copy.deepcopy(c.module)
        step = run.parallelize(module)
        loss = step(*c.batch)
        loss.backward()
        gradients = {k: whole(p.grad) for k, p in module.named_parameters() if p.grad is not None}
        optimizer(module.parameters()).step()
        return loss.detach(), gradients, {k: whole(t) for k, t in module.state_dict().items()}

    return on_ranks(RANKS, on_rank)


@pytest.mark.parametrize(("model", "strategy"), PAIRS)
def test_the_step_is_the_unsharded_one(model: str, strategy: str) -> None:
    """In float64. Models of transformers always compute norms and losses in float32."""
    import torch

    c = case(model, RANKS)
    near = 2e-6 if model in ("llama", "gpt2", "bert") else 1e-12
    for loss, gradients, after in one_step(c, strategy):
        torch.testing.assert_close(loss, c.loss, rtol=near, atol=near)
        torch.testing.assert_close(gradients, c.gradients, rtol=near, atol=near)
        torch.testing.assert_close(after, c.after, rtol=near, atol=near)


@pytest.mark.parametrize("model", STRATEGIES)
def test_what_is_sent_is_the_plans_list(model: str) -> None:
    """Every collective of a step, by kind, axes and bytes: on one rank of 32, on fake tensors."""
    from pase.backends.audit.torch import planned, sent_by_one_rank

    c = case(model, MANY)
    for strategy in (
        "data_parallel",
        "fsdp",
        "zero2",
        "megatron/megatron_sp_8x4",
        *BLIND_AMONG_MANY.get(model, ()),
    ):
        plan = c.case.plan(strategy)
        if plan is None:
            continue
        with alone_among(MANY, rank=5):
            sent = sent_by_one_rank(plan.torch)
        assert sent == planned(plan.torch.program), strategy


@pytest.mark.parametrize("mesh", ["4", "2x2"])
def test_keys_and_values_go_around_the_ranks_that_share_positions(mesh: str) -> None:
    """Context parallelism: the loss and gradients are those of the unsharded step. The bytes are those on the plan's
    list. (Under a causal mask, the chunks that are exchanged before and after take more messages than the list has.)"""
    import numpy as np
    import torch

    from pase.api import Plan
    from pase.backends.audit.torch import planned, sent_by_one_rank
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

    assert by_axes(sent) == by_axes(planned(plan.program))
    assert any(kind == "permute" for kind, *_ in sent)


def test_a_ring_goes_around_in_the_order_of_the_parts() -> None:
    """Keys whose parts are in another order than the ranks of the group are refused."""
    import torch

    from pase.backends.torch.spmd.process_groups import AxisGroups
    from pase.backends.torch.spmd.rules import RankCall, evaluate
    from pase.backends.torch.spmd.values import NotOnParts
    from pase.machine import Mesh

    mesh = Mesh(names=("x", "y"), sizes=(2, 2))
    part, groups = torch.ones(1, 2, 4, 8), AxisGroups(mesh=mesh, devices=None, place=(0, 0))  # type: ignore[arg-type]
    laid = {n: ((1, 2, 16, 8), ((2, 4), (2, 2))) for n in ("query", "key", "value")}
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


def test_rows_of_neighbours_are_one_message() -> None:
    """On every rank, including those at an end: exactly the plan's list."""
    from pase.backends.audit.torch import planned, sent_by_one_rank

    for ranks in (RANKS, 8):
        plan = case("pixels", ranks).case.plan(f"random1@{ranks // 2}x2")
        assert plan is not None
        program = plan.torch.program
        assert any(o.halo for op in program.ops for o in op.operands)
        for rank in range(ranks):
            with alone_among(ranks, rank=rank):
                assert sent_by_one_rank(plan.torch) == planned(program)


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
@pytest.mark.parametrize(
    "less", [{"remat": "all"}, {"accumulate": 4, "remat": "all"}, {"accumulate": 2}], ids=str
)
def test_micro_batches_and_recomputation_change_nothing(less: dict[str, Any], marked: bool) -> None:
    """The same holds if the model itself uses torch.utils.checkpoint. Recomputed collectives are on the plan's list."""
    import torch

    from pase.backends.audit.torch import planned, sent_by_one_rank

    torch.manual_seed(0)
    module, batch = tower_of(3, marked=marked)
    alone = copy.deepcopy(module)
    loss = alone(*batch)
    loss.backward()
    plan = pase.compile(module, batch, devices=RANKS, mesh="2x2", memory_limit="none", **less)
    run = plan.torch
    assert (plan.accumulate, len(run.traced.marked) + len(run.blocks)) == (
        less.get("accumulate", 1),
        3 if marked or "remat" in less else 0,
    )
    assert run.program.ops and run.leaves

    def on_rank(rank: int) -> Any:
        mine = copy.deepcopy(module)
        return run.parallelize(mine).backward(*batch), {k: whole(p.grad) for k, p in mine.named_parameters()}

    for got, gradients in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(got, loss.detach())
        torch.testing.assert_close(gradients, {k: p.grad for k, p in alone.named_parameters()})
    with alone_among(RANKS, rank=1):
        assert sent_by_one_rank(run) == planned(run.program)


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


def test_what_is_random_is_one_draw() -> None:
    """A dropout's mask does not depend on how the model is split, nor on the ranks' own random states."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.drop, self.b = nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 16)

        def forward(self, x: Any) -> Any:
            return self.b(self.drop(self.a(x))).square().mean()

    torch.manual_seed(0)
    module, x = Net(), torch.randn(8, 16)

    def losses(mesh: str, ranks: int) -> list[float]:
        run = pase.compile(module, x, devices=ranks, mesh=mesh).torch
        assert run.program.ops and run.leaves

        def on_rank(rank: int) -> list[float]:
            step = run.parallelize(copy.deepcopy(module))
            step.seed = 7
            return [float(step(x)) for _ in range(2)]

        first, *others = on_ranks(ranks, on_rank)
        assert all(o == first for o in others)
        return first

    alone = losses("1", 1)
    assert alone[0] != alone[1]
    assert losses("2x2", 4) == pytest.approx(alone, rel=1e-5)


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


def test_what_an_axis_holds_may_go_to_places_that_overlap() -> None:
    """A reshard between parts that do not nest is one collective, and every element arrives where the layout has it.
    Here, an axis of size four changes from one digit of a dim to another that overlaps with it."""
    import torch

    from pase.backends.audit.torch import recorded
    from pase.backends.torch.spmd.collectives import resharded
    from pase.backends.torch.spmd.process_groups import axis_groups
    from pase.local.parts import NotNested, digits, held
    from pase.local.types import LocalReshardStep
    from pase.machine import Mesh

    mesh, shape = Mesh(names=("x",), sizes=(4,)), (16, 3)
    high, low = ((0, 4),), ((0, 8),)
    with pytest.raises(NotNested):
        digits(shape, high, low, mesh)
    whole = torch.arange(48.0).reshape(shape)

    def on_rank(rank: int) -> Any:
        groups = axis_groups(mesh, [("x",)], "cpu")
        mine = {s: whole[torch.from_numpy(held(shape, s, (rank,), mesh)[0])] for s in (high, low)}
        out = []
        with recorded(groups) as found:
            for before, after in ((high, low), (low, high)):
                move = LocalReshardStep(kind="all_to_all", axes=("x",), before=before, after=after, nbytes=48)
                out.append(torch.equal(resharded(mine[before], [move], shape, "sum", groups), mine[after]))
        return out, dict(found.sent)

    for same, sent in on_ranks(4, on_rank):
        assert same == [True, True]
        assert sent == {("all_to_all", ("x",), 48): 2}


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
