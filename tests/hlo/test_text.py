"""The HLO reader on handwritten HLO text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.hlo import collectives as hlo
from pase.hlo.groups import axes_of_groups, axes_of_pairs
from pase.hlo.module import Shape, modules, read
from pase.hlo.protos import parse
from pase.machine.types import Mesh
from tests.hlo.programs import ALONG_X, MESH, X, Y, one

ADD = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}"""


def module(
    *lines: str, before: str = "", devices: int = 8, read: str = "f32[16]", made: str = "f32[16]"
) -> str:
    """The text of a module with these lines in its entry computation, and these computations before it."""
    body = "\n".join(f"  {line}" for line in lines)
    entry = f"ENTRY %main (p: {read}) -> {made} {{\n{body}\n}}"
    return f"HloModule golden, num_partitions={devices}\n\n{ADD}\n\n{before}\n\n{entry}\n"


def reduced_over(groups: str, devices: int = 8) -> hlo.HloCollective:
    """Reads back an all-reduce over these groups."""
    text = module(
        "%p = f32[16]{0} parameter(0)",
        f"ROOT %a = f32[16]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, "
        'use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(f)/{odd},name" stack_frame_id=1}',
        devices=devices,
    )
    return one(hlo.collectives(text, MESH))


@pytest.mark.parametrize(
    "groups",
    [
        "{{0,2,4,6},{1,3,5,7}}",
        "[2,4]<=[4,2]T(1,0)",
        "mesh['axis_0'=4,'axis_1'=2] {'axis_0'}",
        "mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}",
        "mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_2'}",
        "mesh['a'=8] {'a':(1)4}",
        "mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}",
        "mesh['a'=2,'b'=2,'c'=2] {'a','b'}",
    ],
)
def test_every_form_of_replica_groups(groups):
    c = reduced_over(groups)
    assert set(c.groups) == ALONG_X
    assert (c.kind, c.bytes, c.group_size, c.axes, c.op_name) == ("all_reduce", 64, 4, X, "jit(f)/{odd},name")


def test_a_part_of_an_axis():
    # This is how the compiler prints an all-to-all between two halves of an axis of size 4.
    groups = reduced_over("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(0,2,1)) {'b':(2)2}").groups
    ids = np.arange(8).reshape(2, 2, 2).transpose(0, 2, 1).reshape(2, 2, 2)
    assert set(groups) == {(ids[i, j, 0], ids[i, j, 1]) for i in range(2) for j in range(2)}


def test_groups_off_the_mesh_have_no_axes():
    assert axes_of_groups(((0, 3), (1, 2), (4, 7), (5, 6)), MESH) is None
    assert axes_of_groups(tuple((i,) for i in range(8)), MESH) == 0
    assert axes_of_pairs(((0, 8),), MESH) is None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_groups_of_a_mesh_are_found_again(sizes, data):
    mesh = Mesh(names=tuple(f"a{i}" for i in range(len(sizes))), sizes=tuple(sizes))
    axes = data.draw(st.integers(0, 2 ** len(sizes) - 1))
    # Compute the same groups independently, from device coordinates.
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, at in enumerate(itertools.product(*(range(s) for s in sizes))):
        groups.setdefault(tuple(c for i, c in enumerate(at) if not axes >> i & 1), []).append(device)
    found = axes_of_groups(tuple(tuple(g) for g in groups.values()), mesh)
    real = sum(1 << i for i, s in enumerate(sizes) if s > 1)
    assert found == axes & real
    if not found:
        return  # XLA writes groups of one device in another form
    named = ",".join(f"'{n}'" for i, n in enumerate(mesh.names) if axes >> i & 1)
    text = f"mesh[{','.join(f'{n!r}={s}' for n, s in zip(mesh.names, sizes, strict=True))}] {{{named}}}"
    assert {frozenset(g) for g in reduced_over(text, mesh.devices).groups} == {
        frozenset(g) for g in groups.values()
    }


WRAPPED = """\
%wrapped (q: f32[16]) -> f32[4] {
  %q = f32[16]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%q), channel_id=5, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}
%exchanged (r: f32[16]) -> f32[16] {
  %r = f32[16]{0} parameter(0)
  ROOT %aa = f32[16]{0} all-to-all(%r), channel_id=6, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
}"""
TWO = "(f32[64]{0}, f32[64]{0})"


