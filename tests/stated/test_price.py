"""The price of a stated strategy, compared with the tables and the step on which it is based, and with known laws."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import pase
from pase import costmodels, machine, zoo
from pase.baselines import baselines
from pase.errors import Infeasible, PaseError
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from pase.plan.step import COMPILED, EAGER, step_time
from pase.stated.parts import parts_of
from pase.stated.place import place
from pase.stated.price import price_strategy
from pase.stated.program import PROGRAMS, AroundAttention
from pase.stated.strategy import Strategy, parse
from pase.tables.itemize import collectives
from tests.command import printed

H100 = machine.load("h100x8")
MODEL = costmodels.get("analytic", H100)
SMALL = "zoo:llama3_8b?batch=64&seq=512&layers=4&attention=fused&remat=0"


def graph_of(batch=16, seq=512, **shape):  # type: ignore[no-untyped-def]
    m = zoo.get("llama3_8b", batch=batch, seq=seq, layers=4, attention="fused", remat=0, **shape)
    return named(simplify(trace(m.loss_fn, m.params, m.batch).graph))


GRAPH = graph_of()
PLAIN = replace(
    PROGRAMS["compiled"],
    executor=COMPILED,
    attention=(),
    prefetches=(False, False),
    sums_overlap=False,
    copied=(0.0, 0.0),
)


AHEAD = replace(
    PROGRAMS["eager"], executor=replace(PROGRAMS["eager"].executor, host_s=(1e-7, 1e-7))
)  # the host is ahead of the device
PLACED = place(GRAPH, parse("dp=8", 8), MODEL)


def price(text, devices=8, program="compiled", graph=GRAPH, examples=16, model=MODEL):  # type: ignore[no-untyped-def]
    s = parse(text, devices)
    s = replace(s, micro=s.micro or examples // s.ranks, remat=s.remat or "none")
    return price_strategy(
        graph, s, PROGRAMS[program] if isinstance(program, str) else program, model, examples
    )


def test_on_one_device_it_is_the_sum_of_the_search_s_own_prices():
    """Without overlap and without a framework's own kernels, it is the additive step."""
    p = price("micro=16", devices=1, program=PLAIN)
    t = step_time(GRAPH, p.mesh, place(GRAPH, p.strategy, MODEL).strategy, MODEL)
    assert p.step_s == pytest.approx(t.total_s, rel=1e-9)


def test_tensor_parallelism_is_megatron_s_own_strategy():
    """It has the same collectives as the baseline, which a search over the same rules finds."""
    for text, name in (("dp=2,tp=4", "megatron_2x4"), ("dp=2,tp=4,sp", "megatron_sp_2x4")):
        s = parse(text, 8)
        (known,) = baselines(GRAPH, 8, H100, MODEL, only=(name,))
        mine = place(GRAPH, s, MODEL)
        assert mine.mesh.sizes == known.mesh.sizes
        assert mine.cost == pytest.approx(known.cost)

        def sent(b):  # type: ignore[no-untyped-def]
            found = collectives(GRAPH, b.mesh, b.strategy, MODEL)
            return sorted((c.kind, c.nbytes, c.times, c.phase) for c in found)

        assert sent(mine) == sent(known)


def test_seconds_add_up_and_units_agree():
    p = price("fsdp=8,remat=full")
    assert sum(p.seconds.values()) == pytest.approx(p.step_s)
    assert all(v >= 0 for v in p.seconds.values())
    assert p.throughput.tokens_per_s_per_device == pytest.approx(16 * 512 / 8 / p.step_s)
    assert p.to_json()["mfu"] == p.throughput.mfu < 1


def test_recomputation_takes_time_and_saves_memory():
    """This holds if the host is ahead of the device. Otherwise its launches hide the recomputation."""
    none, some, full = (price(f"fsdp=8,remat={r}", program=AHEAD) for r in ("none", "selective", "full"))
    assert none.step_s < some.step_s < full.step_s
    assert none.memory.activations > some.memory.activations > full.memory.activations


