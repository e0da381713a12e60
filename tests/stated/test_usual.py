"""TP·PP·DP of the usual degrees costs what ``pase price`` says, stays within a node, and fits if anything does."""

from __future__ import annotations

import pase
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.resolve import traced_model
from pase.plan.answer import name_in_words
from pase.stated.program import PROGRAMS
from pase.stated.usual import usual_pipeline


def test_the_usual_pipeline_is_what_its_strategy_costs() -> None:
    model, devices = "zoo:gpt2?layers=2&batch=16&seq=128&vocab=512", 16
    traced, _ = traced_model(model, None, (), CompileOptions(devices=devices))
    problem = SplitProblem.of(traced.graph, devices, "h100x8", "analytic", "adam")
    said: list[str] = []
    found = usual_pipeline(problem, traced, said.append, PROGRAMS["megatron"])
    assert found is not None and found.fits and said
    s = found.strategy
    assert (
        s.tensor in (1, 2, 4, 8) and s.pipeline >= 2 and s.sequence == (s.tensor > 1) and s.devices == devices
    )
    again = pase.price(model, devices=devices, strategy=str(s), executor="megatron", machine="h100x8")
    assert again.step_s == found.step_s and again.memory == found.memory
    for micro in (1, 2):  # narrow layers on one device, and all of a replica's examples at once
        other = f"dp=8,zero=1,pp=2,micro={micro},remat=selective"
        priced = pase.price(model, devices=devices, strategy=other, executor="megatron", machine="h100x8")
        assert found.step_s <= priced.step_s
    paper = SplitProblem.of(traced.graph, devices, "h100x8", "paper", "adam")
    assert usual_pipeline(paper, traced, said.append, PROGRAMS["megatron"]) is None


def test_few_stages_may_have_more_replicas_than_examples() -> None:
    """Two examples on 64 devices: two stages of eight devices leave four replicas, and four stages leave two."""
    model, devices = "zoo:gpt2?layers=8&batch=2&seq=128&vocab=512", 64
    traced, _ = traced_model(model, None, (), CompileOptions(devices=devices))
    problem = SplitProblem.of(traced.graph, devices, "h100x8", "analytic", "adam")
    found = usual_pipeline(problem, traced, lambda _: None, PROGRAMS["megatron"])
    assert found is not None and found.strategy.ranks <= 2 and found.strategy.pipeline >= 4


def test_a_plan_that_may_have_stages_is_compared_with_it() -> None:
    model = "zoo:gpt2?layers=2&batch=16&seq=128&vocab=512"
    plan = pase.compile(model, devices=16, machine="h100x8", pipeline=2, accumulate=2, max_axes=1)
    (name,) = (n for n in plan.baselines if "_pp" in n)
    tp, pp, dp = (part[2:] for part in name.split("_")[1:])
    traced, _ = traced_model(model, None, (), CompileOptions(devices=16))
    problem = SplitProblem.of(traced.graph, 16, "h100x8", "analytic", "adam")
    found = usual_pipeline(problem, traced, lambda _: None, PROGRAMS["xla"])
    assert found is not None and plan.baselines[name] == found.step_s
    s = found.strategy
    assert (int(tp), int(pp), int(dp)) == (s.tensor, s.pipeline, s.ranks)
    assert name_in_words(name) == f"Megatron TP {tp} · PP {pp} · DP {dp}"
    assert name.replace("_", " ") in " ".join(str(plan).split())


def test_a_batch_that_nothing_divides_has_none() -> None:
    traced, _ = traced_model(
        "zoo:gpt2?layers=2&batch=17&seq=128&vocab=512", None, (), CompileOptions(devices=16)
    )
    problem = SplitProblem.of(traced.graph, 16, "h100x8", "analytic", "adam")
    assert usual_pipeline(problem, traced, lambda _: None, PROGRAMS["xla"]) is None
