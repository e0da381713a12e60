"""The collectives that are expected of a PyTorch step are those of the plan, apart from sums that are joined."""

from collections import Counter
from dataclasses import replace

import pytest

from pase.local.types import LocalMessage, MessageChunk
from tests.local.programs import planned_program


@pytest.mark.parametrize(
    ("model", "strategy"),
    [("mlp", "data_parallel"), ("mlp", "fsdp"), ("mlp", "random1@2x4"), ("gpt2", "megatron/megatron_sp_2x4")],
)
def test_without_messages_they_are_the_plans_list(model, strategy):
    from pase.backends.audit.torch import planned

    plan, program = planned_program(model, strategy)
    listed = Counter()
    for c in plan.collectives:
        listed[c.kind, c.axes, c.nbytes] += c.times
    assert listed and planned(program) == listed


def test_sums_in_one_message_are_one_all_reduce_of_their_bytes():
    """Only whole gradients are joined: the message that cuts a gradient changes nothing."""
    from pase.backends.audit.torch import planned

    _, program = planned_program("mlp", "data_parallel")
    weights = [n for n, t in enumerate(program.transfers) if program.maker[t.tensor].op.kind == "parameter"]
    summed = [(n, program.reshard_steps(n, "back")[0]) for n in weights]
    (a, first), (b, second), (c, cut) = summed[:3]

    def message(*of):
        chunks = (MessageChunk(transfer=n, stage=0, begin=0, nbytes=nbytes) for n, nbytes in of)
        return LocalMessage(way="back", link="net", chunks=tuple(chunks))

    messages = (message((a, first.nbytes), (b, second.nbytes)), message((c, cut.nbytes // 2)))
    with pytest.warns(UserWarning, match="1 of 2 messages"):
        found = planned(replace(program, messages=messages))
    wanted = planned(program)
    for m in (first, second):
        wanted["all_reduce", m.axes, m.nbytes] -= 1
    wanted["all_reduce", first.axes, first.nbytes + second.nbytes] += 1
    assert found == +wanted
