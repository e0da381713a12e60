"""A step in the order of its schedule, from handwritten HLO text with times that are easy to add up."""

from __future__ import annotations

import pytest

from pase.errors import PaseError
from pase.hlo.schedule import scheduled

TEXT = """HloModule m, is_scheduled=true, num_partitions=4
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %start = f32[8]{0} all-reduce-start(%x), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  %beside = f32[8]{0} negate(%x)
  %done = f32[8]{0} all-reduce-done(%start)
  ROOT %next = (s32[], f32[8]{0}) tuple(%i, %done)
}
%condition (s: (s32[], f32[8])) -> pred[] {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %less = pred[] compare(%i, %i), direction=LT
}
ENTRY %main (p: f32[8]) -> f32[32] {
  %p = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[8]{0}) tuple(%zero, %p)
  %loop = (s32[], f32[8]{0}) while(%init), condition=%condition, body=%body TRIPS
  %y = f32[8]{0} get-tuple-element(%loop), index=1
  %first = f32[8]{0} all-reduce-start(%y), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%add
  %second = f32[8]{0} all-reduce-start(%y), channel_id=3, replica_groups={{0,1},{2,3}}, to_apply=%add
  %long = f32[8]{0} sine(%y)
  %first.done = f32[8]{0} all-reduce-done(%first)
  %second.done = f32[8]{0} all-reduce-done(%second)
  ROOT %alone = f32[32]{0} all-gather(%second.done), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={0}
}"""

KNOWN = TEXT.replace("TRIPS", ', backend_config={"known_trip_count":{"n":"5"}}')


def step_of(text, kernel=1.0, sent=3.0):
    return scheduled(text, kernel_s=lambda work: kernel, collective_s=lambda c: sent)


def test_a_step_waits_for_what_its_kernels_do_not_hide():
    """Five turns of 3 s; two messages of 3 s, one after the other, beside a kernel of 1 s; a message beside nothing."""
    step = step_of(KNOWN)
    assert step.seconds == 5 * 3 + 6 + 3 and step.kernels_s == 5 + 1 and step.waited_s == 24 - 6
    assert step.kernels == 6 and step.trips_known
    assert step.overlapped == {"all_reduce": 1.0, "all_gather": 0.0}
    beside = {s.collective.name: (s.kernels_beside, s.collective.count) for s in step.collectives}
    assert beside == {"start": (1, 5), "first": (1, 1), "second": (1, 1), "alone": (0, 1)}


def test_messages_that_kernels_hide_cost_nothing():
    assert step_of(KNOWN, kernel=10.0, sent=3.0).waited_s == 3  # the one beside nothing
    assert step_of(KNOWN, sent=0.0).seconds == 6


def test_a_loop_of_unknown_turns_is_counted_once_and_said():
    step = step_of(TEXT.replace("TRIPS", ""))
    assert not step.trips_known and step.kernels == 2


def test_a_price_that_is_no_time_is_refused():
    with pytest.raises(PaseError, match="takes nan s"):
        step_of(KNOWN, kernel=float("nan"))