def test_selective_recomputation_keeps_every_other_product():
    """torchtitan keeps the first, third, fifth and seventh of a layer's seven products.

    Compiled, it keeps only what backward reads, without the last one, whose result is added to the residual stream.
    """
    wide = graph_of(seq=2048, vocab=1 << 18)  # so that memory is highest at the loss
    programs = (PROGRAMS["eager"], replace(PROGRAMS["compiled"], logits=PROGRAMS["eager"].logits))
    eager, compiled = (price("fsdp=8,remat=selective", program=p, graph=wide).memory for p in programs)
    tokens = 2 * 2048 * 2  # bytes of a rank, in bfloat16
    d, kv, ff = 4096, 1024, 14336
    kept = 4 * tokens * (d + d + kv + d + ff)  # the entry, queries, values, attention's result, gate
    assert compiled.activations == pytest.approx(kept, rel=0.1)
    assert eager.activations - compiled.activations >= 4 * tokens * d


def test_the_last_blocks_backward_has_the_logits_behind_it():
    """What a block recomputes, and its gradients, do not exist at the same time as the logits."""
    sizes = (1024, 1 << 18)
    few, many = (
        price("fsdp=8,remat=full", graph=graph_of(seq=2048, vocab=v), program="eager").memory for v in sizes
    )
    assert few.logits == 0 and many.logits > 0
    assert few.activations > many.activations


def test_stages_keep_whole_gradients_until_the_last_micro_batch():
    """With FSDP2 in a pipeline, weights stay gathered, and unreduced gradients are added in the dtype of their sum."""
    m = price("fsdp=4,pp=2,micro=1", program="eager", examples=16).memory
    assert m.gathered > 4 * m.parameters / 4 * (2 + 4)


def test_what_zero_splits_is_split():
    by_kind = [price(f"dp=8,zero={z}" if z else "dp=8").memory for z in range(4)]
    whole = by_kind[0]
    for z, m in enumerate(by_kind):
        assert m.optimizer == pytest.approx(whole.optimizer / (8 if z >= 1 else 1))
        assert m.gradients == pytest.approx(whole.gradients / (8 if z >= 2 else 1))
        assert m.parameters == pytest.approx(whole.parameters / (8 if z >= 3 else 1))
    elements = sum(t.elements for t in GRAPH.tensors.values() if t.role == "parameter")
    assert whole.parameters == 4 * elements


def test_overlap_hides_and_contention_costs():
    fast = PROGRAMS["eager"]
    apart = replace(fast, prefetches=(False, False), sums_overlap=False)
    assert price("fsdp=8", program=fast).step_s < price("fsdp=8", program=apart).step_s
    free = costmodels.get("analytic", replace(H100, collective_units=0))
    assert price("fsdp=8", model=free).step_s < price("fsdp=8").step_s


def test_what_a_framework_does_besides_products_is_counted_once_each():
    """Metrics of the logits, copies around attention and waits of the device are priced at the memory's rate."""
    eager = AHEAD
    rate = H100.device.memory_bandwidth_bytes_per_s * H100.device.efficiency["memory"]
    tokens, layers, width, vocab = 16 * 512, 4, 4096, 128256
    step = price("micro=16", devices=1, program=eager).step_s
    logged = price("micro=16", devices=1, program=replace(eager, metrics_bytes=46.0)).step_s
    assert logged - step == pytest.approx(46 * tokens * vocab / rate, rel=1e-6)
    around = AroundAttention(forward=9.0, backward=17.0, waits=3000)
    more = price("micro=16", devices=1, program=replace(eager, around=around)).step_s
    once = 26 * tokens * width * 2 / rate + 3000 * 1e-7
    assert more - step == pytest.approx(layers * once, rel=1e-6)


def test_gradients_are_added_by_the_product_or_by_a_kernel_of_their_own():
    """A separate kernel reads them, and reads and writes their sum, for all micro-batches except the first."""
    rate = H100.device.memory_bandwidth_bytes_per_s * H100.device.efficiency["memory"]
    elements = sum(t.elements for t in GRAPH.tensors.values() if t.role == "parameter")
    apart, few = (replace(AHEAD, adds_apart=a, sums_overlap=False) for a in (True, False))
    for s, micro, m in (("dp=8", 2, 1), ("dp=8", 2, 4)):
        more, less = (price(f"{s},micro={micro}", program=p, examples=16 * m).step_s for p in (apart, few))
        assert more - less == pytest.approx((m - 1) * elements * (2 + 2 * 4) / rate, rel=1e-6)
    passes = replace(few, whole_passes=3.0)
    once = price("dp=8,zero=1", program=passes).step_s - price("dp=8,zero=1", program=few).step_s
    assert once == pytest.approx(elements * 4 * 3 / rate, rel=1e-6)


