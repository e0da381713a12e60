"""Constants of a step: each is computed once and whole, and one that would need data is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import pase
from bench.cases.plans import Case
from bench.cases.torch_ranks import alone_among, on_ranks
from pase import machine
from pase.backends.torch.spmd.constants import Constants, NodeIndex
from pase.backends.torch.spmd.values import NotOnParts
from pase.compiler.problem.problem import SplitProblem
from pase.frontends import registry
from pase.frontends.common.values import Value
from pase.frontends.torch.values import TorchScope
from pase.ir import Tensor

pytestmark = pytest.mark.torch


def graph() -> tuple[Any, dict[str, Any]]:
    """A graph of a buffer and an input of the step: (graph, its nodes by name)."""
    import torch

    g = torch.fx.Graph()
    buffer, x = g.placeholder("buffer"), g.placeholder("x")
    x.meta["val"] = torch.zeros(3, dtype=torch.float64)
    aten = torch.ops.aten
    made = {
        "buffer": buffer,
        "x": x,
        "doubled": g.call_function(aten.mul.Tensor, (buffer, 2)),
        "zeros": g.call_function(aten.zeros_like.default, (x,)),
        "drawn": g.call_function(aten.rand.default, ([4],)),
        "typed": g.call_function(aten.type_as.default, (buffer, x)),
        "reads": g.call_function(aten.neg.default, (x,)),
        "reads typed": g.call_function(aten.type_as.default, (x, buffer)),
    }
    return g, made


def constants(g: Any, made: dict[str, Any], seed: int = 0) -> Constants:
    import torch

    data = Value(
        shape=(3,), dtype="float64", tensor=Tensor(name="t", shape=(3,), dtype="float64", role="input")
    )
    scope = TorchScope(nodes=list(g.nodes), values={made["x"]: data})
    return Constants(
        index=NodeIndex(scope=scope, data=frozenset({"t"})),
        buffers={"buffer": torch.tensor([1.0, 2.0])},
        device=torch.device("cpu"),
        seed_at=lambda path: seed + len(path),
    )


def test_a_constant_is_computed_once_from_the_buffers() -> None:
    g, made = graph()
    c = constants(g, made)
    assert c.of(made["doubled"]).tolist() == [2.0, 4.0]
    assert c.of(made["doubled"]) is c.of(made["doubled"])


def test_of_data_only_the_shape_may_be_read() -> None:
    g, made = graph()
    c = constants(g, made)
    zeros = c.of(made["zeros"])
    assert zeros.tolist() == [0, 0, 0] and str(zeros.dtype) == "torch.float64"
    typed = c.of(made["typed"])
    assert typed.tolist() == [1, 2] and str(typed.dtype) == "torch.float64"
    for name in ("reads", "reads typed"):
        with pytest.raises(NotOnParts, match="is a constant in the plan, but it reads data"):
            c.of(made[name])
    with pytest.raises(NotOnParts, match="'x' is not an operand"):
        c.of(made["x"])


def test_random_constants_follow_from_the_seed_and_leave_the_random_state_alone() -> None:
    import torch

    g, made = graph()
    before = torch.get_rng_state()
    one, again, other = (constants(g, made, seed).of(made["drawn"]) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_iteration_gives_values_to_its_own_placeholders() -> None:
    import torch

    g, made = graph()
    c = constants(g, made)
    inner = Constants(
        index=c.index,
        buffers={},
        device=c.device,
        seed_at=c.seed_at,
        given={made["buffer"]: lambda: torch.tensor([5.0])},
    )
    assert inner.of(made["doubled"]).tolist() == [10.0]


def test_constants_are_where_the_step_runs() -> None:
    """A model that was traced on the CPU runs on another device, with its tables and the devices that it names."""
    import torch
    from torch import nn

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)
            self.register_buffer("rates", torch.rand(4), persistent=False)

        def forward(self, x: Any) -> Any:
            at = torch.arange(8, device=x.device).float()
            table = torch.outer(at, self.rates.to(x.device, torch.float32)) + torch.tensor(
                [0.0, 1.0, 2.0, 3.0]
            )
            return (self.up(x) * table.to(x.device).cos()).square().mean()

    module, x = Rotated(), torch.randn(2, 8, 4)
    plan = pase.compile(module, x, devices=1)
    with alone_among(1, rank=0):
        step = plan.torch.parallelize(copy.deepcopy(module).to("meta"), device="meta")
        assert step.backward(x.to("meta")).is_meta
        (program,) = step.programs.made.values()
    assert "cpu" not in program.module.code and all(t.is_meta for t in program.module.buffers())


@pytest.mark.parametrize(
    "op", ["where.ScalarOther", "masked_fill.Scalar", "__and__.Tensor", "_to_copy.default"]
)
def test_what_only_repeats_is_made_once(op: str) -> None:
    """T5's mask of the whole batch, on every rank, was 36% of the memory of a step on 32 devices."""
    import torch

    aten, (name, overload) = torch.ops.aten, op.split(".")
    g = torch.fx.Graph()
    seen = g.call_function(aten.gt.Scalar, (g.placeholder("buffer"), 1))
    mask = g.call_function(aten.expand.default, (seen, [64, 3, 5, 2]))
    few = g.call_function(aten.eye.m, (5, 2), {"dtype": torch.bool})
    given = {
        "where": (mask, few, -1.0),
        "masked_fill": (g.call_function(aten._to_copy.default, (few,), {"dtype": torch.float32}), mask, -1.0),
        "__and__": (mask, few),
        "_to_copy": (mask,),
    }
    kwargs = {"dtype": torch.float64} if name == "_to_copy" else {}
    target = getattr(getattr(aten, name), overload)
    made = g.call_function(target, given[name], kwargs)
    flat = g.call_function(aten.view.default, (made, [192, 10]))
    c = constants(g, {"x": g.placeholder("x")})

    x = c.of(made)
    written_out = target(*torch.fx.map_arg(given[name], lambda n: c.of(n).contiguous()), **kwargs)
    assert torch.equal(x, written_out) and x.dtype == written_out.dtype and x.shape == (64, 3, 5, 2)
    assert x.untyped_storage().nbytes() <= 5 * 2 * x.itemsize
    assert torch.equal(c.of(flat), written_out.view(192, 10))


