"""A plan as FSDP2: the written file runs and gives the unsharded step."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pase
from bench.cases.plans import Case
from bench.cases.torch_ranks import alone_among, on_ranks
from pase import machine
from pase.backends.emit.fsdp2 import source
from pase.backends.registry import NotExpressed, emit
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import Variant
from pase.frontends import registry
from pase.ir.blocks import RecomputeKind
from tests.backends.emit.torch_plans import plan_of
from tests.backends.torch.models import case

pytestmark = pytest.mark.torch
RANKS = 4


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_fsdp2_as_written_is_the_unsharded_step(strategy: str, tmp_path: Path) -> None:
    import torch

    c, path = case("tower", RANKS), tmp_path / "fsdp2.py"
    said = emit(plan_of("tower", strategy), "fsdp2", path)
    assert "fully_shard" in said
    written: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), written)
    assert written["UNITS"] == ["layers.0", "layers.1", "layers.2"]
    assert written["RESHARD_AFTER_FORWARD"] == dict.fromkeys([*written["UNITS"], ""], False)
    assert written["RECOMPUTE"] == {} and written["MICRO_BATCHES"] == 1

    def on_rank(rank: int) -> Any:
        module = written["parallelize"](copy.deepcopy(c.module), "cpu")
        module(*(x.chunk(RANKS)[rank] for x in c.batch)).backward()
        return {k: p.grad.full_tensor() for k, p in module.named_parameters()}

    for gradients in on_ranks(RANKS, on_rank):
        torch.testing.assert_close(gradients, c.gradients)


@pytest.mark.parametrize(
    ("kinds", "products"),
    [(("all", "all", "all"), 9), (("light", "light", "light"), 6), (("all", "light"), 7)],
)
def test_blocks_are_recomputed_as_the_plan_says_also_if_it_was_not_made_for_fsdp2(
    kinds: tuple[RecomputeKind, ...], products: int, tmp_path: Path
) -> None:
    """products: how often a rank multiplies by a weight, beside backward's own products. Forward does so six times, and
    of each layer that runs again, backward needs the first product's result."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    c, path = case("tower", RANKS), tmp_path / "fsdp2.py"
    found = pase.compile(c.module, *c.batch, devices=RANKS, remat="all", baselines=False, target="fsdp2")
    blocks = [replace(b, recompute=kind) for b, kind in zip(found.remat, kinds, strict=False)]
    nodes = tuple(n if n.recomputed_in <= len(kinds) else replace(n, recomputed_in=0) for n in found.nodes)
    emit(replace(found, remat=tuple(blocks), nodes=nodes, provenance={}), "fsdp2", path)
    written: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), written)
    assert written["RECOMPUTE"] == {f"layers.{i}": kind for i, kind in enumerate(kinds)}

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ran = Counter[str]()

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ran[op.__name__.partition(".")[0]] += 1
            return op(*args, **(kwargs or {}))

    def on_rank(rank: int) -> Any:
        module = written["parallelize"](copy.deepcopy(c.module), "cpu")
        with Counted() as counted:
            module(*(x.chunk(RANKS)[rank] for x in c.batch)).backward()
        return {k: p.grad.full_tensor() for k, p in module.named_parameters()}, counted.ran

    for gradients, ran in on_ranks(RANKS, on_rank):
        found_there = {k.replace("_checkpoint_wrapped_module.", ""): g for k, g in gradients.items()}
        torch.testing.assert_close(found_there, c.gradients)
        assert ran["addmm"] == products, ran


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_fsdp2_gathers_as_often_as_the_plan(
    strategy: str, micro_batches: int, again: bool, tmp_path: Path
) -> None:
    """In each of two steps. FSDP2 sends all of a unit in one message, so that a parameter that the plan gathers less
    often, such as a bias, is gathered as often as the unit's others."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    c, path = case("tower", RANKS), tmp_path / "fsdp2.py"
    problem = c.case.problem.varied(c.case.traced, Variant(accumulate=micro_batches, gathers_again=again))
    plan = Case(traced=c.case.traced, problem=problem).plan(strategy)
    assert plan is not None and plan.accumulate == micro_batches
    said = emit(plan, "fsdp2", path)
    assert ("more often than in the plan: layers.0.up.weight" in said) == plan.gathers_again
    written: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), written)
    listed = {k.source: k for k in plan.collectives if k.kind == "all_gather"}
    assert listed.keys() == plan.parameters.keys()
    wanted = Counter[str]()
    for k in listed.values():
        unit = [x for x in listed.values() if x.source[:8] == k.source[:8]]
        wanted["_allgather_base_"] += k.nbytes * max(x.times for x in unit)
        wanted["_reduce_scatter_base_"] += k.nbytes * micro_batches

    class Sent(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.nbytes = Counter[str]()

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op.namespace == "c10d":
                self.nbytes[op.__name__.partition(".")[0]] += max(
                    x.nbytes for x in args if isinstance(x, torch.Tensor)
                )
            return op(*args, **(kwargs or {}))

    def steps(rank: int) -> Any:
        module = written["parallelize"](copy.deepcopy(c.module), "cpu")
        for _ in range(2):
            module.zero_grad()
            with Sent() as sent:
                written["backward"](
                    lambda m, *batch: m(*batch), module, *(x.chunk(RANKS)[rank] for x in c.batch)
                )
            yield sent.nbytes, module

    def gradients_of(rank: int) -> Any:
        return [{k: p.grad.full_tensor() for k, p in m.named_parameters()} for _, m in steps(rank)]

    for gradients in on_ranks(RANKS, gradients_of):
        torch.testing.assert_close(gradients, [c.gradients] * 2)
    with alone_among(RANKS, rank=1):
        assert [sent for sent, _ in steps(1)] == [wanted] * 2


def test_the_attention_of_blocks_alone_is_refused(tmp_path: Path) -> None:
    c = case("tower", RANKS)
    found = pase.compile(c.module, *c.batch, devices=RANKS, remat="all", baselines=False, target="fsdp2")
    attention = replace(found, remat=tuple(replace(b, recompute="attention") for b in found.remat))
    with pytest.raises(NotExpressed, match="recomputes the attention"):
        emit(attention, "fsdp2", tmp_path / "fsdp2.py")
    with pytest.raises(NotExpressed, match="not numbered modules"):
        emit(replace(found, remat=found.remat[:2]), "fsdp2", tmp_path / "fsdp2.py")


def test_micro_batches_are_parts_of_containers_too(tmp_path: Path) -> None:
    """Hugging Face's batches are dicts, and may have numbers and arrays of no examples."""
    import torch

    path = tmp_path / "fsdp2.py"
    emit(plan_of("tower", "fsdp"), "fsdp2", path)
    written: dict[str, Any] = {}
    exec(
        compile(path.read_text().replace("MICRO_BATCHES = 1", "MICRO_BATCHES = 2"), str(path), "exec"),
        written,
    )
    layer, x = torch.nn.Linear(3, 1), torch.randn(4, 3)

    def loss(module: Any, batch: Any, scale: float) -> Any:
        assert batch["step"].ndim == 0
        return module(batch["x"]).square().mean() * scale

    batch = {"x": x, "step": torch.tensor(7)}
    value = written["backward"](loss, layer, batch, 0.5)
    torch.testing.assert_close(value, loss(layer, batch, 0.5).detach())
    with pytest.raises(ValueError, match="3 examples do not divide into 2 micro-batches"):
        written["backward"](loss, layer, {"x": x[:3], "step": 7}, 0.5)


