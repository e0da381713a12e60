"""TP·PP·DP of the usual degrees costs what ``pase price`` says, stays within a node, and fits if anything does."""

from __future__ import annotations

import pase
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.resolve import traced_model
from pase.stated.usual import usual_pipeline


def test_the_usual_pipeline_is_what_its_strategy_costs() -> None:
    model, devices = "zoo:gpt2?layers=2&batch=16&seq=128&vocab=512", 16
    traced, _ = traced_model(model, None, (), CompileOptions(devices=devices))
    problem = SplitProblem.of(traced.graph, devices, "h100x8", "analytic", "adam")
    said: list[str] = []
    found = usual_pipeline(problem, traced, said.append)
    assert found is not None and found.fits and said
    s = found.strategy
    assert s.tensor in (4, 8) and s.pipeline >= 2 and s.sequence and s.devices == devices
    again = pase.price(model, devices=devices, strategy=str(s), executor="megatron", machine="h100x8")
    assert again.step_s == found.step_s and again.memory == found.memory
    paper = SplitProblem.of(traced.graph, devices, "h100x8", "paper", "adam")
    assert usual_pipeline(paper, traced, said.append) is None