def test_a_part_of_a_filled_tensor_keeps_no_memory_of_the_whole() -> None:
    """Mamba's first state, zeros for the whole batch on every rank, was kept for backward: a fifth of its step on 32
    devices."""
    import torch

    g = torch.fx.Graph()
    made = g.call_function(torch.ops.aten.full.default, ([64, 3], 2), {"dtype": torch.float64})
    made.meta["val"] = torch.empty(64, 3, dtype=torch.float64)
    value = Value(shape=(64, 3), dtype="float64", note=("filled",), number=2)
    scope = TorchScope(nodes=list(g.nodes), values={made: value})
    c = Constants(
        index=NodeIndex(scope=scope, data=frozenset()),
        buffers={},
        device=torch.device("cpu"),
        seed_at=lambda path: 0,
    )
    part = c.of(made).reshape(8, 8, 3).narrow(0, 1, 1)
    assert torch.equal(part, torch.full((1, 8, 3), 2, dtype=torch.float64))
    assert part.untyped_storage().nbytes() == 8


def test_a_node_makes_of_a_constant_what_its_ops_read() -> None:
    """A bias that is a buffer: where a convolution's sum is partial, it is added apart, in the shape of the result."""
    import torch
    from torch import nn
    from torch.nn.functional import conv1d

    class Net(nn.Module):
        shift: Any

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16, 1))
            self.register_buffer("shift", torch.linspace(0, 1, 16))

        def forward(self, x: Any) -> Any:
            return conv1d(x.tanh(), self.weight, self.shift).square().mean()

    module, x = Net().double(), torch.randn(8, 16, 8, dtype=torch.float64)
    traced = registry.trace(copy.deepcopy(module), x)
    problem = SplitProblem.of(traced.graph, 4, machine.load("h100x8"), "analytic", "adam")
    plan = Case(traced=traced, problem=problem).plan("random4@2x2")
    assert plan is not None
    run = plan.torch
    assert run.program.ops and run.leaves  # computed once here, not once per thread
    module(x).backward()

    def on_rank(rank: int) -> tuple[float, Any]:
        mine = copy.deepcopy(module)
        mine.weight.grad = None
        return float(run.parallelize(mine).backward(x)), mine.weight.grad.full_tensor()

    for loss, gradient in on_ranks(4, on_rank):
        assert loss == pytest.approx(module(x).item(), rel=1e-12)
        torch.testing.assert_close(gradient, module.weight.grad, rtol=1e-10, atol=1e-13)