def test_inputs_may_lie_whole_on_every_rank() -> None:
    """The search stores labels whole if that costs nothing. The batch is what most of the compute splits."""
    plan = plan_of("tower", "fsdp")
    inputs = {path: replace(t, storage=((),) * len(t.shape)) for path, t in plan.inputs.items()}
    assert source(replace(plan, inputs=inputs)) == source(plan)


@pytest.mark.parametrize("again", [False, True])
def test_a_module_that_is_called_several_times_is_said_to_be_gathered_for_each(
    again: bool, tmp_path: Path
) -> None:
    """Layers that share their weights are one module. If it stays gathered, it is gathered once, as in the plan."""
    import torch

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(2))

        def forward(self, x: Any) -> Any:
            for k in range(6):
                x = self.layers[k // 3](x).relu()
            return x.mean()

    with torch.device("meta"):
        traced = registry.trace(Shared(), torch.empty(8, 256))
    problem = SplitProblem.of(traced.graph, 4, machine.load("h100x8"), "analytic", "adam")
    plan = Case(traced=traced, problem=problem.varied(traced, Variant(gathers_again=again))).plan("fsdp")
    assert plan is not None
    said = emit(plan, "fsdp2", tmp_path / "fsdp2.py")
    assert [f"layers.{i} runs 3 times" in said for i in range(2)] == [again] * 2
