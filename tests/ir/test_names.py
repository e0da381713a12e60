"""Nodes are named after what they multiply, and dims of one meaning share a letter."""

from __future__ import annotations

from pase.ir import Graph
from tests.ir.graphs import simple


def compute(graph: Graph) -> list[str]:
    return [n.name for n in graph.nodes if n.kind not in ("parameter", "input")]


def test_names_are_of_what_is_multiplied() -> None:
    nodes = compute(simple("gpt2"))
    assert {"wte:take", "wte:dot", "blocks.attention.wq:dot", "blocks.ff.w2:dot"} <= set(nodes)
    assert {"attention@fused_attend"} <= set(nodes) and "dot@attend" in compute(
        simple("gpt2?attention=plain")
    )
    assert not [n for n in nodes if ".b" in n.removeprefix("blocks").partition(":")[0] and ":dot" in n]
    assert {"lstm.0.wx:dot", "lstm.0.wh:dot", "classifier.w:dot"} <= set(compute(simple("rnnlm")))
    assert {"blocks.ff.router:dot", "blocks.ff.gate:dot"} <= set(compute(simple("mixtral_8x7b")))


def test_the_width_is_d() -> None:
    for model in ("gpt2", "llama3_8b", "bert_base", "vit_l16", "mixtral_8x7b"):
        graph = simple(model)
        (name,) = [n.name for n in graph.nodes if n.kind == "matmul" and n.name.endswith("attention.wq:dot")]
        assert [d.name for d in graph.node[name].space][:1] == ["b"]
        assert graph.node[name].space["d"].size == 64


def test_blocks_of_a_projection_are_blocks_of_its_heads() -> None:
    """Heads of 4, of which 2 share keys: (heads features), heads and (groups, members) have the same blocks."""
    import jax

    from pase.frontends.jax.frontend import trace
    from pase.ir import simplify
    from pase.ir.names import dim_classes, named, view_classes

    def loss(p, x):  # type: ignore[no-untyped-def]
        y = (x @ p["q"]).reshape(8, 4, 16).reshape(8, 2, 2, 16) @ p["m"]
        return (y**2).sum()

    shapes = {"q": jax.ShapeDtypeStruct((32, 64), "float32"), "m": jax.ShapeDtypeStruct((16, 16), "float32")}
    graph = named(simplify(trace(loss, shapes, jax.ShapeDtypeStruct((8, 32), "float32")).graph))
    classes = dim_classes(graph)
    views = view_classes(graph, classes)
    sizes = {c: graph.node[n].space[d].size for (n, d), c in classes.items()}
    (wide,) = {c for c in classes.values() if sizes[c] == 64}
    assert {sizes[c] for c in views[wide]} >= {64, 2} and 32 not in {sizes[c] for c in views[wide]}


def test_work_in_a_comprehension_is_named_after_the_function_around_it() -> None:
    import jax
    import jax.numpy as jnp

    from pase.frontends.jax.frontend import trace
    from pase.ir import simplify
    from pase.ir.names import named

    def loss(p, x):  # type: ignore[no-untyped-def]
        return jnp.sum(jnp.square(sum(jnp.sin(x @ (x * k)) for k in range(1, 3)) @ p))

    array = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = trace(loss, array, array).graph
    names = [n.name for n in named(simplify(graph)).nodes]
    assert sum(n.startswith(f"dot@{loss.__qualname__.replace('.<locals>', '')}") for n in names) == 2
    assert not any("genexpr" in n for n in names)
