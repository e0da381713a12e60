"""A message's line reads back to an equal message; what is wrong in it is refused with line and column."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.ir.text import TextLine
from pase.local.text_messages import message_text, read_message, read_updates, updates_text
from pase.local.types import LocalMessage, LocalProgram, MessageChunk
from pase.machine import Mesh
from pase.schedule.plan import Update

count = st.integers(0, 10**6)
chunks = st.builds(
    MessageChunk, transfer=count, stage=count, begin=count, nbytes=count, iteration=st.none() | count
)
messages = st.builds(
    LocalMessage,
    way=st.sampled_from(["there", "back"]),
    link=st.sampled_from(["network", "a link", 'quoted "link"']),
    chunks=st.lists(chunks, min_size=1, max_size=3).map(tuple),
    after=st.sampled_from(["", "up", "blocks/0 up"]),
    update=count,
    late=count,
)


def line_of(text, word):
    line = TextLine(text, 1, of="local program")
    line.expect(word)
    return line


@given(messages)
def test_a_message_reads_back_to_the_same(message):
    assert read_message(line_of(message_text(message), "message")) == message


def test_the_updates_of_a_period_read_back():
    updates = (Update(first=0, last=0, at=1), Update(first=1, last=2, at=3))
    mesh = Mesh(names=("data",), sizes=(2,))
    program = LocalProgram(name="p", mesh=mesh, ops=(), transfers=(), period=3, updates=updates)
    text = updates_text(program)
    assert text == "updates every 3 0-0@1 1-2@3"
    assert read_updates(line_of(text, "updates")) == (3, updates)


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("message up network of 0.0[0+8]", 9),
        ("message back network of 0[0+8]", 25),
        ("message back network of 0.0[0+8] 1.0[8]", 34),
        ("message back network update 1 of 0.0[0+8]", 31),
        ("message back network update x late 1 of 0.0[0+8]", 29),
    ],
)
def test_what_is_wrong_is_refused_with_its_column(text, column):
    with pytest.raises(PaseError) as e:
        read_message(line_of(text, "message"))
    assert f"line 1, column {column}" in e.value.where
