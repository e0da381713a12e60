"""A bucket plan's messages and updates, as those of a local program."""

from dataclasses import replace

import pytest

from bench.cases.schedules import chain, link
from pase.local.bucket_messages import iterations_late, outside_messages, with_updates
from pase.local.types import LocalMessage, LocalProgram, MessageChunk
from pase.machine import Mesh
from pase.schedule import BucketPlan, Message, Piece, Update

# Each pass takes 1 s for each of two layers, and a gradient is sent in 1 s: the second layer's during backward.
PROBLEM = chain([1.0, 1.0], [1.0, 1.0], [1, 1], link())
CHUNK = MessageChunk(transfer=3, stage=0, begin=8, nbytes=4)


def sent(tensor, update=0, **when):
    return Message(pieces=(Piece(tensor=tensor, offset=0, nbytes=1),), update=update, **when)


def test_gathers_are_sent_for_the_first_update_alone():
    ways = {"there": [CHUNK], "back": [CHUNK, CHUNK]}
    name = PROBLEM.links[0].name
    first = list(outside_messages(PROBLEM, sent(0), 2, ways))
    assert first == [
        LocalMessage(way="there", link=name, chunks=(CHUNK,)),
        LocalMessage(way="back", link=name, chunks=(CHUNK, CHUNK), late=2),
    ]
    second = list(outside_messages(PROBLEM, sent(0, update=1), 2, ways))
    assert second == [replace(first[1], update=1)]
    assert not list(outside_messages(PROBLEM, sent(0), 2, {"there": [], "back": []}))


def test_updates_are_counted_from_the_plans_first_batch():
    messages = tuple(LocalMessage(way="back", link="n", chunks=(CHUNK,), late=n) for n in (2, 0, 1))
    program = LocalProgram(name="p", mesh=Mesh(names=("data",), sizes=(2,)), ops=(), transfers=())
    updates = (Update(first=-1, last=0, at=1), Update(first=1, last=1, at=2))
    plan = BucketPlan(policy="x", messages=(sent(0), sent(1)), period=3, updates=updates)
    made = with_updates(replace(program, messages=messages), plan)
    assert made.updates == (Update(first=0, last=1, at=2), Update(first=2, last=2, at=3))
    assert made.period == 3 and [m.late for m in made.messages] == [0, 1, 2]


@pytest.mark.parametrize("across", [False, True])
def test_a_plan_without_delays_sends_within_the_step_or_in_the_next_forward(across):
    """The second message starts when backward ends, so it is sent in the next forward pass if it may be."""
    plan = BucketPlan(policy="x", messages=(sent(1), sent(0)))
    assert iterations_late(PROBLEM, plan, across=across) == ([0, 1] if across else [0, 0])
    in_time = BucketPlan(policy="x", messages=(sent(1), sent(0)), barrier=True)
    assert iterations_late(PROBLEM, in_time, across=across) == [0, 0]


def test_a_message_is_sent_in_the_step_that_the_plan_names():
    updates = (Update(first=0, last=0, at=2),)
    messages = (sent(1), sent(0, iteration=1, phase="forward"))
    plan = BucketPlan(policy="x", messages=messages, updates=updates)
    assert iterations_late(PROBLEM, plan, across=True) == [0, 1]
