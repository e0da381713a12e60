"""PyTorch steps in micro-batches with losses that are not means over the batch: the results are the whole batch's."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import alone_among, on_ranks
from pase.frontends.registry import NotInParts
from tests.backends.torch.models import case

pytestmark = pytest.mark.torch
RANKS = 4


def model() -> tuple[Any, Any, Any]:
    """A small language model, and labels some of which are ignored: their number differs between micro-batches, and one
    micro-batch has none that counts."""
    import torch
    from torch import nn

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.up, self.head = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, 24)

        def forward(self, ids: Any) -> Any:
            return self.head(torch.tanh(self.up(self.table(ids)))).view(-1, 24)

    torch.manual_seed(0)
    labels = torch.randint(24, (16, 4))
    labels[torch.rand(16, 4) < 0.3] = -100
    labels[::4] = -100  # all of the first micro-batch
    return Words().double(), torch.randint(24, (16, 4)), labels


def losses() -> dict[str, Any]:
    import torch
    from torch.nn.functional import cross_entropy, one_hot, softmax

    weight = torch.linspace(0.5, 2, 24, dtype=torch.float64)

    def entropy(m: Any, i: Any, y: Any, **kw: Any) -> Any:
        return cross_entropy(m(i), y.view(-1), **kw)

    return {
        "counted": entropy,
        "summed": lambda m, i, y: entropy(m, i, y, reduction="sum"),
        "weighted": lambda m, i, y: entropy(m, i, y, weight=weight),
        "smoothed": lambda m, i, y: entropy(m, i, y, label_smoothing=0.1),
        "both": lambda m, i, y: entropy(m, i, y, label_smoothing=0.1, weight=weight),
        "by hand": lambda m, i, y: entropy(m, i, y, reduction="sum") / (y != -100).sum().clamp(min=1),
        "by the batch's size": lambda m, i, y: entropy(m, i, y, reduction="sum") / i.shape[0],
        "each early": lambda m, i, y: (entropy(m, i, y, reduction="none") / i.numel()).sum(),
        "masked": lambda m, i, y: (
            m(i).square().mean(1) * ((y != -100).double() / (y != -100).sum()).view(-1)
        ).sum(),
        "two": lambda m, i, y: entropy(m, i, y) + entropy(m, i, i.where(i > 5, -100)),
        "decayed": lambda m, i, y: m(i).square().mean() + m.up.weight.square().sum(),
        "soft": lambda m, i, y: cross_entropy(m(i), softmax(one_hot(i, 24).double(), -1).view(-1, 24)),
    }


KINDS = (
    "counted",
    "summed",
    "weighted",
    "smoothed",
    "both",
    "by hand",
    "by the batch's size",
    "each early",
    "masked",
    "two",
    "decayed",
    "soft",
)
MESHES = {"counted": ("4", "2x2"), "both": ("1", "2x2")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_micro_batches_is_the_whole_batchs(kind: str) -> None:
    """Loss and gradients in float64. Exactly the collectives on the plan's list are sent."""
    import torch

    from pase.backends.audit.torch import planned, sent_by_one_rank

    module, ids, labels = model()
    loss = losses()[kind]
    alone = copy.deepcopy(module)
    whole = loss(alone, ids, labels)
    whole.backward()
    wanted = {k: p.grad for k, p in alone.named_parameters()}
    for mesh in MESHES.get(kind, ("2x2",)):
        ranks = 1 if mesh == "1" else RANKS
        run = pase.compile(
            module, ids, labels, loss=loss, devices=ranks, mesh=mesh, accumulate=4, memory_limit="none"
        ).torch
        assert run.program.ops and run.leaves and run.sums.outputs

        def on_rank(rank: int, run: Any = run) -> Any:
            mine = copy.deepcopy(module)
            made = run.parallelize(mine).backward(ids, labels)
            return made, {k: p.grad.full_tensor() for k, p in mine.named_parameters()}

        for got, gradients in on_ranks(ranks, on_rank):
            torch.testing.assert_close(got, whole.detach(), rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(gradients, wanted, rtol=1e-11, atol=1e-13)
        with alone_among(ranks, rank=ranks - 1):
            assert sent_by_one_rank(run) == planned(run.program)


def assert_equal_alone(module: Any, batch: tuple[Any, ...], loss: Any, accumulate: int, **kw: Any) -> None:
    """A step on one rank gives the loss and all gradients of the step without micro-batches."""
    import torch

    alone = copy.deepcopy(module)
    whole = alone(*batch) if loss is None else loss(alone, *batch)
    whole.backward()
    run = pase.compile(module, *batch, loss=loss, devices=1, accumulate=accumulate, memory_limit="none").torch
    assert run.leaves and run.sums.outputs

    def on_rank(rank: int) -> Any:
        mine = copy.deepcopy(module)
        made = run.parallelize(mine, **kw).backward(*batch)
        return made, {k: p.grad.full_tensor() for k, p in mine.named_parameters()}

    ((got, gradients),) = on_ranks(1, on_rank)
    torch.testing.assert_close(got, whole.detach(), rtol=1e-12, atol=1e-14)
    wanted = {k: p.grad for k, p in alone.named_parameters()}
    torch.testing.assert_close(gradients, wanted, rtol=1e-11, atol=1e-13)


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
        products[remat] = called.count("aten.bmm.default")
    assert products["none"] < products["all"]


@pytest.mark.parametrize("kind", ["counted", "summed", "by hand"])
def test_micro_batches_may_have_one_example_each(kind: str) -> None:
    module, *batch = model()
    assert_equal_alone(module, tuple(batch), losses()[kind], 16)


@pytest.mark.parametrize("accumulate", [4, 8])
def test_tokens_may_be_sorted_by_their_experts(accumulate: int) -> None:
    c = case("experts", 1)
    assert_equal_alone(c.module, c.batch, None, accumulate)


def assert_equal_on_ranks(c: Any, run: Any) -> None:
    """A step by each rank gives the loss and all gradients of the unsharded step."""
    import torch

    def on_rank(rank: int) -> Any:
        mine = copy.deepcopy(c.module)
        loss = run.parallelize(mine).backward(*c.batch)
        return loss, {k: p.grad.full_tensor() for k, p in mine.named_parameters()}

    for loss, gradients in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(loss, c.loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradients, c.gradients, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("what", ["light", "all"])
@pytest.mark.parametrize(
    "strategy", ["fsdp", "megatron/megatron_2x2", "megatron/megatron_sp_2x2", "random1@2x2"]
)
def test_light_work_is_computed_again_beside_biases(strategy: str, what: str) -> None:
    """Products keep their results, with or without an added bias. Loss, gradients and collectives are the plan's."""

    from pase.backends.audit.torch import planned, sent_by_one_rank
    from pase.compiler.problem.variants import recomputed

    c = case("tower", RANKS)
    plan = c.case.plan(strategy)
    assert plan is not None
    run = replace(plan.torch, blocks=recomputed(c.case.traced, what))
    products = [op.op.remat for op in run.program.ops if op.op.kind == "matmul"]
    assert len(run.blocks) == 3 and any(products) == (what == "all")
    assert run.leaves

    assert_equal_on_ranks(c, run)
    with alone_among(RANKS, rank=1):
        assert sent_by_one_rank(run) == planned(run.program)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_a_bucket_plan_joins_sums_of_gradients(again: bool) -> None:
    """Three messages instead of one per parameter, as recorded from what PyTorch issues; the results do not change."""

    from pase.backends.audit.torch import planned, sent_by_one_rank
    from pase.compiler.problem.variants import recomputed
    from pase.plan.buckets import holding, problem_of
    from pase.schedule.plan import BucketPlan, Message, Piece

    c = case("tower", RANKS)
    plan = c.case.plan("data_parallel")
    assert plan is not None
    problem = problem_of(plan)
    sums = list(range(len(problem.tensors)))
    assert {t.kind for t in problem.tensors} == {"all_reduce"}
    groups = [sums[:5], sums[5:11], sums[11:]]
    messages = tuple(
        Message(pieces=tuple(Piece(tensor=t, offset=0, nbytes=problem.tensors[t].nbytes) for t in group))
        for group in groups
    )
    run = holding(plan, problem, BucketPlan(policy="by hand", messages=messages)).torch
    if again:
        run = replace(run, blocks=recomputed(c.case.traced, "light"))
    assert run.program.messages and run.leaves
    with alone_among(RANKS, rank=1):
        sent = sent_by_one_rank(run)
    assert sent == planned(run.program) and sum(sent.values()) < sum(planned(plan.torch.program).values())
    large = sorted(n for kind, _, n in sent.elements() if kind == "all_reduce" and n > 8)
    assert len(large) == 3

    assert_equal_on_ranks(c, run)


def test_where_examples_meet_is_said() -> None:
    module, ids, _ = model()
    for loss in (
        lambda m, i: m(i).mean() + m(i).sum(),  # one summand is a mean over the batch, the other a sum
        lambda m, i: m(i).mean().exp(),
        lambda m, i: m(i).max(),
        lambda m, i: m(i).mean() / m(i).square().mean(),
    ):
        with pytest.raises(NotInParts):
            pase.compile(module, ids, loss=loss, devices=2, accumulate=2)


def test_a_buffer_that_follows_the_batch_is_refused_and_a_counter_is_not() -> None:
    import torch

    class Follows(torch.nn.Linear):
        def __init__(self, of_the_batch: bool) -> None:
            super().__init__(8, 8)
            self.of_the_batch = of_the_batch
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0) if self.of_the_batch else 1.0, alpha=0.1)
            return (super().forward(x) + self.mean).square().mean()

    x = torch.randn(16, 8)
    with pytest.raises(NotInParts, match=r"mean|div"):
        pase.compile(Follows(True), (x,), devices=2, accumulate=2)
    assert pase.compile(Follows(False), (x,), devices=2, accumulate=2).accumulate == 2