@pytest.mark.parametrize(
    ("start", "done", "made", "kind", "nbytes"),
    [
        (
            "f32[16]{0} all-reduce-start(%p), replica_groups=[2,4]<=[8], to_apply=%add",
            "all-reduce-done(%s)",
            "f32[16]{0}",
            "all_reduce",
            64,
        ),
        (
            f"((f32[16]{{0}}, f32[16]{{0}}), {TWO}) all-gather-start(%p, %p), "
            "replica_groups=[2,4]<=[8], dimensions={0}",
            "all-gather-done(%s)",
            TWO,
            "all_gather",
            2 * 64 * 4,
        ),
        (
            "(f32[16]{0:S(5)}, f32[16]{0}, u32[]{:S(2)}, u32[]{:S(2)}) "
            "collective-permute-start(f32[16]{0} %p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
            "collective-permute-done(%s)",
            "f32[16]{0}",
            "permute",
            64,
        ),
        (
            "((f32[16]{0}), f32[4]{0}, u32[]) async-start(%p), calls=%wrapped",
            "async-done(%s), calls=%wrapped",
            "f32[4]{0}",
            "reduce_scatter",
            64,
        ),
        (
            "((f32[16]{0}), f32[16]{0}) async-start(%p), calls=%exchanged",
            "async-done(%s), calls=%exchanged",
            "f32[16]{0}",
            "all_to_all",
            64,
        ),
    ],
    ids=["all-reduce", "all-gather", "permute", "reduce-scatter", "all-to-all"],
)
def test_async_forms_count_once(start, done, made, kind, nbytes):
    lines = ("%p = f32[16]{0} parameter(0)", f"%s = {start}", f"ROOT %d = {made} {done}")
    c = one(hlo.collectives(module(*lines, before=WRAPPED, made=made)))
    assert (c.kind, c.bytes, c.group_size) == (kind, nbytes, 4)


def test_no_groups_means_all_devices_and_one_device_is_no_traffic():
    lines = (
        "%p = f32[16]{0} parameter(0)",
        "%a = f32[16]{0} all-reduce(%p), replica_groups={}, to_apply=%add",
        "ROOT %b = f32[16]{0} all-reduce(%a), replica_groups=[8,1]<=[8], to_apply=%add",
    )
    found = hlo.collectives(module(*lines), MESH)
    assert [(c.group_size, c.axes) for c in found] == [(8, X | Y), (1, 0)]
    assert hlo.summary(found) == {"all_reduce": (1, 64)}


def test_a_computation_called_twice_counts_twice():
    lines = (
        "%p = f32[16]{0} parameter(0)",
        "%a = f32[4]{0} call(%p), to_apply=%wrapped",
        "ROOT %b = f32[4]{0} fusion(%p), kind=kCustom, calls=%wrapped",
    )
    c = one(hlo.collectives(module(*lines, before=WRAPPED, made="f32[4]")))
    assert (c.kind, c.count) == ("reduce_scatter", 2)
    assert hlo.summary([c]) == {"reduce_scatter": (2, 128)}


OVERLAPPED = """\
%start (a: f32[4]) -> (f32[4], f32[16]) {
  %a = f32[4]{0} parameter(0)
  %g0 = f32[16]{0} all-gather(%a), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %c0 = (f32[4]{0}, f32[16]{0}) custom-call(%g0), custom_call_target="AsyncCollectiveStart"
}
%beside (b: f32[4]) -> f32[16] {
  %b = f32[4]{0} parameter(0)
  ROOT %g1 = f32[16]{0} all-gather(%b), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
}
%end (c: f32[4]) -> f32[16] {
  %c = f32[4]{0} parameter(0)
  %g2 = f32[16]{0} all-gather(%c), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %c2 = f32[16]{0} custom-call(%c, %g2), custom_call_target="AsyncCollectiveDone"
}"""


