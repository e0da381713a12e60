"""The local program of a strategy: it sends exactly what the plan lists, and the verifier finds what is unsound."""

from dataclasses import replace

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
"""Model -> strategies. Any other model gets one random strategy, which reshards almost every tensor."""


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
        (replace(t, forward=()), "must arrive as"),
        (replace(t, forward=(*t.forward, t.forward[-1])), "starts from"),
        (replace(t, forward=tuple(replace(m, kind="all_reduce") for m in t.forward)), "all_reduce of"),
    ):
        with pytest.raises(PaseError) as e:
            verify_program(with_transfer(local, k, broken))
        assert says in e.value.what and f"'{t.tensor}'" in e.value.what
        assert e.value.where == f"local program of '{local.name}'"
    k = next(i for i, t in enumerate(local.transfers) if t.backward)
    t = local.transfers[k]
    for moves, says in (((), "must arrive as"), (t.backward * 2, "starts from")):
        with pytest.raises(PaseError, match=says):
            verify_program(with_transfer(local, k, replace(t, backward=moves)))


def with_transfer(local, k, transfer):
    return replace(local, transfers=(*local.transfers[:k], transfer, *local.transfers[k + 1 :]))


def test_a_move_that_hands_on_no_whole_parts_is_named():
    """What one axis holds of a dim becomes a part of what a wider axis holds. No exchange between devices does that."""
    _, local = program("mlp", "random1@2x4")
    k = next(i for i, t in enumerate(local.transfers) if t.forward and not t.forward[0].free)
    t = local.transfers[k]
    rank = len(local.result(t.tensor).shape)
    crossed = replace(
        t.forward[0],
        kind="all_to_all",
        axes=("x", "y"),
        before=((rank - 1, 2), None),
        after=(None, (rank - 1, 4)),
    )
    with pytest.raises(PaseError) as e:
        verify_program(with_transfer(local, k, replace(t, forward=(crossed,))))
    assert f"all_to_all of '{t.tensor}' for {t.dst} over x, y: " in e.value.what


def test_it_reads_well():
    _, local = program("mlp", "megatron/megatron_2x4")
    text = program_text(local)
    assert text.startswith("local program zoo:mlp on data=2 model=4\n")
    assert "dot_general" in text and "\n    there " in text and "all_reduce model" in text


def test_a_strategy_of_another_model_is_refused():
    _, local = program("mlp", "data_parallel")
    graph = reduced("gpt2").problem.graph
    with pytest.raises(PaseError) as e:
        program_of(graph, local.mesh, {})
    assert graph.name in e.value.where and min(n.name for n in graph.nodes) in e.value.what
