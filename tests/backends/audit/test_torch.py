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


def test_gradients_in_one_message_are_one_collective_of_their_bytes():
    """Chunks of a gradient that is cut count in the messages that carry them; the other gradients are in a bucket."""
    from pase.backends.audit.torch import planned
    from pase.backends.torch.spmd.messages import gradient_messages

    _, program = planned_program("mlp", "data_parallel")
    weights = [n for n, t in enumerate(program.transfers) if t.src in program.parameters and t.backward]
    summed = [(n, program.reshard_steps(n, "back")[0]) for n in weights]
    (a, first), (b, second), (c, third), *others = summed
    half = third.nbytes // 2

    def message(*of):
        chunks = (MessageChunk(transfer=n, stage=0, begin=at, nbytes=nbytes) for n, at, nbytes in of)
        return LocalMessage(way="back", link="net", chunks=tuple(chunks))

    messages = (message((a, 0, first.nbytes), (b, 0, second.nbytes), (c, 0, half)), message((c, half, half)))
    program = replace(program, messages=messages)
    found = planned(program, gradient_messages(program, 1e9))
    wanted = planned(program)
    for _, m in summed:
        wanted["all_reduce", m.axes, m.nbytes] -= 1
    wanted["all_reduce", first.axes, first.nbytes + second.nbytes + half] += 1
    wanted["all_reduce", first.axes, half] += 1
    if others:
        wanted["all_reduce", first.axes, sum(m.nbytes for _, m in others)] += 1
    assert found == +wanted