def test_zero_may_sum_whole_gradients():
    """This takes as long as without ZeRO: twice as long as a reduce-scatter, minus its latencies."""
    whole = replace(PROGRAMS["eager"], sums_whole=True)
    sums = [
        price(s, program=p).collectives_s["sums of gradients"]
        for s, p in (("dp=8", "eager"), ("dp=8,zero=1", whole), ("dp=8,zero=1", "eager"))
    ]
    assert sums[0] == sums[1] > 1.5 * sums[2]


def test_whole_logits_are_gathered_and_every_rank_computes_the_whole_loss():
    whole = replace(AHEAD, whole_logits=True, logits_in_parts=None)
    parts = replace(AHEAD, logits_in_parts=None)
    for text in ("tp=8", "tp=8,sp"):
        a, b = (price(text, program=p, graph=graph_of(vocab=1 << 18)) for p in (whole, parts))
        gathered = a.collectives_s["all_gather over model"] - b.collectives_s.get(
            "all_gather over model", 0.0
        )
        logits = 16 * 512 * (1 << 18) * 4
        assert gathered == pytest.approx(logits * 7 / 8 / (450e9 * 0.824), rel=0.2)
        assert a.seconds["compute"] > b.seconds["compute"]
        assert a.memory.logits > b.memory.logits
    one = price("dp=8", program=whole)
    assert one.step_s == price("dp=8", program=parts).step_s


def test_tensor_parallelism_along_a_later_dim_copies_what_it_moves():
    eager, plain = AHEAD, replace(AHEAD, rearranges=False)
    rate = H100.device.memory_bandwidth_bytes_per_s * H100.device.efficiency["memory"]
    with_copies, without = (price("tp=8,sp", program=p) for p in (eager, plain))
    placed = place(GRAPH, with_copies.strategy, MODEL)
    moved = sum(
        c.nbytes * c.times
        for c in collectives(GRAPH, placed.mesh, placed.strategy, MODEL)
        if c.kind in ("all_gather", "reduce_scatter") and "model" in c.axes
    )
    assert with_copies.step_s - without.step_s == pytest.approx(2 * moved / rate, rel=1e-6) != 0
    asynchronous = [price("tp=8,sp,async", program=p).step_s for p in (eager, plain)]
    assert asynchronous[0] == asynchronous[1]


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


def test_stages_share_layers_and_pay_a_bubble():
    one = price("dp=2,tp=4")
    two = price("dp=2,tp=2,pp=2,micro=1", program="megatron")
    assert two.pipeline is not None and 0 < two.pipeline.bubble < 0.5
    assert two.memory.parameters < 2 * one.memory.parameters
    more = price("dp=2,tp=2,pp=2,vp=2,micro=1", program="megatron")
    assert more.pipeline is not None and more.pipeline.bubble < two.pipeline.bubble
    assert one.pipeline is None


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


def test_a_sequence_is_split_over_context_parallel_ranks():
    p = price("dp=2,cp=4", examples=16)
    assert dict(zip(p.mesh.names, p.mesh.sizes, strict=True)) == {"data": 2, "context": 4}
    assert any("context" in name for name in p.collectives_s)
    whole = price("dp=2,tp=4")
    assert p.work.flops == whole.work.flops


@pytest.mark.parametrize(
    ("text", "devices", "says"),
    [
        ("dp=32", 32, "none of its batch dims"),
        ("tp=11", 11, "heads, hidden units"),
        ("ep=2,dp=2", 2, "expert dims"),
    ],
)
def test_what_cannot_be_split_so_says_why(text, devices, says):
    with pytest.raises(Infeasible, match=says):
        place(GRAPH, parse(text, devices), MODEL)