def test_views_that_take_the_batch_apart_are_said() -> None:
    """An example then meets other examples than in the whole batch: two views of each image, pairs of answers."""
    module, ids, _ = model()

    def halves(m: Any, i: Any) -> Any:
        one, other = m(i).chunk(2)
        return (one - other).square().mean()

    for loss in (
        halves,
        lambda m, i: m(i).view(2, -1).prod(0).mean(),
        lambda m, i: m(i.view(2, -1)).view(2, -1).prod(0).mean(),
        lambda m, i: m(i).reshape(2, i.shape[0] // 2, -1).diff(dim=0).square().mean(),
    ):
        with pytest.raises(NotInParts):
            pase.compile(module, ids, loss=loss, devices=1, accumulate=4)


def test_what_is_sorted_and_not_put_back_is_said() -> None:
    """An order of tokens, or the tokens' ranks in it, meets tokens in the order of the batch, or in another order."""
    module, ids, _ = model()

    def tokens(m: Any, i: Any) -> tuple[Any, Any, Any]:
        key, order = (i.reshape(-1) % 4).sort()
        return m(i).mean(1), key, order

    def met(join: Any) -> Any:
        return lambda m, i: join(*tokens(m, i), i).mean()

    for join in (
        lambda y, key, order, i: y[order] * y,
        lambda y, key, order, i: y[order] * y[i.reshape(-1).argsort()],
        lambda y, key, order, i: y[order][order] * y,
        lambda y, key, order, i: y[order.argsort()] * y[order],
        lambda y, key, order, i: y[key] * y,
        lambda y, key, order, i: y * order,
        lambda y, key, order, i: y[order].view(2, -1).prod(0),
        lambda y, key, order, i: y[order].cumsum(0),
        lambda y, key, order, i: y[order + 1 - 1] * key,
    ):
        with pytest.raises(NotInParts):
            pase.compile(module, ids, loss=met(join), devices=1, accumulate=4)
    for join in (
        lambda y, key, order, i: y[order] * key,
        lambda y, key, order, i: y[order][order.argsort()] * y,
    ):
        assert_equal_alone(module, (ids,), met(join), 4)


def test_constants_that_differ_with_the_batch_are_said() -> None:
    """They depend on the position of an example in the batch, or on the batch size."""
    import torch

    module, ids, _ = model()

    def places(i: Any) -> Any:
        return torch.arange(i.shape[0], dtype=torch.float64)

    def each(m: Any, i: Any) -> Any:
        return m(i).view(i.shape[0], -1).mean(1)

    for loss in (
        lambda m, i: (each(m, i) * places(i)).mean(),
        lambda m, i: (each(m, i) * torch.linspace(0.5, 2, i.shape[0])).mean(),
        lambda m, i: (each(m, i) * torch.arange(16)[: i.shape[0]]).mean(),
        lambda m, i: (each(m, i) * torch.arange(2).repeat(i.shape[0] // 2)).mean(),
        lambda m, i: torch.where(places(i) < 8, each(m, i), 0.0).mean(),
        lambda m, i: (m.table(torch.arange(i.shape[0])) * each(m, i)[:, None]).mean(),
        lambda m, i: m(i).sum() / torch.ones(i.shape[0]).sum(),
        lambda m, i: m(i).sum() / torch.ones_like(i, dtype=torch.float64).sum(),
        lambda m, i: m(i).sum() / (places(i).max() + 1),
        lambda m, i: m(i).sum() / torch.ops.aten.scalar_tensor(float(i.shape[0])),
    ):
        with pytest.raises(NotInParts):
            assert pase.compile(module, ids, loss=loss, devices=1, accumulate=4).torch.sums


def test_constants_that_are_the_same_for_every_example_are_taken() -> None:
    """Their sizes may depend on the batch: masks, positions, weights along other dims, random values."""
    import torch

    module, ids, _ = model()
    shift = torch.linspace(0.5, 2, 4, dtype=torch.float64)

    def each(m: Any, i: Any) -> Any:
        return m(i).view(*i.shape, -1).mean(2)

    for loss in (
        lambda m, i: (each(m, i) * torch.arange(4).expand(i.shape)).mean(),
        lambda m, i: (each(m, i) * torch.ones(i.shape, dtype=torch.float64).cumsum(1)).mean(),
        lambda m, i: (each(m, i) * torch.arange(4)[None].repeat(i.shape[0], 1)).mean(),
        lambda m, i: (each(m, i).view(-1) * torch.arange(4).repeat(i.shape[0])).mean(),
        lambda m, i: (each(m, i) * (1 - torch.zeros_like(i)) * shift).mean(),
        lambda m, i: torch.where(torch.ones(i.shape[0], 4, 4).tril()[:, 1] > 0, each(m, i), 0.0).mean(),
    ):
        alone = copy.deepcopy(module)
        whole = loss(alone, ids)
        run = pase.compile(module, ids, loss=loss, devices=1, accumulate=4).torch
        assert run.sums

        def on_rank(rank: int, run: Any = run) -> Any:
            return run.parallelize(copy.deepcopy(module)).backward(ids)

        (got,) = on_ranks(1, on_rank)
        torch.testing.assert_close(got, whole.detach(), rtol=1e-12, atol=1e-14)


def test_an_input_without_the_batch_is_not_cut() -> None:
    """This holds even if a rank's part of it is as long as its part of a micro-batch would be."""
    import torch
    from torch import nn

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(16, 16)

        def forward(self, x: Any, y: Any, scale: Any) -> Any:
            return nn.functional.mse_loss(self.one(x) * scale, y)

    torch.manual_seed(0)
    module = Scaled().double()
    x, y, scale = torch.randn(8, 16).double(), torch.randn(8, 16).double(), torch.randn(16).double()
    wanted = module(x, y, scale).detach()
    plan = pase.compile(module, x, y, scale, devices=RANKS, mesh="4", accumulate=4, memory_limit="none").torch
    (dim,) = (
        d.name for n in plan._graph.nodes if n.name.endswith("2") and n.kind == "input" for d in n.space
    )
    run = replace(plan, strategy={**{n: {} for n in plan.strategy}, "in.2": {dim: plan.mesh.names}})
    assert run.program.ops and run.leaves and run.sums and len(run.cut) == 2
    for got in on_ranks(RANKS, lambda rank: run.parallelize(copy.deepcopy(module)).backward(x, y, scale)):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
