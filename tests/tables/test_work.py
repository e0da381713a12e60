"""The local work of a node: products over padded tokens and products of unaligned rows take longer."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from pase import costmodels, machine
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, simplify
from pase.machine import Mesh
from pase.tables.build import habits, work_cost, work_price
from pase.tables.work import CompilerHabits, Work, node_work
from tests.tables.graphs import TPU, block, untiled


def priced(graph: Graph, of: machine.Machine) -> dict[str, float]:
    model = costmodels.get("analytic", of)
    cfg = {n.name: np.full((1, 1), -1, dtype=np.int8) for n in graph.nodes}
    mesh = Mesh(names=("a",), sizes=(1,))
    return {
        n.name: float(
            np.ravel(work_cost(node_work(graph, n, cfg[n.name], mesh, "adam", habits(model)), model))[0]
        )
        for n in graph.nodes
    }


@pytest.mark.parametrize(("seq", "factor"), [(128, 1.0), (197, 256 / 197)])
def test_queries_are_made_over_padded_tokens(seq: int, factor: float) -> None:
    """A head of 64 puts the tokens along the lanes, so the products that make queries, keys and values work on padded
    tokens. The products of the feed-forward layer have other dims along the lanes."""
    graph = block(seq)
    tiled, dense = priced(graph, TPU), priced(graph, untiled())
    (query,) = (n for n in tiled if n.endswith("attention.wq:dot"))
    assert tiled[query] / dense[query] == pytest.approx(factor, rel=0.02)
    (up,) = (n for n in tiled if n.endswith("ff.w1:dot"))
    assert tiled[up] / dense[up] == pytest.approx(1.0, rel=0.02)


def unaligned(function, *shapes, split: int = -1, dtype: str = "bfloat16") -> dict[str, list[bool]]:
    """For each product of a function of arrays, whether forward and each backward product have unaligned rows."""
    import jax

    from pase.frontends.jax.frontend import trace

    args = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    graph = simplify(trace(lambda p: function(*p).astype("float32").sum(), tuple(args)).graph)
    mesh = Mesh(names=("a",), sizes=(8,))
    return {
        n.name: [
            bool(np.ravel(w.unaligned)[0])
            for w in node_work(graph, n, np.full((1, 1), split, dtype=np.int8), mesh)
            if w.kind == "matmul"
        ]
        for n in graph.nodes
        if n.kind == "matmul"
    }


def test_rows_of_operands_that_are_no_multiple_of_16_bytes():
    """Forward reads both operands, and each product of backward reads the result's gradient and the other operand."""
    import jax.numpy as jnp

    def only(found):
        (flags,) = found.values()
        return tuple(flags)

    product, transposed, never = jnp.matmul, partial(jnp.einsum, "md,vd->mv"), (False, False, False)
    assert only(unaligned(product, (64, 768), (768, 50304))) == never
    assert only(unaligned(product, (64, 768), (768, 50257))) == (True, True, True)
    assert only(unaligned(transposed, (64, 768), (50257, 768))) == (False, True, True)
    assert only(unaligned(product, (64, 100), (100, 256))) == (True, False, True)
    assert only(unaligned(product, (64, 100), (100, 256), dtype="float32")) == never
    # Odd numbers of rows do not matter, and neither do rows of fewer than 16 bytes.
    assert only(unaligned(product, (63, 768), (768, 256))) == never
    assert only(unaligned(product, (64, 4), (4, 256))) == never
    # The last dims of one matrix's rows count together: 86 * 32 is a multiple of 8.
    experts, joined = (partial(jnp.einsum, names) for names in ("ecd,edf->efc", "bcd,fd->fbc"))
    assert only(unaligned(experts, (4, 86, 64), (4, 64, 256))) == (False, True, True)
    assert only(unaligned(joined, (32, 86, 64), (256, 64))) == never


