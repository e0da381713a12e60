"""Predicted bytes against the compiled program, by kind of collective: a quick part of bench/audit/communication.py."""

from dataclasses import replace

import optax
import pytest

from bench.cases.plans import measured, reduced, total_error
from pase.backends.audit.xla import CollectiveRow, unmatched

EXACT = [
    ("mlp", "data_parallel"),
    ("mlp", "fsdp"),
    ("mlp", "zero2"),
    ("gpt2", "zero2"),
    ("mlp", "megatron/megatron_2x4"),
    ("mlp", "ours@8"),
    ("mlp", "ours@2x2x2"),
    ("gpt2", "ours@2x2x2"),
    ("llama3_8b", "megatron/megatron_sp_2x4"),
    ("mixtral_8x7b", "ours@2x4"),
    ("rnnlm", "fsdp"),
    ("vit_l16", "fsdp"),
]
"""(model, strategy) whose bytes are exactly as predicted, given the three properties of XLA's CPU pipeline."""
NEAR = {
    ("alexnet", "ours@2x4"): 0.01,
    ("transformer", "ours@8"): 0.01,
    ("mlp", "random1@2x4"): 0.5,
    (
        "llama3_8b",
        "megatron/megatron_sp_zero2_2x4",
    ): 0.01,  # norms' gradients are summed over one axis at a time
}
"""(model, strategy) -> the largest relative error of all bytes together. docs/evidence/communication.md explains
why."""


@pytest.mark.some(3)
@pytest.mark.parametrize(("model", "strategy"), EXACT, ids=lambda x: x.split("/")[-1])
def test_bytes_are_exact(model, strategy):
    rows = measured(model, strategy)[1]
    assert {r.kind: r.compiled for r in rows} == {r.kind: r.on_cpu for r in rows}


@pytest.mark.some(1)
@pytest.mark.parametrize(("model", "strategy"), NEAR, ids=lambda x: x.split("/")[-1])
def test_bytes_are_near(model, strategy):
    assert abs(total_error(measured(model, strategy)[1])) <= NEAR[model, strategy]


def test_data_parallelism_sends_every_gradient_once():
    """The all-reduces send the bytes of all parameters and of the scalar loss."""
    case = reduced("mlp")
    rows = {r.kind: r for r in measured("mlp", "data_parallel")[1]}
    assert rows["all_reduce"].predicted == 4 * case.model.parameters + 4
    assert all(r.predicted == 0 for k, r in rows.items() if k != "all_reduce")


def test_errors_are_signed_and_relative():
    assert CollectiveRow(kind="all_gather", predicted=90, on_cpu=90, compiled=100).error == pytest.approx(
        -0.1
    )
    assert CollectiveRow(kind="all_gather", predicted=0, on_cpu=0, compiled=0).error == 0
    assert CollectiveRow(kind="all_gather", predicted=5, on_cpu=5, compiled=0).error == 1
    rows = [
        CollectiveRow(kind="a", predicted=0, on_cpu=50, compiled=100),
        CollectiveRow(kind="b", predicted=0, on_cpu=100, compiled=100),
    ]
    assert total_error(rows) == pytest.approx(-0.25)


def test_every_line_has_its_partner_or_is_named():
    """All of the plan's all-gathers, all-to-alls and permutes are in the compiled step. A removed one is reported."""
    plan, kinds = reduced("mlp").plan("ours@2x4"), ("all_gather", "all_to_all", "permute")
    compiled = plan.jax.lower_train_step(optax.sgd(0.1), lowering="annotated").compile()
    assert unmatched(plan, compiled, kinds) == ([], [])
    gone = next(c for c in plan.collectives if c.kind == "all_gather")
    less = replace(plan, collectives=tuple(c for c in plan.collectives if c is not gone))
    alone, more = unmatched(less, compiled, kinds)
    assert not alone and [(h.kind, h.bytes, h.count) for h in more] == [
        ("all_gather", gone.nbytes, gone.times)
    ]
    twice = replace(plan, collectives=(*plan.collectives, gone))
    alone, more = unmatched(twice, compiled, kinds)
    assert not more and [(c.kind, c.nbytes, c.times) for c in alone] == [
        ("all_gather", gone.nbytes, gone.times)
    ]
