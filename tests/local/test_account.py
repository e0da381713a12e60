"""The collectives that a local program sends are exactly those that the plan lists."""

import pytest

from bench.cases.plans import distinct_models
from pase.local.account import program_collectives
from pase.local.verify import verify_program
from tests.local.programs import planned_program

STRATEGIES = {
    "mlp": ("data_parallel", "fsdp", "zero2", "owt", "random1@2x4", "random2@2x2x2"),
    "gpt2": ("data_parallel", "fsdp", "zero2", "megatron/megatron_sp_2x4", "random1@2x4", "random2@2x2x2"),
}
"""Model -> strategies. Any other model gets one random strategy, which reshards almost every tensor."""


def fields(c):
    return c.kind, c.tensor, c.axes, c.nbytes, c.times, c.phase, c.node, c.source


@pytest.mark.some(4)
@pytest.mark.parametrize("model", distinct_models())
def test_what_it_sends_is_the_plans_list(model):
    for strategy in STRATEGIES.get(model, ("random1@2x4",)):
        made = planned_program(model, strategy)
        if made is None:
            continue
        plan, local = made
        verify_program(local)
        assert [fields(c) for c in program_collectives(local)] == [fields(c) for c in plan.collectives], (
            strategy
        )
