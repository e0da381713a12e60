"""The local program of a strategy: what it sends is the plan's own list; what makes it unsound is noticed."""

from dataclasses import replace

import numpy as np
import pytest

from bench.cases.plans import distinct_models, reduced
from pase.errors import PaseError
from pase.local.account import program_collectives
from pase.local.lower import program_of
from pase.local.text import program_text
from pase.local.verify import verify_program

STRATEGIES = {
    "mlp": ("data_parallel", "fsdp", "zero2", "owt", "random1@2x4", "random2@2x2x2"),
    "gpt2": ("data_parallel", "fsdp", "zero2", "megatron/megatron_sp_2x4", "random1@2x4", "random2@2x2x2"),
}
"""Model -> strategies; of a model that is not listed a blind one, which moves everything."""


def program(model, strategy):
    case = reduced(model)
    plan = case.plan(strategy)
    return None if plan is None else (plan, program_of(case.problem.graph, plan.mesh, plan.strategy))


def fields(c):
    return c.kind, c.tensor, c.axes, c.nbytes, c.times, c.phase, c.node, c.source


@pytest.mark.parametrize("model", distinct_models())
def test_what_it_sends_is_the_plans_list(model):
    for strategy in STRATEGIES.get(model, ("random1@2x4",)):
        made = program(model, strategy)
        if made is None:
            continue
        plan, local = made
        verify_program(local)
        assert [fields(c) for c in program_collectives(local)] == [fields(c) for c in plan.collectives], (
            strategy
        )


def test_what_is_unsound_is_named():
    _, local = program("mlp", "random1@2x4")
    k = next(i for i, t in enumerate(local.transfers) if any(m.kind == "all_gather" for m in t.forward))
    t = local.transfers[k]
    for broken, says in (
        (replace(t, forward=()), "is wanted as"),
        (replace(t, forward=(*t.forward, t.forward[-1])), "starts from"),
        (replace(t, forward=tuple(replace(m, kind="all_reduce") for m in t.forward)), "a all_reduce of"),
    ):
        transfers = (*local.transfers[:k], broken, *local.transfers[k + 1 :])
        with pytest.raises(PaseError, match=says):
            verify_program(replace(local, transfers=transfers))


def test_it_reads_well():
    _, local = program("mlp", "megatron/megatron_2x4")
    text = program_text(local)
    assert text.startswith("local program of zoo:mlp on data=2 × model=4\n")
    assert "dot_general" in text and "<- " in text and "all_reduce model" in text


def test_a_strategy_of_another_model_is_refused():
    _, local = program("mlp", "data_parallel")
    with pytest.raises(PaseError, match="not one of this model"):
        program_of(reduced("gpt2").problem.graph, local.mesh, {})
    assert np.prod(local.mesh.sizes) == 8