def test_a_collective_fused_with_the_work_that_hides_it_counts_once():
    lines = (
        "%p = f32[4]{0} parameter(0)",
        "%s = (f32[4]{0}, f32[16]{0}) fusion(%p), kind=kCustom, calls=%start",
        "%t = f32[16]{0} fusion(%p), kind=kOutput, calls=%beside",
        "ROOT %e = f32[16]{0} fusion(%p), kind=kCustom, calls=%end",
    )
    c = one(hlo.collectives(module(*lines, before=OVERLAPPED, read="f32[4]")))
    assert (c.kind, c.bytes, c.name, c.count) == ("all_gather", 64, "g0", 1)


def test_tpus_fused_reduce_scatter_is_one():
    before = """\
%all-reduce-scatter.1 (input: f32[16]) -> f32[4] {
  %input = f32[16]{0:T(128)} parameter(0)
  %ar = f32[16]{0:T(128)} all-reduce(%input), channel_id=9, replica_groups=[2,4]<=[8], to_apply=%add
  %at = u32[] partition-id()
  ROOT %ds = f32[4]{0:T(128)} dynamic-slice(%ar, %at), dynamic_slice_sizes={4}
}"""
    lines = (
        "%p = f32[16]{0} parameter(0)",
        "ROOT %f = f32[4]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1",
    )
    c = one(hlo.collectives(module(*lines, before=before, made="f32[4]")))
    assert (c.kind, c.bytes, c.group_size) == ("reduce_scatter", 64, 4)


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


@given(
    st.lists(st.integers(0, 9), max_size=4), st.sampled_from(["f32", "bf16", "s8", "f8e4m3fn", "pred", "c64"])
)
def test_bytes_of_a_type_are_numpys(dims, dtype):
    width = {"f32": 4, "bf16": 2, "s8": 1, "f8e4m3fn": 1, "pred": 1, "c64": 8}[dtype]
    text = f"{dtype}[{','.join(map(str, dims))}]"
    both = f"(({text}, /*index=1*/{text}), u32[])"
    (read,) = modules(module(f"ROOT %p = {both} parameter(0)", read=both, made=both))
    array = Shape(dtype=dtype, dims=tuple(dims))
    assert list(read.entry.root.shape.arrays()) == [array, array, Shape(dtype="u32")]
    assert array.nbytes == int(np.prod(dims)) * width
    assert read.entry.root.shape.nbytes == 2 * array.nbytes + 4


def test_every_type_of_jaxlib_is_known_by_its_number():
    from jaxlib import _hlo

    named = {t.name.lower(): t.value for t in _hlo.PrimitiveType}
    for dtype, number in named.items():
        if dtype not in ("primitive_type_invalid", "opaque_type", "tuple", "token"):
            (read,) = modules(
                module(f"ROOT %p = {dtype}[8] parameter(0)", read=f"{dtype}[8]", made=f"{dtype}[8]")
            )
            assert (read.entry.root.shape.dtype, number > 0) == (dtype, True)
            assert read.entry.root.shape.nbytes > 0


def test_text_that_is_no_compiled_hlo_is_refused():
    with pytest.raises(PaseError, match="HloModule") as e:
        hlo.collectives("module @f { func.func public @main() { stablehlo.add } }")
    assert ".compile()" in e.value.fix
    with pytest.raises(PaseError, match="XLA cannot parse"):
        modules("HloModule m\n\nENTRY %f (p: f32[]) -> f32[] {\n  ROOT %p = f32[] para")
    with pytest.raises(PaseError, match="entry computation") as e:
        read(b"", "trace.pb")
    assert e.value.where == "trace.pb"
    with pytest.raises(PaseError, match="HloProto") as e:
        read(b"\x0a\xff", "trace.pb")
    assert e.value.where == "trace.pb"
    with pytest.raises(PaseError, match="'#99'"):
        _ = Shape(dtype="#99", dims=(3,)).nbytes


def test_a_name_that_is_not_utf8_is_refused():
    """XLA's strings are UTF-8. If they were read as bytes, later comparisons with text would fail."""
    plane = b"\x12\x03\xff\xfe\xfd"  # XPlane.name
    with pytest.raises(PaseError, match="XSpace") as e:
        parse("XSpace", b"\x0a" + bytes([len(plane)]) + plane, "rank0")
    assert e.value.where == "rank0"
