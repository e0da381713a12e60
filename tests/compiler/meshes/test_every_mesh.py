"""A proof over every mesh of the devices, compared with a search of every mesh."""

from __future__ import annotations

import pytest

import pase
from pase.compiler.meshes.every_mesh import prune_mesh
from pase.compiler.meshes.search import search_meshes
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.resolve import resolve
from pase.errors import PaseError
from tests.command import run

MLP = "zoo:mlp?batch=48"
GPT2 = "zoo:gpt2?layers=1&batch=48&seq=24&vocab=96"


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("model", "devices", "machine", "overlap"),
    [
        (MLP, 8, None, "none"),
        (MLP, 12, "v100x8", "none"),
        (MLP, 16, "tpu_v5e", "none"),
        (MLP, 24, None, "none"),
        (MLP, 24, None, "parameters"),
        (GPT2, 8, None, "none"),
        (GPT2, 8, None, "parameters"),
        (GPT2, 12, None, "none"),
        (GPT2, 12, None, "parameters"),
        pytest.param(GPT2, 16, None, "parameters", marks=pytest.mark.release),
        pytest.param(GPT2, 24, None, "none", marks=pytest.mark.release),
    ],
)
def test_the_answer_is_the_best_of_every_mesh(
    model: str, devices: int, machine: str | None, overlap: str
) -> None:
    problem = SplitProblem.of(resolve(model).graph, devices, machine, "analytic", "adam", overlap)
    every = problem.meshes(None, devices, distinct=False)
    assert max(len(m.sizes) for m in every) >= 3 and len({m.sizes for m in every}) == len(every)
    whole = search_meshes(problem, every)
    assert whole.solution.optimal
    plan = pase.compile(
        model,
        devices=devices,
        machine=machine,
        max_axes=1,
        meshes="all",
        overlap=overlap,
        baselines=False,
        memory_limit="none",
        idle="none",
    )
    assert plan.cost == pytest.approx(whole.solution.cost, rel=1e-9)
    assert plan.optimal and plan.bound == pytest.approx(plan.cost, rel=1e-9)
    assert f"over all {len(every)} meshes of the devices" in str(plan)


@pytest.mark.some(1)
@pytest.mark.parametrize("overlap", ["none", "parameters"])
def test_a_mesh_is_sifted_to_what_costs_less(overlap: str) -> None:
    """For any known cost and any budget, the bound holds, and a cheaper strategy is found."""
    problem = SplitProblem.of(resolve(GPT2).graph, 8, None, "analytic", "adam", overlap)
    for mesh in problem.meshes(None, 8):
        best = search_meshes(problem, [mesh]).solution.cost
        for part in (0.9, 1.0, 1.0001, 1.2):
            for most in (0, 1 << 12, 1 << 15, 1 << 22):
                s = prune_mesh(problem, mesh, part * best, most)
                assert s.bound <= min(best, part * best) * (1 + 1e-9)
                if s.cheaper is not None:
                    configs = zip(problem.graph.nodes, s.space.configs, s.cheaper.choice, strict=True)
                    cost = problem.pricing.cost(mesh, {n.name: cfg[i] for n, cfg, i in configs})
                    assert cost == pytest.approx(s.cheaper.cost, rel=1e-9)
            if part > 1:
                assert s.cheaper is not None and s.cheaper.cost == pytest.approx(best, rel=1e-9)
            else:
                assert s.cheaper is None and s.bound == pytest.approx(part * best, rel=1e-9)


def test_what_is_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing is priced, the bound is the cost of the nodes alone, and the plan names the meshes."""
    monkeypatch.setattr("pase.compiler.meshes.every_mesh._MOST_PAIRS", 0)
    plan = pase.compile(
        GPT2, devices=8, max_axes=1, meshes="all", overlap="none", baselines=False, memory_limit="none"
    )
    assert not plan.optimal and 0 < plan.bound < plan.cost
    assert "proven over meshes: 2 of 4, not 2×4, 4×2 " in str(plan)


def test_a_limit_is_kept() -> None:
    """A strategy of another mesh that does not fit is not an answer, but it lowers the bound."""
    options = {"devices": 8, "meshes": "all", "overlap": "none", "baselines": False, "machine": "a100x8"}
    free = pase.compile("zoo:mlp", memory_limit="none", **options)
    limit = int(free.memory.total * 0.99)
    plan = pase.compile("zoo:mlp", max_axes=1, memory_limit=limit, **options)
    assert plan.memory.total <= limit and plan.cost >= free.cost
    assert plan.bound <= plan.cost and (plan.optimal or plan.bound >= free.cost * (1 - 1e-9))


def test_what_cannot_be_proven_is_refused() -> None:
    with pytest.raises(PaseError, match="leave out mesh"):
        pase.compile(MLP, devices=8, mesh="2x4", meshes="all")
    with pytest.raises(PaseError, match="once to 'none', 'gathers' or 'all'"):
        pase.compile(MLP, devices=8, once="auto", meshes="all")
    with pytest.raises(PaseError, match="meshes: must be 'few' or 'all'"):
        pase.compile(MLP, devices=8, meshes="most")  # type: ignore[arg-type]


def test_the_command_says_so() -> None:
    done = run("compile", MLP, "--devices", "8", "--meshes", "all", "--overlap", "none")
    assert done[0] == 0 and "over all 4 meshes of the devices" in done[1]
