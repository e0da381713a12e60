"""Collectives that the HLO reader finds: those of compiled JAX programs, and those of handwritten HLO text."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from pase.hlo import collectives as hlo
from pase.machine.types import Mesh
from tests.hlo.programs import ALONG_X, ALONG_Y, MESH, X, Y, module, one


def compiled(f, *shapes, specs=None, out=None, dtype="float32"):
    """Compiles f for 8 host devices. If ``specs`` is None, f is a shard_map and its arguments have no shardings."""
    import jax
    from jax.sharding import NamedSharding

    mesh = jax_mesh()
    specs = specs or [None] * len(shapes)
    args = [
        jax.ShapeDtypeStruct(s, dtype, sharding=p if p is None else NamedSharding(mesh, p))
        for s, p in zip(shapes, specs, strict=True)
    ]
    out_shardings = None if out is None else NamedSharding(mesh, out)
    return jax.jit(f, **({} if out is None else {"out_shardings": out_shardings})).lower(*args).compile()


def jax_mesh():
    import jax

    devices = jax.devices()
    if len(devices) < MESH.devices:
        pytest.skip(f"needs {MESH.devices} devices, jax has {len(devices)}")
    return jax.sharding.Mesh(np.array(devices[: MESH.devices]).reshape(MESH.sizes), MESH.names)


def local(f, ins, outs):
    """Wraps f in shard_map, so that the program has exactly the collectives that f calls."""
    import jax

    return partial(jax.shard_map, mesh=jax_mesh(), check_vma=False, in_specs=ins, out_specs=outs)(f)


def test_psum_is_an_all_reduce_of_the_local_tensor():
    import jax
    from jax.sharding import PartitionSpec as P

    f = local(lambda a: jax.lax.psum(a, "x"), P("x", "y"), P(None, "y"))
    c = one(hlo.collectives(compiled(f, (8, 16)), MESH))
    assert (c.kind, c.bytes, c.group_size, c.count, c.axes) == ("all_reduce", 2 * 8 * 4, 4, 1, X)
    assert set(c.groups) == ALONG_X
    assert c.dtypes == ("f32",) and c.count_known
    assert "psum" in c.op_name


def test_psum_of_a_tuple_sums_its_parts():
    import jax
    from jax.sharding import PartitionSpec as P

    f = local(lambda a: jax.lax.psum((a, a * 2, a.sum()), ("x", "y")), P("x", "y"), (P(), P(), P()))
    c = one(hlo.collectives(compiled(f, (8, 16)), MESH))
    assert (c.kind, c.bytes, c.group_size, c.axes) == ("all_reduce", (16 + 16 + 1) * 4, 8, X | Y)
    assert len(c.operands) == 3 and sorted(c.parts) == [4, 64, 64]


def test_psum_scatter_counts_its_input():
    import jax
    from jax.sharding import PartitionSpec as P

    f = local(lambda a: jax.lax.psum_scatter(a, "x", tiled=True), P(None, "y"), P("x", "y"))
    c = one(hlo.collectives(compiled(f, (8, 16)), MESH))
    assert (c.kind, c.bytes, c.group_size, c.axes) == ("reduce_scatter", 8 * 8 * 4, 4, X)


def test_all_gather_counts_its_output():
    import jax
    from jax.sharding import PartitionSpec as P

    f = local(lambda a: jax.lax.all_gather(a, "y", tiled=True), P("x", "y"), P("x", None))
    c = one(hlo.collectives(compiled(f, (8, 16)), MESH))
    assert (c.kind, c.bytes, c.group_size, c.axes) == ("all_gather", 2 * 16 * 4, 2, Y)
    assert set(c.groups) == ALONG_Y


def test_all_to_all_counts_the_local_tensor():
    import jax
    from jax.sharding import PartitionSpec as P

    f = local(lambda a: jax.lax.all_to_all(a, "x", 1, 0, tiled=True), P("x", None), P(None, "x"))
    c = one(hlo.collectives(compiled(f, (8, 16)), MESH))
    assert (c.kind, c.bytes, c.group_size, c.axes) == ("all_to_all", 2 * 16 * 4, 4, X)


def test_ppermute_keeps_its_pairs():
    import jax
    from jax.sharding import PartitionSpec as P

    ring = [(i, (i + 1) % 4) for i in range(4)]
    f = local(lambda a: jax.lax.ppermute(a, "x", ring), P("x", None), P("x", None))
    c = one(hlo.collectives(compiled(f, (8, 16)), MESH))
    assert (c.kind, c.bytes, c.group_size, c.axes) == ("permute", 2 * 16 * 4, 4, X)
    assert set(c.groups) == ALONG_X
    assert set(c.pairs) == {(2 * a + y, 2 * b + y) for a, b in ring for y in range(2)}


def test_loops_multiply_nested_ones_too():
    import jax
    from jax.sharding import PartitionSpec as P

    def inner(c, _):
        return jax.lax.psum(jax.numpy.sin(c), "x"), None

    def outer(c, _):
        c, _ = jax.lax.scan(inner, c, None, length=3)
        return jax.lax.psum(c, "y"), None

    f = local(lambda a: jax.lax.scan(outer, a, None, length=5)[0], P(None, "y"), P(None, "y"))
    program = compiled(f, (8, 16))
    counts = {c.axes: (c.count, c.count_known) for c in hlo.collectives(program, MESH)}
    assert counts == {X: (15, True), Y: (5, True)}
    # Without the compiler's recorded trip count, it follows from the loop's start, step and bound.
    unnoted = program.as_text().replace("known_trip_count", "forgotten")
    assert {c.axes: (c.count, c.count_known) for c in hlo.collectives(unnoted, MESH)} == counts


def test_a_loop_that_data_ends_says_so():
    import jax
    from jax.sharding import PartitionSpec as P

    f = local(
        lambda a: jax.lax.while_loop(lambda c: c.sum() < 5.0, lambda c: jax.lax.psum(c, "x"), a), P(), P()
    )
    c = one(hlo.collectives(compiled(f, (8, 16))))
    assert (c.count, c.count_known, c.axes) == (1, False, None)


def test_the_costlier_branch_counts():
    import jax
    from jax.sharding import PartitionSpec as P

    def f(a, b):
        return jax.lax.cond(
            a[0, 0] > 0,
            lambda u: jax.lax.psum(u, "x"),
            lambda u: jax.lax.psum(jax.lax.psum(u, "y") * u, "x"),
            b,
        )

    found = hlo.collectives(compiled(local(f, (P(), P("x", "y")), P()), (1, 1), (8, 16)), MESH)
    assert sorted(c.axes for c in found) == [X, Y]


def test_annotated_matmuls():
    from jax.sharding import PartitionSpec as P

    # The contraction dim is sharded over x: the product is reduced over x, then gathered over y.
    program = compiled(lambda a, b: a @ b, (64, 32), (32, 16), specs=[P(None, "x"), P("x", "y")], out=P())
    found = {c.kind: c for c in hlo.collectives(program, MESH)}
    assert set(found) == {"all_reduce", "all_gather"}
    assert (found["all_reduce"].bytes, found["all_reduce"].axes) == (64 * 8 * 4, X)
    assert (found["all_gather"].bytes, found["all_gather"].axes) == (64 * 16 * 4, Y)
    # Rows over x and columns over y need no communication.
    program = compiled(
        lambda a, b: a @ b, (64, 32), (32, 16), specs=[P("x", None), P(None, "y")], out=P("x", "y")
    )
    assert hlo.summary(hlo.collectives(program)) == {}


@pytest.mark.parametrize(
    "axes", [axes for k in (1, 2, 3) for axes in itertools.permutations("abc", k)], ids="".join
)
def test_a_gather_over_any_axes_of_a_cube_is_found_on_them(axes):
    """The partitioner may write the groups in any form, and over a mesh of its own."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    cube = jax.sharding.Mesh(jax_mesh().devices.reshape(2, 2, 2), ("a", "b", "c"))
    x = jax.ShapeDtypeStruct((64, 3), "float32", sharding=NamedSharding(cube, P(axes)))
    program = jax.jit(lambda x: x, out_shardings=NamedSharding(cube, P())).lower(x).compile()
    found = hlo.collectives(program, Mesh(names=("a", "b", "c"), sizes=(2, 2, 2)))
    # Dim 0 may be gathered in several steps. Together they cover the axes, and the last one outputs the whole array.
    assert {c.kind for c in found} <= {"all_gather", "permute"}
    gathers = [c for c in found if c.kind == "all_gather"]
    assert gathers[-1].bytes == 64 * 3 * 4
    assert sum(c.axes for c in gathers) == sum(1 << "abc".index(a) for a in axes)


def test_sixteen_bits_are_widened_on_the_host_and_marked():
    import jax
    from jax.sharding import PartitionSpec as P

    f = local(lambda a: jax.lax.psum(a, "x"), P("x", "y"), P(None, "y"))
    c = one(hlo.collectives(compiled(f, (8, 16), dtype="bfloat16")))
    assert (c.dtypes, c.bytes) == (("f32",), 2 * 8 * 4)


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
