"""Messages in numpy on all devices at once: joined and cut, they bring what transfers bring one by one."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from pase.local.messages import Sending, columns_of_chunk, messages_among
from pase.local.reshard import resharded
from pase.local.simulate import AllDevices
from pase.local.types import LocalMessage, LocalReshardStep, MessageChunk
from pase.local.verify import verify_program
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout
from tests.local.programs import apart, chunks_of, cut, joined, planned_program


@pytest.fixture(scope="module", params=["fsdp", "random2@2x2x2", "random7@2x2x2"])
def program(request):
    return planned_program("mlp", request.param)[1]


@dataclass(kw_only=True)
class Logged(Sending[np.ndarray]):
    """ran: the messages of the collectives that ran."""

    ran: list[LocalMessage] = field(default_factory=list)

    def run(self, message, x, collective):
        self.ran.append(message)
        return super().run(message, x, collective)


def sending_of(program, way, how):
    """(the state before anything is sent, part -> its value after its reshard steps, run one by one)."""
    chunks, devices = chunks_of(program, way), AllDevices(mesh=program.mesh)
    made = replace(program, messages=tuple(how(program, way, chunks)))
    verify_program(made)
    rng, given, want = np.random.default_rng(0), {}, {}
    for k in dict.fromkeys(c.transfer for c in chunks):
        t, steps = program.transfers[k], program.reshard_steps(k, way)
        shape = program.result(t.tensor).shape
        local = steps[0].before.local_shape(shape, program.mesh)
        given[k, None] = rng.integers(-9, 9, (*program.mesh.sizes, *local)).astype(float)
        combine = t.combine if way == "there" else "sum"
        want[k, None] = resharded(given[k, None], steps, shape, combine, devices)
    messages = messages_among(made, way, range(len(program.transfers)))
    return Logged(program=made, arrays=devices, way=way, values=given, messages=messages), want


@pytest.mark.parametrize("how", [apart, joined, cut])
@pytest.mark.parametrize("way", ["there", "back"])
def test_messages_bring_what_transfers_bring_one_by_one(program, way, how):
    """In one collective each."""
    sending, want = sending_of(program, way, how)
    messages = list(sending.messages)
    for part, x in want.items():
        np.testing.assert_array_equal(sending.finished(part), x)
    assert sending.ran == messages and not sending.messages and not sending.parts


def test_messages_are_sent_up_to_the_one_that_is_waited_for(program):
    sending, _ = sending_of(program, "back", apart)
    (first, *others) = sending.messages
    sending.finished(first.chunks[0].part)
    carrying = [m for m in others if m.chunks[0].part == first.chunks[0].part]
    assert sending.messages == others[others.index(carrying[-1]) + 1 :] if carrying else others


def test_a_message_without_chunks_of_these_transfers_is_left_out(program):
    made = replace(program, messages=tuple(apart(program, "back", chunks_of(program, "back"))))
    (k,) = made.messages[0].chunks[0].part[:1]
    found = messages_among(made, "back", [k])
    assert found == [m for m in made.messages if m.chunks[0].transfer == k] and found
    assert messages_among(made, "there", [k]) == []


def test_a_chunk_has_its_share_of_the_columns_and_a_row_for_each_device_that_gets_some():
    mesh = Mesh(names=("a",), sizes=(2,))
    devices, x = AllDevices(mesh=mesh), np.arange(2 * 24.0).reshape(2, 4, 6)
    chunk = MessageChunk(transfer=0, stage=0, begin=48, nbytes=24)
    whole, split = AxisLayout(["partial"]), AxisLayout([(1, 2)])
    for kind, after, want in (
        ("all_reduce", AxisLayout.whole(mesh), x.reshape(2, 1, 24)[..., 12:18]),
        ("reduce_scatter", split, x.reshape(2, 4, 2, 3).swapaxes(1, 2).reshape(2, 2, 12)[..., 6:9]),
    ):
        step = LocalReshardStep(kind=kind, axes=("a",), before=whole, after=after, nbytes=96)
        np.testing.assert_array_equal(columns_of_chunk(x, chunk, step, (4, 6), devices), want)
