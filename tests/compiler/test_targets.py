"""Plans for targets: the target can express them, and they are the best of that kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import pase
from pase.backends.registry import emit
from pase.baselines import Baseline, baselines, masks
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.resolve import resolve
from pase.compiler.targets import ANY_PROGRAM
from pase.errors import Infeasible, PaseError
from pase.plan.targets import TARGETS
from tests.backends.emit.flax_models import named_mlp

MODEL = "zoo:gpt2?layers=2&batch=16&seq=64&vocab=1024&attention=plain"


def arguments(target: str) -> tuple[Any, ...]:
    return named_mlp() if target == "flax-rules" else (MODEL,)


@pytest.mark.parametrize("target", sorted({*TARGETS} - {"tp-plan"}))  # it needs the names of a PyTorch model
def test_what_is_compiled_for_a_target_can_be_written_for_it(target: str, tmp_path: Path) -> None:
    plan = pase.compile(*arguments(target), devices=8, target=target)
    assert str(tmp_path / "out") in emit(plan, target, tmp_path / "out")
    assert (tmp_path / "out").read_text()
    assert plan.optimal and plan.provenance["target"] == target
    assert all(n > 1 for n in plan.mesh.sizes)
    # It costs at least as much as the best plan of all, and says so.
    assert plan.cost >= plan.baselines[ANY_PROGRAM] * (1 - 1e-9)
    more = plan.cost / plan.baselines[ANY_PROGRAM] - 1
    said = str(plan.noted[-1])
    assert (f"{more:.1%} more" in said) == (more >= 0.0005) and TARGETS[target].says in said


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("target", "methods"),
    [
        ("ddp", ("data_parallel",)),
        ("fsdp2", ("zero2", "fsdp", "hsdp_2x8")),
        ("torchtitan", ("fsdp", "zero2", "hsdp_2x8", "megatron_sp_fsdp_8x2", "megatron_sp_zero2_4x4")),
    ],
)
def test_the_best_for_a_target_is_never_worse_than_its_methods(target: str, methods: tuple[str, ...]) -> None:
    """The reference are baselines, each an exact search over the configs of one method on one mesh."""
    asked: dict[str, Any] = {"devices": 16, "memory_limit": "none", "overlap": "none", "baselines": False}
    plan = pase.compile(MODEL, target=target, **asked)
    p = SplitProblem.of(resolve(MODEL).graph, 16, None, "analytic", "adam")
    with patch.object(masks, "PERSISTENT_ELEMENTS", 0):  # targets split small parameters, too
        made = baselines(p.graph, 16, p.machine, p.model, only=methods)
    costs = {b.name: b.cost for b in made if isinstance(b, Baseline)}
    assert set(costs) == set(methods)
    assert plan.cost <= min(costs.values()) * (1 + 1e-9)
    if target != "torchtitan" and plan.mesh.sizes in (
        (16,),
        (2, 8),
    ):  # there is nothing else that it can express
        assert plan.cost == pytest.approx(min(costs.values()), rel=1e-9)


def test_layers_are_recomputed_if_nothing_else_fits() -> None:
    model = "zoo:llama3_8b?layers=2&batch=16&seq=256&vocab=1024&remat=0"
    asked: dict[str, Any] = {"devices": 8, "target": "fsdp2", "baselines": False}
    free = pase.compile(model, memory_limit="none", **asked)
    assert not free.remat and free.accumulate == 1
    tight = pase.compile(model, memory_limit=0.75 * free.memory.total, **asked)
    assert tight.fits and (tight.remat or tight.accumulate > 1)
    light = pase.compile(model, memory_limit=0.75 * free.memory.total, remat="light", **asked)
    assert light.remat and tight.cost <= light.cost
    with pytest.raises(Infeasible):
        pase.compile(model, memory_limit=free.memory.total / 100, **asked)


def test_what_a_target_does_not_run_is_refused() -> None:
    for options, where in (
        ({"accumulate": 2}, "accumulate=2"),
        ({"remat": "all"}, "remat='all'"),
        ({"once": "all"}, "once='all'"),
        ({"regather": "all"}, "regather='all'"),
    ):
        with pytest.raises(PaseError) as e:
            pase.compile(MODEL, devices=8, target="ddp", **options)
        assert where in e.value.where and "target" in e.value.fix
    with pytest.raises(PaseError, match="did you mean 'fsdp2'"):
        pase.compile(MODEL, devices=8, target="fsdp")
    with pytest.raises(Infeasible, match="its axes are replicate, shard"):
        pase.compile(MODEL, devices=8, target="fsdp2", mesh="data=8", baselines=False)


def test_a_refusal_says_what_to_compile(tmp_path: Path) -> None:
    plan = pase.compile(MODEL, devices=8, mesh="model=8", baselines=False, memory_limit="none")
    tensor = pase.compile(MODEL, devices=8, target="tp-plan", baselines=False)
    for target in ("ddp", "fsdp2", "torchtitan", "maxtext"):
        with pytest.raises(PaseError) as e:
            emit(tensor if target == "fsdp2" else plan, target, tmp_path / "x")
        assert f"--for {target} --emit" in e.value.fix


def test_a_batch_that_does_not_divide_is_told_which_does() -> None:
    with pytest.raises(Infeasible, match="is not divisible by 48") as e:
        pase.compile(MODEL, devices=48, target="fsdp2", baselines=False)
    assert "batch=48" in e.value.fix