def test_an_unaligned_product_takes_longer_and_a_machine_without_the_figure_does_not_care():
    aligned, odd = (
        Work(
            kind="matmul",
            dtype="bfloat16",
            flops=np.array([2.0 * 4096**3]),
            nbytes=np.array([3 * 2 * 4096.0**2]),
            mnk=(np.array([4096.0]),) * 3,
            phase="forward",
            times=1.0,
            unaligned=flag,
        )
        for flag in (np.array([False]), np.array([True]))
    )
    h100, v100, paper = (
        costmodels.get(name, machine.load(m))
        for name, m in (("analytic", "h100x8"), ("analytic", "v100x8"), ("paper", "h100x8"))
    )
    assert 3 < float(work_price(odd, h100)[0] / work_price(aligned, h100)[0]) < 4
    for model in (v100, paper):
        assert work_price(odd, model) == work_price(aligned, model)


def test_a_wide_gradient_is_multiplied_in_its_own_dtype_by_converted_operands():
    """XLA for an H100 (JAX 0.10.2): both products of backward are in float32; each operand, and each gradient on its
    way back, is a conversion of six bytes an element."""
    import jax
    import jax.numpy as jnp

    from pase.frontends.jax.frontend import trace

    rows, depth, columns = 512, 256, 1024
    x, w = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((rows, depth), (depth, columns)))

    def product(x, w):
        return (jnp.matmul(x, w, preferred_element_type=jnp.float32) ** 2).sum()

    def mixed(x, w):
        y = jax.lax.dot_general(w, x.astype("float32"), (((0,), (1,)), ((), ())))
        return (y**2).sum()

    def work(function, habits: CompilerHabits) -> list[Work]:
        graph = simplify(trace(lambda p: function(*p), (x, w)).graph)
        (node,) = (n for n in graph.nodes if n.kind == "matmul")
        mesh, whole = Mesh(names=("a",), sizes=(1,)), np.full((1, 1), -1, dtype=np.int8)
        return list(node_work(graph, node, whole, mesh, habits=habits))

    def dtypes(found: list[Work]) -> list[str]:
        return [w.dtype for w in found if w.kind == "matmul"]

    apart = work(product, CompilerHabits())
    assert dtypes(apart) == ["bfloat16", "float32", "float32"]
    casts = sorted(float(w.nbytes[0]) for w in apart if w.casts)
    assert casts == sorted(6.0 * n for n in (rows * depth, depth * columns) for _ in range(2))
    forward, back, _ = (float(w.nbytes[0]) for w in apart if w.kind == "matmul")
    made, read = 4 * rows * columns, rows * depth + depth * columns
    assert (forward, back) == (made + 2 * read, made + 4 * read)
    inside = work(product, CompilerHabits(converts=False))
    assert dtypes(inside) == dtypes(apart) and not [w for w in inside if w.casts]
    cast_after = work(product, CompilerHabits(widens=False))
    assert set(dtypes(cast_after)) == {"bfloat16"} and not [w for w in cast_after if w.casts]
    # Operands of two dtypes are multiplied in the wider one, whichever comes first.
    assert set(dtypes(work(mixed, CompilerHabits()))) == {"float32"}


def test_the_gradient_of_a_convolutions_input_contracts_channels_out():
    """The products of a convolution of stride 2 with three channels in, which are padded to 16 bytes."""

    def loss(p, x):
        image = x @ p["before"]
        made = jax.lax.conv_general_dilated(
            image, p["filter"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return made.astype("float32").sum()

    images, side, cin, cout, window = 4, 16, 3, 64, 3
    params = {
        "before": jax.ShapeDtypeStruct((8, cin), "bfloat16"),
        "filter": jax.ShapeDtypeStruct((window, window, cin, cout), "bfloat16"),
    }
    x = jax.ShapeDtypeStruct((images, side, side, 8), "bfloat16")
    graph = simplify(trace(loss, params, x).graph)
    (node,) = (n for n in graph.nodes if n.kind == "conv")
    work = [
        w
        for w in node_work(graph, node, np.full((1, 1), -1, np.int8), Mesh(names=("a",), sizes=(1,)))
        if w.kind == "conv"
    ]
    points = images * (side // 2) ** 2
    taps = window * window
    assert [tuple(float(np.ravel(x)[0]) for x in w.mnk) for w in work] == [
        (points, cout, cin * taps),
        (4 * points, cin, cout * taps / 4),
        (cin * taps, cout, points),
    ]
    assert [float(np.ravel(w.unaligned)[0]) for w in work] == pytest.approx([8 / 3, 0, 8 / 3])
