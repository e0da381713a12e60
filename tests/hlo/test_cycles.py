"""Cycle estimates of programs compiled for TPU, from handwritten HLO text. bench/audit/tpu.py tests libtpu itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.hlo.cycles import cycles
from pase.machine import Mesh

MESH = Mesh(names=("x", "y"), sizes=(4, 2))


def noted(n: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{n}"}}}}'


def program(*, outer: int, inner: int, body: int, deep: int, entry: int) -> str:
    """A loop in a loop, with ops of ``entry``, ``body`` and ``deep`` cycles, and exposed and overlapped collectives."""
    return f"""HloModule step, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

%all-reduce-scatter.1 (i: bf16[64,8]) -> bf16[8,8] {{
  %i = bf16[64,8]{{1,0}} parameter(0)
  %sum = bf16[64,8]{{1,0}} all-reduce(%i), replica_groups=[1,8]<=[8], to_apply=%add
  %at = u32[] partition-id()
  ROOT %mine = bf16[8,8]{{1,0}} dynamic-slice(%sum, %at, %at), dynamic_slice_sizes={{8,8}}
}}

%async_collective_fusion.1 (w: bf16[4,8]) -> (bf16[4,8], bf16[8,8], u32[]) {{
  %w = bf16[4,8]{{1,0}} parameter(0)
  %begun = bf16[8,8]{{1,0}} all-gather(%w), replica_groups=[4,2]<=[8], dimensions={{0}}
  ROOT %go = (bf16[4,8], bf16[8,8], u32[]) custom-call(%begun), custom_call_target="AsyncCollectiveStart"
}}

%product (v: bf16[64,8]) -> bf16[64,8] {{
  %v = bf16[64,8]{{1,0}} parameter(0)
  ROOT %vv = bf16[64,8]{{1,0}} multiply(%v, %v)
}}

%deep (p: (s32[], bf16[64,8])) -> (s32[], bf16[64,8]) {{
  %p = (s32[], bf16[64,8]) parameter(0)
  %x = bf16[64,8]{{1,0}} get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=0
  %work = bf16[64,8]{{1,0}} fusion(%x), kind=kOutput, calls=%product, {noted(deep)}
  %rs = bf16[8,8]{{1,0}} fusion(%work), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %r = (s32[], bf16[64,8]) tuple(%n, %work)
}}

%never (p: (s32[], bf16[64,8])) -> pred[] {{
  %p = (s32[], bf16[64,8]) parameter(0)
  ROOT %t = pred[] constant(true)
}}

%body (p: (s32[], bf16[64,8])) -> (s32[], bf16[64,8]) {{
  %p = (s32[], bf16[64,8]) parameter(0)
  %all = bf16[64,8]{{1,0}} get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=0
  %w = bf16[4,8]{{1,0}} slice(%all), slice={{[0:4], [0:8]}}
  %start = (bf16[4,8], bf16[8,8], u32[]) fusion(%w), kind=kCustom, calls=%async_collective_fusion.1, {noted(body)}
  %ag = bf16[16,8]{{1,0}} all-gather(%w), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={{0}}
  %loop2 = (s32[], bf16[64,8]) while(%p), condition=%never, body=%deep, {loop(inner)}
  ROOT %r = (s32[], bf16[64,8]) tuple(%n, %all)
}}

ENTRY %main (x: bf16[64,8]) -> bf16[64,8] {{
  %x = bf16[64,8]{{1,0}} parameter(0)
  %made = bf16[64,8]{{1,0}} copy(%x), {noted(entry)}
  %ar = bf16[64,8]{{1,0}} all-reduce(%made), replica_groups=[1,8]<=[8], to_apply=%add
  %zero = s32[] constant(0)
  %begin = (s32[], bf16[64,8]) tuple(%zero, %made)
  %loop1 = (s32[], bf16[64,8]) while(%begin), condition=%never, body=%body, {loop(outer)}
  ROOT %out = bf16[64,8]{{1,0}} get-tuple-element(%loop1), index=1
}}
"""


def loop(trips: int) -> str:
    return f'backend_config={{"known_trip_count":{{"n":"{trips}"}},"window_config":{{"estimated_cycles":"999"}}}}'


@given(*[st.integers(0, 1000)] * 5)
def test_loops_count_as_often_as_they_turn(outer, inner, body, deep, entry):
    found = cycles(program(outer=outer, inner=inner, body=body, deep=deep, entry=entry))
    assert found.total == entry + outer * (body + inner * deep)
    assert found.trips_known


def test_collectives_that_stand_alone_and_those_that_products_run_beside():
    found = cycles(program(outer=3, inner=5, body=1, deep=1, entry=1), MESH)
    waiting = {(c.kind, c.count, c.bytes, c.axes) for c in found.waiting}
    # The reduce-scatter is a fusion of an all-reduce and a slice. The asynchronous all-gather is not exposed.
    assert waiting == {
        ("all_reduce", 1, 64 * 8 * 2, 3),
        ("reduce_scatter", 15, 64 * 8 * 2, 3),
        ("all_gather", 3, 4 * 8 * 2 * 4, 1),
    }
    assert {(c.kind, c.count, c.bytes, c.axes) for c in found.hidden} == {("all_gather", 3, 128, 2)}


def test_a_program_without_estimates_is_refused():
    text = "HloModule m\n\nENTRY %main (p: f32[8]) -> f32[8] {\n  ROOT %p = f32[8]{0} parameter(0)\n}\n"
    with pytest.raises(PaseError, match="estimated_cycles") as e:
        cycles(text)
    assert "TPU" in e.value.fix
