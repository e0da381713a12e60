"""The parts of a model: the embedding, a block, and the head."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pase import costmodels, zoo
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from pase.ir.precision import in_fp8
from pase.machine import load
from pase.plan.step import EAGER, step_time
from pase.stated.parts import parts_of
from pase.stated.place import place
from pase.stated.program import PROGRAMS
from pase.stated.strategy import PRODUCTS_IN, parse
from tests.stated.prices import GRAPH, H100, MODEL, graph_of, price


def test_the_first_stage_has_the_embedding_and_the_last_one_a_copy_of_a_tied_one():
    def parts(graph):  # type: ignore[no-untyped-def]
        s = replace(parse("dp=2", 2), micro=8, remat="none")
        return parts_of(graph, place(graph, s, MODEL), s, PROGRAMS["megatron"], MODEL)

    m = zoo.get("gpt2", batch=16, seq=128, layers=4, remat=0)
    tied = named(simplify(trace(m.loss_fn, m.params, m.batch).graph))
    embedding = 50257 * 768
    got = parts(tied)
    assert embedding < got.first.parameters < 1.1 * embedding
    assert got.tied.parameters == embedding and got.last.parameters < 0.1 * embedding
    two = price("dp=2,pp=2,micro=1", 4, "megatron", graph=tied)
    assert "sums of tied gradients" in two.collectives_s
    assert "sums of tied gradients" not in price("dp=4", 4, graph=tied).collectives_s
    apart = parts(GRAPH)
    embedding = 128256 * 4096
    assert apart.tied.parameters == 0 and apart.first.parameters == embedding <= apart.last.parameters


PLACED = place(GRAPH, parse("dp=8", 8), MODEL)


def test_a_library_s_kernel_may_take_longer_than_its_traffic():
    one = replace(EAGER, kernels=frozenset({"rms_norm"}))
    times = [
        step_time(GRAPH, PLACED.mesh, PLACED.strategy, MODEL, executor=replace(one, traffic=traffic))
        for traffic in ({}, {"rms_norm": (2.0, 1.0)}, {"rms_norm": (3.0, 1.0)})
    ]
    forward = [t.passes[0].device_s for t in times]
    assert forward[2] - forward[1] == pytest.approx(forward[1] - forward[0], rel=1e-6)
    assert forward[1] > forward[0]
    assert len({t.passes[1].device_s for t in times}) == 1


def test_fp8_is_faster_and_its_casts_are_counted():
    """With few tokens per device, the casts of weights take longer than the products save."""
    long = graph_of(seq=8192)
    bf16, fp8 = (price(f"fsdp=8,precision={p}", graph=long) for p in ("bf16", "fp8"))
    assert bf16.step_s / 2 < fp8.step_s < bf16.step_s
    read_once = replace(PROGRAMS["compiled"], fp8_passes=0)
    assert price("fsdp=8,precision=fp8", program=read_once, graph=long).step_s < fp8.step_s
    assert price("fsdp=8,precision=fp8").step_s > price("fsdp=8").step_s


@pytest.mark.parametrize(("precision", "ways"), [("fp8", (1 / 2, 1 / 2)), ("nvfp4", (9 / 32, 9 / 16))])
def test_what_a_product_casts_is_gathered_as_it_is_cast(precision: str, ways: tuple[float, float]) -> None:
    """Transformer Engine casts before it gathers; what the loss's product gathers stays in 16 bits."""
    machine = load("gb200_nvl72")
    model = costmodels.get("analytic", machine)
    s = replace(parse(f"tp=4,sp,precision={precision}", 4), micro=16, remat="none")
    graph = in_fp8(GRAPH, PRODUCTS_IN[s.precision] or "")
    megatron = PROGRAMS["megatron"]
    cast, plain = (
        parts_of(graph, place(graph, s, model), s, program, model)
        for program in (megatron, replace(megatron, gathered={}))
    )
    both = list(zip(cast.block.sent, plain.block.sent, strict=True))
    for a, b in both:
        expected = ways[a.backward] if a.kind == "all_gather" else 1.0
        assert (a.kind, a.nbytes) == (b.kind, expected * b.nbytes)
    assert {(a.kind, a.backward) for a, b in both if a.seconds < b.seconds} == {
        ("all_gather", x) for x in (False, True)
    }
    assert cast.last.sent == plain.last.sent


def test_weights_are_cast_once_for_all_micro_batches_of_a_step() -> None:
    s = replace(parse("dp=8,precision=fp8", 8), micro=2, remat="none")
    graph = in_fp8(GRAPH, PRODUCTS_IN[s.precision] or "")
    megatron = PROGRAMS["megatron"]
    once, again = (
        parts_of(graph, place(graph, s, MODEL), s, replace(megatron, keeps_cast_weights=kept), MODEL).block
        for kept in (True, False)
    )
    assert again.once_s == 0 < once.once_s and once.backward_s == again.backward_s
    assert again.forward_s - once.forward_s == pytest.approx(once.once_s)
    # Read once in 16 bits and written twice in eight, as it is and transposed.
    weights = sum(8 * n for n in (4096 * 4096 * 2, 4096 * 1024 * 2, 4096 * 14336 * 3)) / 2
    device = H100.device
    assert once.once_s == pytest.approx(weights / device.moved_bytes_per_s + 7 * device.launch_s, rel=0.01)


def test_casts_run_at_their_own_rate_where_the_machine_knows_it() -> None:
    slow = replace(H100, device=replace(H100.device, efficiency={**H100.device.efficiency, "cast": 0.425}))
    assert (
        slow.device.cast_bytes_per_s
        == 0.5 * H100.device.cast_bytes_per_s
        == 0.5 * H100.device.moved_bytes_per_s
    )
    took = [
        price("dp=8,precision=fp8", model=costmodels.get("analytic", m), program="megatron").seconds["update"]
        for m in (H100, slow)
    ]
    assert took[1] > took[0]


def test_an_encoder_is_no_layer_before_the_decoder_s() -> None:
    """All blocks of the decoder read its result, so it does not lead to the first of them alone."""
    import jax
    import jax.numpy as jnp

    def attend(q: jax.Array, x: jax.Array) -> jax.Array:
        heads = [jnp.reshape(t, (*t.shape[:2], 4, 64)) for t in (q, x, x)]
        return jnp.reshape(jax.nn.dot_product_attention(*heads, implementation="cudnn"), q.shape)

    def loss(p: dict[str, jax.Array], source: jax.Array, target: jax.Array) -> jax.Array:
        x = source
        for w in p["encoder"]:
            x = x + attend(x @ w, x)

        def layer(y: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return y + attend(y @ w, x), None

        y, _ = jax.lax.scan(layer, target, p["decoder"])
        return jnp.mean(y**2)

    f = jax.ShapeDtypeStruct
    p = {"encoder": f((2, 256, 256), jnp.bfloat16), "decoder": f((4, 256, 256), jnp.bfloat16)}
    batch = f((16, 64, 256), jnp.bfloat16), f((16, 32, 256), jnp.bfloat16)
    graph = named(simplify(trace(loss, p, *batch).graph))
    s = replace(parse("dp=8", 8), micro=2, remat="full")
    parts = parts_of(graph, place(graph, s, MODEL), s, PROGRAMS["megatron"], MODEL)
    assert (parts.layers_before, parts.blocks) == (0, 4)
    assert parts.first.kept == parts.first.saved > 0 == parts.first.recompute_s
