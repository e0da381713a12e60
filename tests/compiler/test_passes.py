"""Compilation as passes: each adds to the answer, in one order, and what is known after each is text."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

import pase
from pase.compiler import compilation
from pase.compiler.meshes.baselines import NO_RIVALS
from pase.compiler.passes import PASSES, Compilation, Pass, Question, compilation_text, passes_of, run_passes
from pase.compiler.problem.options import CompileOptions
from pase.compiler.resolve import traced_model
from pase.errors import PaseError


def question(**options) -> Question:
    o = CompileOptions(devices=4, cost_model="paper", **options)
    traced, name = traced_model("zoo:mlp?batch=65536", None, (), o)
    return Question(traced=traced, name=name, options=o, say=lambda _: None, start=time.perf_counter())


def test_golden(golden) -> None:
    """What a compilation makes, as text that a reader can check. FLOP-equivalents do not change with machine files."""
    texts = {}
    run_passes(question(), lambda p, a: texts.setdefault(p.name, compilation_text(a)))
    assert list(texts) == list(PASSES)
    for name in ("variants", "never-worse", "plan"):
        golden(f"mlp_{name}", texts[name] + "\n")


def test_each_pass_only_adds() -> None:
    """A pass changes what it says: the variants are found once, the plan and the baselines are made once."""
    seen: list[Compilation] = []
    last = run_passes(question(), lambda _, a: seen.append(a))
    assert last.plan is not None and last is seen[-1]
    for before, after in pairwise(seen):
        assert after.question is before.question and after.tries is before.tries
        assert after.strategy.solution.cost <= before.strategy.solution.cost if before.found else True
        assert before.rivals is NO_RIVALS or after.rivals is before.rivals
        assert before.plan is None or after.plan is before.plan


def test_with_a_number_of_stages_only_their_passes_run() -> None:
    assert [p.name for p in passes_of(CompileOptions(devices=4, pipeline=2))] == ["stages"]


def test_a_pass_is_one_function(monkeypatch, capsys) -> None:
    """A pass that is added runs, is listed, and its answer is printed."""
    from pase import cli

    try:
        PASSES.add("again", Pass(name="again", says="changes nothing", run=lambda a: a))
        pase.compile("zoo:mlp?batch=64", devices=2, baselines=False, print_after="again")
        err = capsys.readouterr().err
        assert "--- after again, 2 devices" in err and "classifier.w" in err
        with pytest.raises(SystemExit):
            cli.main(["passes"])
        assert "again" in capsys.readouterr().out
    finally:
        PASSES.remove("again")


def test_an_unknown_pass_is_refused_before_the_model_is_read() -> None:
    with pytest.raises(PaseError, match="no pass of a compilation 'serch' \\(did you mean 'search'"):
        pase.compile("zoo:mlp", devices=2, print_after="serch")


def test_each_search_of_a_compilation_states_the_time_of_the_same_trace(monkeypatch):
    """A search for a target comes after that for any strategy, whose time is no time of tracing."""
    asked = []

    def run(q, after):
        asked.append(q)
        return run_passes(q, after)

    monkeypatch.setattr(compilation, "run_passes", run)
    plan = pase.compile("zoo:mlp", devices=4, target="fsdp2", baselines=False)
    assert len(asked) > 1 and {q.tracing_s for q in asked} == {plan.seconds["trace"]}
