"""Mixtures of experts as benchmarks train them: compute, the exchange of tokens, and what a program adds."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.published.mixtures import DENSE, LATENT, even_experts, latent_attention, mixture
from pase import costmodels, machine
from pase.compiler.problem.problem import SplitProblem
from pase.errors import Infeasible
from pase.frontends import registry
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from pase.stated import price as price_module
from pase.stated.experts import token_copies
from pase.stated.model import micro_batch_graph, price_model
from pase.stated.parts import parts_of
from pase.stated.place import place
from pase.stated.price import price_strategy
from pase.stated.program import PROGRAMS, AroundExperts
from pase.stated.rows import with_own_rows
from pase.stated.strategy import parse
from pase.stated.timeline import stage_layers
from pase.zoo.layers import arrays, shapes
from pase.zoo.llama import rotary

H100 = machine.load("h100x8")
MODEL = costmodels.get("analytic", H100)
SHAPE = {
    "batch": 16,
    "seq": 512,
    "layers": 6,
    "vocab": 1024,
    "d": 512,
    "ff": 256,
    "experts": 16,
    "chosen": 4,
    "kv_heads": 4,
    "group": 2,
    "head_dim": 64,
}


def graph_of(latent=None, **changed):  # type: ignore[no-untyped-def]
    m = mixture(**(SHAPE | changed), latent=latent)
    return named(simplify(trace(m.loss_fn, shapes(m.params), shapes(m.batch)).graph))


GRAPH = graph_of()
MEGATRON = PROGRAMS["megatron"]


def price(text, devices=8, program=MEGATRON, graph=GRAPH, model=MODEL):  # type: ignore[no-untyped-def]
    s = parse(text, devices)
    s = replace(s, micro=s.micro or 16 // s.ranks, remat=s.remat or "none")
    return price_strategy(graph, s, program, model, 16)


@pytest.mark.parametrize(("s", "chosen"), [(8, 4), (7, 4), (7, 3)])
def test_every_token_passes_all_of_its_experts(s, chosen):
    rng = np.random.default_rng(0)
    b, d, f, experts = 2, 6, 5, 8
    x = rng.standard_normal((b, s, d))
    w_in, down = rng.standard_normal((2, experts, d, f)), rng.standard_normal((experts, f, d))
    router = rng.standard_normal((d, experts))
    with jax.enable_x64(True):
        got = even_experts(jnp.asarray(x), {"router": router, "in": w_in, "down": down}, chosen=chosen)
    logits = (x @ router).astype(np.float32)
    gates = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want = np.zeros_like(x)
    parts = chosen if experts % chosen == 0 else 1
    taken, part = chosen // parts * s, experts // parts
    each = -(-taken // part)
    for row, token, n in np.ndindex(b, s, chosen):
        which, place = divmod(n * s + token, taken)
        e = which * part + place // each
        h = x[row, token]
        gate = h @ w_in[0, e]
        want[row, token] += gates[row, token, n] * ((gate / (1 + np.exp(-gate)) * (h @ w_in[1, e])) @ down[e])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_latent_attention_has_the_published_parameters():
    """DeepSeek-V3 (arXiv 2412.19437) has 187.1 million attention parameters per layer without norms, and 671 B in
    all."""
    sizes = LATENT["deepseek-v3"]
    m = mixture(
        batch=1,
        seq=64,
        layers=61,
        vocab=129280,
        d=7168,
        ff=2048,
        experts=256,
        chosen=8,
        kv_heads=128,
        group=1,
        head_dim=56,
        latent=sizes,
        dense=DENSE["deepseek-v3"],
    )
    attention = m.params["blocks"]["attention"]
    count = sum(math.prod(leaf.shape) for k, leaf in attention.items() if "norm" not in k) / 58
    products = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert count == products
    whole = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(m.params))
    assert whole == pytest.approx(671e9, rel=2e-3)


def test_latent_attention_is_causal_and_the_width_between_keeps_its_products():
    sizes = replace(LATENT["deepseek-v3"], queries=12, keys=8, plain=8, rotated=4, value=8)
    assert 2 * sizes.width == sizes.plain + sizes.rotated + sizes.value
    m = mixture(**(SHAPE | {"layers": 1, "d": 16, "kv_heads": 2, "group": 1}), latent=sizes)
    p = jax.tree.map(lambda a: a[0], arrays(m.params["blocks"], 0))["attention"]
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 6, 16)), jnp.float32)
    cos, sin = rotary(6, sizes.plain + sizes.rotated, 1e4)
    y = latent_attention(x, p, cos, sin, sizes)
    later = latent_attention(x.at[:, 4:].set(0.0), p, cos, sin, sizes)
    assert y.shape == x.shape
    np.testing.assert_allclose(y[:, :4], later[:, :4], rtol=1e-5, atol=1e-6)
    assert np.abs(y[:, 4:] - later[:, 4:]).max() > 1e-3


def test_dense_layers_before_the_mixtures_are_layers_of_the_first_stage():
    graph = graph_of(dense=(2, 1024))
    s = replace(parse("dp=4,pp=2", 8), micro=4, remat="none")
    parts = {
        remat: parts_of(graph, place(graph, s, MODEL), replace(s, remat=remat), MEGATRON, MODEL)
        for remat in ("none", "full")
    }
    none, full = parts["none"], parts["full"]
    assert (none.layers_before, none.blocks) == (2, 4) and len(graph_of().nodes) < len(graph.nodes)
    assert stage_layers(none.blocks, 2, before=none.layers_before) == [1, 3]
    # What recomputation of them leaves is their inputs.
    assert none.first.kept == none.first.saved > full.first.kept == 2 * full.block.entry > 0
    assert none.first.recompute_s == 0 < full.first.recompute_s <= full.first.forward_s
    assert parts_of(GRAPH, place(GRAPH, s, MODEL), s, MEGATRON, MODEL).first.recompute_s == 0


def test_a_stage_with_layers_before_updates_its_own_layers_only():
    """Of three stages of two layers, the first has two dense ones: no stage updates more than its own."""
    dense, even = graph_of(dense=(2, 1024), batch=3), graph_of(batch=3)
    program = replace(MEGATRON, whole_passes=0.0, executor=replace(MEGATRON.executor, update_bytes=0.0))
    s = replace(parse("pp=3", 3), micro=3, remat="none")
    took = {}
    for name, graph in (("dense", dense), ("even", even)):
        run = price_strategy(graph, s, program, MODEL, 3)
        parts = parts_of(graph, place(graph, s, MODEL), s, program, MODEL)
        ends = parts.last.update_s, parts.first.update_s
        stages = [
            parts.first.update_s,
            2 * parts.block.update_s,
            2 * parts.block.update_s + parts.last.update_s,
        ]
        if name == "even":
            stages[0] += 2 * parts.block.update_s
        assert min(ends) > 0 and run.seconds["update"] == pytest.approx(max(stages))
        took[name] = run.seconds["update"]


@pytest.mark.parametrize("latent", [None, LATENT["kimi"]], ids=["grouped", "latent"])
def test_a_token_is_sent_once_for_each_of_its_experts_and_comes_back(latent):
    graph = graph_of(latent)
    s = replace(parse("dp=8,ep=8", 8), micro=2, remat="none")
    block = parts_of(graph, place(graph, s, MODEL), s, MEGATRON, MODEL).block
    large = sorted(c.nbytes for c in block.sent if c.nbytes > 1e5)
    tokens = 2 * SHAPE["seq"] * SHAPE["chosen"]
    assert large == [tokens * SHAPE["d"] * 2] * 4  # there and back, in forward and in backward, in bfloat16
    assert {c.kind for c in block.sent if c.nbytes > 1e5} == {"all_to_all"}


def test_a_program_that_sorts_tokens_pays_for_its_passes():
    rate = H100.device.memory_bandwidth_bytes_per_s * H100.device.efficiency["memory"]
    ahead = replace(MEGATRON, executor=replace(MEGATRON.executor, host_s=(1e-9, 1e-9)))
    plain, more = (
        price("dp=8,ep=8", program=replace(ahead, experts=AroundExperts(forward=f, backward=b))).step_s
        for f, b in ((0.0, 0.0), (3.0, 4.0))
    )
    once = 2 * SHAPE["seq"] * SHAPE["chosen"] * SHAPE["d"] * 2 / rate
    assert more - plain == pytest.approx(SHAPE["layers"] * 7 * once, rel=1e-6)
    assert MEGATRON.experts.forward > 0 and PROGRAMS["xla"].experts == AroundExperts()


@pytest.mark.parametrize(("ways", "here"), [(8, 2), (4, 4), (1, 16)])
def test_each_experts_product_is_launched_by_itself(ways, here):
    """Gate and up are one product, and down is another. Backward has two for each."""
    s = replace(parse(f"dp=8,ep={ways}" if ways > 1 else "dp=8", 8), micro=2, remat="none")
    one_by_one, together = (
        parts_of(
            GRAPH, place(GRAPH, s, MODEL), s, replace(MEGATRON, experts=AroundExperts(apart=a)), MODEL
        ).block
        for a in (True, False)
    )
    more = np.subtract(one_by_one.host_s, together.host_s) / MEGATRON.executor.host_s
    np.testing.assert_allclose(more, [2 * (here - 1), 4 * (here - 1)])


def test_an_exchange_beside_another_micro_batch_costs_what_is_longer_than_its_compute():
    ahead = replace(MEGATRON, executor=replace(MEGATRON.executor, host_s=(1e-9, 1e-9)))
    apart, beside = (price("dp=8,ep=8", program=replace(ahead, exchange_overlaps=b)) for b in (False, True))
    s = replace(parse("dp=8,ep=8", 8), micro=2, remat="none")
    block = parts_of(GRAPH, place(GRAPH, s, MODEL), s, ahead, MODEL).block
    saved = 0.0
    for backward, compute in ((False, block.forward_s), (True, block.backward_s)):
        sent = sum(c.seconds for c in block.sent if c.backward == backward and c.kind == "all_to_all")
        saved += min(sent, compute)
    assert apart.step_s - beside.step_s == pytest.approx(SHAPE["layers"] * saved, rel=1e-6)
    assert saved > 0


def test_a_named_library_sends_tokens_once_to_each_node_of_their_experts():
    """The other collectives, and programs that do not name it, pay for what they did before."""
    assert token_copies(GRAPH, (), H100) == SHAPE["chosen"]
    named_ = replace(MEGATRON, exchange=("DeepEP",))
    algorithms = tuple(replace(a, once=False) if a.protocol == "DeepEP" else a for a in H100.algorithms)
    every_copy = costmodels.get("analytic", replace(H100, algorithms=algorithms))
    graph = graph_of(seq=4096, d=4096)
    sent = [
        price("dp=16,ep=16", 16, program, graph, model).collectives_s
        for program, model in (
            (named_, every_copy),
            (named_, MODEL),
            (MEGATRON, every_copy),
            (MEGATRON, MODEL),
        )
    ]
    assert sent[2] == sent[3]
    exchange = [s.pop("all_to_all over expert") for s in sent]
    assert sent[0] == sent[1]
    nodes = 2 * (1 - (1 / 2) ** SHAPE["chosen"]) / SHAPE["chosen"]
    assert nodes < exchange[1] / exchange[0] < 1.1 * nodes  # and the launches


def test_four_bits_take_a_machine_that_has_them():
    with pytest.raises(Infeasible, match=r"nvfp4 products \(float4_e2m1fn") as e:
        price("dp=8,ep=8,precision=nvfp4")
    assert e.value.where == "machine 'h100x8'" and "precision=nvfp4" in e.value.fix
    model = costmodels.get("analytic", machine.load("gb300_nvl72"))
    wide = graph_of(seq=4096, d=4096, ff=4096)
    took = [price(f"dp=8,ep=8,precision={p}", model=model, graph=wide) for p in ("bf16", "fp8", "nvfp4")]
    assert took[0].step_s > took[1].step_s > took[2].step_s
    assert took[1].memory.total > took[2].memory.total
    assert str(took[2].strategy).endswith("precision=nvfp4")


def test_embedding_and_loss_may_be_chunks_of_their_own():
    """Six blocks in eight chunks, like the 126 layers of Llama-3 405B in 128 (Megatron's account options)."""
    assert price("dp=4,pp=2,vp=4,micro=1").pipeline is not None
    with pytest.raises(Infeasible, match=r"10 stages, .* 6 blocks"):
        price("dp=4,pp=2,vp=5,micro=1")


@cache
def of_transformers(name, **settings):  # type: ignore[no-untyped-def]
    """A small mixture of transformers, whose rows are sorted by expert."""
    shape = {"num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 512, "num_local_experts": 4}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "batch": 16, "sequence": 64} | settings
    return registry.trace(f"hf:{name}?" + "&".join(f"{k}={v}" for k, v in shape.items()))


def priced(traced, text, devices=8):  # type: ignore[no-untyped-def]
    """The price of a strategy as eager PyTorch runs it, and its parts."""
    seen = []
    problem = SplitProblem.of(traced.graph, devices, H100, "analytic", "adam")
    with pytest.MonkeyPatch.context() as m:
        m.setattr(price_module, "parts_of", lambda *a, **k: seen.append(parts_of(*a, **k)) or seen[0])
        p = price_model(problem, traced, parse(text, devices), PROGRAMS["eager"])
    return p, seen[0]


def ragged_loss(params, batch):  # type: ignore[no-untyped-def]
    """A mixture of two experts a token as JAX programs write it: a sort, ragged products, and the sort undone."""

    def block(x, p):  # type: ignore[no-untyped-def]
        tokens = (x @ p["mix"]).reshape(-1, x.shape[-1])
        gates, ids = jax.lax.top_k(jax.nn.softmax((tokens @ p["router"]).astype(jnp.float32)), 2)
        order = jnp.argsort(ids.reshape(-1))
        sizes = jnp.bincount(ids.reshape(-1), length=p["up"].shape[0])
        rows = jax.nn.silu(jax.lax.ragged_dot(tokens[order // 2], p["up"], sizes))
        each = jax.lax.ragged_dot(rows, p["down"], sizes)[jnp.argsort(order)].reshape(-1, 2, x.shape[-1])
        return x + (each * gates[..., None]).sum(1).reshape(x.shape).astype(x.dtype), None

    x, _ = jax.lax.scan(block, params["embed"][batch["tokens"]], params["blocks"])
    found = jax.nn.log_softmax((x @ params["out"]).astype(jnp.float32))
    return -jnp.take_along_axis(found, batch["labels"][..., None], -1).mean()


@cache
def ragged():  # type: ignore[no-untyped-def]
    def of(*shape, dtype="bfloat16"):  # type: ignore[no-untyped-def]
        return jax.ShapeDtypeStruct(shape, dtype)

    blocks = {
        "mix": of(3, 64, 64),
        "router": of(3, 64, 4),
        "up": of(3, 4, 64, 256),
        "down": of(3, 4, 256, 64),
    }
    params = {"embed": of(512, 64), "out": of(64, 512), "blocks": blocks}
    batch = {name: of(16, 64, dtype="int32") for name in ("tokens", "labels")}
    return registry.trace(ragged_loss, params, batch)


def assert_ranks_work_alone(traced, rel):  # type: ignore[no-untyped-def]
    """A rank of data parallelism computes and keeps what one device does with as many examples, and sends nothing."""
    (p, parts), (_, alone) = priced(traced, "fsdp=8"), priced(traced, "micro=2", 1)
    elements = sum(int(t.elements) for t in traced.graph.tensors.values() if t.role == "parameter")
    assert p.memory.parameters == pytest.approx(4 * elements / 8, rel=0.01)
    assert not parts.block.sent
    for figure in ("forward_s", "backward_s", "saved"):
        assert getattr(parts.block, figure) == pytest.approx(getattr(alone.block, figure), rel=rel)


def test_a_data_parallel_rank_sorts_its_own_tokens():
    """Programs sort the rows of all examples by expert. No framework moves them between ranks."""
    assert_ranks_work_alone(ragged(), 1e-6)


@pytest.mark.torch
def test_a_data_parallel_rank_of_transformers_sorts_its_own_tokens():
    # Only the histogram of experts still counts the rows of all ranks.
    assert_ranks_work_alone(of_transformers("MixtralForCausalLM", intermediate_size=256), 1e-4)


def test_rows_of_ragged_products_are_sent_to_their_experts_and_back():
    _, parts = priced(ragged(), "ep=4")
    assert {(c.kind, c.nbytes) for c in parts.block.sent} == {("all_to_all", 2 * 64 * 2 * 64 * 2)}
    assert sum(c.times for c in parts.block.sent) == 4


@pytest.mark.some(1)
@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("MixtralForCausalLM", {"intermediate_size": 256}),
        # Each expert has biases, so there are ops of rows between the products, too.
        ("GptOssForCausalLM", {"intermediate_size": 64, "head_dim": 16, "num_experts_per_tok": 2}),
    ],
)
def test_sorted_rows_are_sent_to_their_experts_and_back(name, settings):
    traced = of_transformers(name, **settings)
    (whole, _), (p, parts) = (priced(traced, text) for text in ("dp=8", "ep=4"))
    assert {c.kind for c in parts.block.sent} == {"all_to_all"}
    # A rank's tokens, each for two experts, in float32: there and back, in forward and in backward. With biases, the
    # experts that were chosen are sent, too.
    assert {c.nbytes for c in parts.block.sent} <= {2 * 64 * 2 * 64 * 4, 2 * 64 * 2 * 8}
    assert sum(c.times for c in parts.block.sent if c.nbytes > 1e4) == pytest.approx(4)
    experts = sum(
        int(t.elements)
        for t in traced.graph.tensors.values()
        if t.role == "parameter" and t.path.endswith(("gate_up_proj", "down_proj"))
    )
    held = whole.memory.parameters - p.memory.parameters
    assert held == pytest.approx(experts * 4 * 3 / 4)
    assert p.work.flops == whole.work.flops
    assert p.memory.activations == pytest.approx(whole.memory.activations)


@pytest.mark.torch
def test_a_ranks_rows_that_are_not_divisible_by_experts_are_refused():
    graph = micro_batch_graph(of_transformers("MixtralForCausalLM", intermediate_size=256), 1)
    assert with_own_rows(graph, parse("fsdp=3", 3)) == graph
    with pytest.raises(Infeasible, match="2048 rows") as e:
        with_own_rows(graph, parse("ep=3", 3))
    assert "divisible" in (e.value.fix or "")