def test_api_and_command_say_the_same():
    p = pase.price(SMALL, devices=8, strategy="fsdp=8,micro=4,remat=selective", executor="eager")
    assert p.micro_batches == 2 and p.strategy == Strategy(shard=8, zero=3, micro=4, remat="selective")
    args = ["price", SMALL, "--devices", "8", "--as", "fsdp=8,micro=4,remat=selective", "--executor", "eager"]
    shown = printed(*args)
    assert "MFU" in shown and "fsdp=8,micro=4" in shown
    assert json.loads(printed(*args, "--json"))["step_s"] == p.step_s
    with pytest.raises(PaseError, match="no executor 'lazy'"):
        pase.price(SMALL, devices=8, strategy="", executor="lazy")
    with pytest.raises(Infeasible, match="no equal blocks"):
        pase.price("zoo:alexnet", devices=8, strategy="dp=8")
    with pytest.raises(Infeasible, match="5 data-parallel ranks") as e:
        pase.price(SMALL, devices=5, strategy="dp=5")
    assert e.value.where == "dp=5"


@pytest.mark.parametrize(
    ("text", "executor"),
    [
        ("fsdp=8,remat=none", "eager"),
        ("fsdp=8,remat=selective", "eager"),
        ("fsdp=4,tp=2,sp,remat=selective", "compiled"),
        ("fsdp=8,remat=full", "xla"),
        ("dp=2,zero=1,tp=2,sp,pp=2,micro=1,remat=full", "megatron"),
    ],
)
def test_layers_written_out_cost_what_a_loop_over_them_does(text, executor):
    """This holds whether the model marks them or not, except for the norms at the ends, which equal runs share."""
    shape = "zoo:llama3_8b?batch=16&seq=512&layers=6&vocab=4096&attention=fused"
    loop, out, marked = (
        pase.price(f"{shape}&scan={scan}&remat={remat}", devices=8, strategy=text, executor=executor)
        for scan, remat in ((1, 0), (0, 0), (0, 1))
    )
    for p in (out, marked):
        assert p.step_s == pytest.approx(loop.step_s, rel=0.01)
        assert p.memory.total == pytest.approx(loop.memory.total, rel=0.01)
        assert p.memory.activations == pytest.approx(loop.memory.activations, rel=0.1)
    assert sum(out.collectives_s.values()) == pytest.approx(sum(loop.collectives_s.values()), rel=0.02)


@pytest.mark.torch
def test_a_pytorch_module_is_priced():
    import torch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(256)
            self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(6))

        def forward(self, x):  # type: ignore[no-untyped-def]
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    batch = torch.zeros(32, 16, 256)
    whole, micro = (
        pase.price(Model(), batch, devices=4, strategy=f"fsdp=4,micro={m}", executor="eager") for m in (8, 4)
    )
    elements = 6 * (2 * 256 * 1024 + 1024 + 256 + 2 * 256)
    assert whole.memory.optimizer == pytest.approx(8 * elements / 4, rel=0.01)
    assert micro.micro_batches == 2 and micro.memory.activations < whole.memory.activations
    staged = pase.price(Model(), batch, devices=4, strategy="pp=2,dp=2,micro=4", executor="eager")
    assert staged.pipeline is not None and staged.memory.optimizer == pytest.approx(
        8 * elements / 2, rel=0.01
    )


def test_what_the_model_marks_runs_again_unless_stated_otherwise():
    marked = SMALL.replace("remat=0", "remat=1")
    assert pase.price(marked, devices=8, strategy="fsdp=8").strategy.remat == "full"
    told = pase.price(marked, devices=8, strategy="fsdp=8,remat=none")
    assert told.step_s == pytest.approx(pase.price(SMALL, devices=8, strategy="fsdp=8").step_s)


def test_one_example_on_one_rank_is_read_as_two_of_half():
    """A dim of one is not a dim. One example takes half as long as two together, apart from work once per step."""
    two, one = (
        pase.price(
            SMALL.replace("batch=64", f"batch={b}"), devices=8, strategy="tp=8,sp,micro=1", executor="xla"
        )
        for b in (4, 2)
    )
    assert two.micro_batches == 4 and one.micro_batches == 2
    once = two.seconds["update"]
    assert two.step_s - once == pytest.approx(2 * (one.step_s - once), rel=0.02)
