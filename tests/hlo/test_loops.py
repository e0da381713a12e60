"""Trip counts of loops, from their start, step and bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pase.hlo import collectives as hlo
from tests.hlo.programs import module, one

LOOP = """\
%body (s: (s32[], f32[16])) -> (s32[], f32[16]) {{
  %s = (s32[], f32[16]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %k = s32[] constant({step})
  %j = s32[] add(%k, %i)
  %x = f32[16]{{0}} get-tuple-element(%s), index=1
  %y = f32[16]{{0}} all-reduce(%x), replica_groups={{}}, to_apply=%add
  ROOT %t = (s32[], f32[16]{{0}}) tuple(%j, %y)
}}
%cond (c: (s32[], f32[16])) -> pred[] {{
  %c = (s32[], f32[16]{{0}}) parameter(0)
  %ci = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant({bound})
  ROOT %lt = pred[] compare({compared}), direction={direction}
}}"""


@given(
    st.integers(-5, 5),
    st.integers(-3, 3),
    st.integers(-8, 8),
    st.sampled_from(["LT", "LE", "GT", "GE", "NE"]),
    st.booleans(),
)
def test_trips_are_counted_as_python_counts_them(start, step, bound, direction, mirrored):
    text = module(
        "%p = f32[16]{0} parameter(0)",
        f"%i0 = s32[] constant({start})",
        "%t0 = (s32[], f32[16]{0}) tuple(%i0, %p)",
        "%w = (s32[], f32[16]{0}) while(%t0), condition=%cond, body=%body",
        "ROOT %r = f32[16]{0} get-tuple-element(%w), index=1",
        before=LOOP.format(
            step=step, bound=bound, direction=direction, compared="%n, %ci" if mirrored else "%ci, %n"
        ),
    )
    holds = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__, "NE": int.__ne__}[
        direction
    ]
    i, trips = start, 0
    while trips < 100 and (holds(bound, i) if mirrored else holds(i, bound)):
        i, trips = i + step, trips + 1
    c = one(hlo.collectives(text))
    assert (c.count, c.count_known) == ((1, False) if trips == 100 else (trips, True))
