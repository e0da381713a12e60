"""The price of a stated strategy, compared with the tables and the step on which it is based, and with known laws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pase import zoo
from pase.costmodels.analytic import Analytic
from pase.errors import Infeasible, PaseError
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from pase.plan.step import COMPILED, step_time
from pase.stated.parts import parts_of
from pase.stated.place import place
from pase.stated.price import price_strategy
from pase.stated.program import PROGRAMS
from pase.stated.step import StatedStep
from pase.stated.strategy import parse
from tests.stated.prices import GRAPH, MODEL, graph_of, price

PLAIN = replace(
    PROGRAMS["compiled"],
    executor=COMPILED,
    attention=(),
    prefetches=(False, False),
    sums_overlap=False,
    copied=(0.0, 0.0),
)


def test_on_one_device_it_is_the_sum_of_the_search_s_own_prices():
    """Without overlap and without a framework's own kernels, it is the additive step."""
    p = price("micro=16", devices=1, program=PLAIN)
    t = step_time(GRAPH, p.mesh, place(GRAPH, p.strategy, MODEL).strategy, MODEL)
    assert p.step_s == pytest.approx(t.total_s, rel=1e-9)


def test_seconds_add_up_and_units_agree():
    p = price("fsdp=8,remat=full")
    assert sum(p.seconds.values()) == pytest.approx(p.step_s)
    assert all(v >= 0 for v in p.seconds.values())
    assert p.throughput.tokens_per_s_per_device == pytest.approx(16 * 512 / 8 / p.step_s)
    assert p.to_json()["mfu"] == p.throughput.mfu < 1


@pytest.mark.parametrize("strategy", ["fsdp=8,remat=full", "dp=2,zero=1,tp=4", "dp=2,tp=2,pp=2,micro=1"])
def test_the_error_bar_is_of_everything_in_the_step(strategy: str):
    p = price(strategy, program="megatron")
    assert p.bar is not None and p.bar.low_s < p.step_s < p.bar.high_s
    assert p.bar.low_s * p.bar.high_s == pytest.approx(p.step_s**2)
    assert p.to_json()["step_high_s"] == p.bar.high_s


def test_parts_of_the_error_take_as_long_as_the_step():
    seconds = {
        "compute": 3.0,
        "between products": 1.0,
        "weights and gradients": 0.5,
        "new weights": 0.25,
        "update": 0.125,
    }
    p = price("dp=2,zero=1,tp=4")
    parts = parts_of(GRAPH, place(GRAPH, p.strategy, MODEL), p.strategy, PLAIN, MODEL)
    run = StatedStep(parts=parts, s=p.strategy, program=PLAIN, model=MODEL, mesh=p.mesh, micro_batches=1)
    found = list(run.error_parts(seconds))
    assert sum(x.seconds for x in found) == pytest.approx(sum(seconds.values()))
    sent = [x for x in found if x.kind.endswith("collective")]
    assert sum(x.seconds for x in sent) == pytest.approx(1.75)


def test_a_changed_machine_was_not_measured():
    slower = replace(MODEL.machine, device=replace(MODEL.machine.device, launch_s=1.0))
    assert price("fsdp=8", model=Analytic(slower)).bar is None


def test_a_sequence_is_split_over_context_parallel_ranks():
    p = price("dp=2,cp=4", examples=16)
    assert dict(zip(p.mesh.names, p.mesh.sizes, strict=True)) == {"data": 2, "context": 4}
    assert any("context" in name for name in p.collectives_s)
    whole = price("dp=2,tp=4")
    assert p.work.flops == whole.work.flops


def test_ranks_that_share_a_sequence_exchange_its_positions_for_heads():
    """By a2a, each of four arrays goes once there and once back in each pass, and no key is sent to several ranks."""
    ring, exchanged = (price(f"dp=2,cp=4{flag}", program=PLAIN) for flag in ("", ",a2a"))
    heads, width, tokens = 32, 128, 8 * 512 // 4
    queries, keys = (2.0 * tokens * n * width for n in (heads, 8))
    each = [float(MODEL.collective("all_to_all", ring.mesh, 2, b)) for b in (queries, keys)]
    large = {
        name for name, s in exchanged.collectives_s.items() if "context" in name and "all_reduce" not in name
    }
    assert large == {"all_to_all over context"}
    assert exchanged.collectives_s["all_to_all over context"] == pytest.approx(4 * 2 * 2 * sum(each))
    assert "all_gather over context" in ring.collectives_s
    assert exchanged.kernels_s["product"] == ring.kernels_s["product"]
    both = price("cp=4,tp=2,sp,a2a", program=PLAIN)  # tensor parallelism has the heads of a rank already
    assert not [c for c in both.collectives_s if "permute" in c or "all_to_all over model" in c]
    with pytest.raises(Infeasible, match=r"\[8\] heads of keys over 16 ways"):
        price("cp=8,tp=2,a2a", devices=16)
    with pytest.raises(PaseError, match="needs cp=N"):
        parse("dp=8,a2a", 8)
    m = zoo.get("llama3_8b", batch=16, seq=512, layers=4, attention="plain", remat=0)
    plain = named(simplify(trace(m.loss_fn, m.params, m.batch).graph))
    with pytest.raises(Infeasible, match="around fused attention"):
        price("dp=2,cp=4,a2a", graph=plain)


@pytest.mark.parametrize("how", ["tp=8", "tp=8,sp", "tp=4,cp=2,sp"])
def test_one_example_takes_what_it_takes_beside_another(how: str) -> None:
    """One example is read as two, but each of its collectives and kernels takes as long as of one, not half."""
    graph = graph_of(batch=2)
    s, beside = (replace(parse(text, d), micro=1) for text, d in ((how, 8), (f"dp=2,{how}", 16)))
    one = price_strategy(graph, s, PLAIN, MODEL, 2, doubled=True)
    two = price_strategy(graph, beside, PLAIN, MODEL, 4)
    assert one.micro_batches == two.micro_batches == 2
    for cause in ("compute", "update"):
        assert one.seconds[cause] == pytest.approx(two.seconds[cause])
    assert one.memory.activations == two.memory.activations
    between, beside_it = (
        {
            k: v
            for k, v in p.collectives_s.items()
            if k.endswith("model") or ("context" in k and "all_reduce" not in k)
        }
        for p in (one, two)
    )
    assert between and between == pytest.approx(beside_it)


def test_one_example_without_a_batch_dim_costs_the_same() -> None:
    s = replace(parse("tp=8", 8), micro=1)
    of_two, of_one = (
        price_strategy(graph_of(batch=n), s, PLAIN, MODEL, 2, doubled=n == 2).step_s for n in (2, 1)
    )
    assert of_two == pytest.approx(of_one, rel=0.01)


def _beside(gb_per_s: float | None) -> Analytic:
    """A machine with this link to the host."""
    rate = None if gb_per_s is None else 1e9 * gb_per_s
    return Analytic(replace(MODEL.machine, device=replace(MODEL.machine.device, host_bytes_per_s=rate)))


def test_activations_in_the_host_s_memory_take_no_time_behind_a_fast_link():
    here, there = (price(f"fsdp=8,remat=none{term}", model=_beside(1e6)) for term in ("", ",offload=4"))
    assert there.step_s == pytest.approx(here.step_s)
    kept = (here.memory.activations - there.memory.activations) / 2  # two of the four are on their way
    assert 0 < kept < here.memory.activations / 4
    assert replace(here.memory, activations=there.memory.activations) == there.memory


def test_a_slow_link_to_the_host_is_waited_for():
    p = price("fsdp=8,remat=none,offload=4", model=_beside(1e-3), program=PLAIN)
    here = price("fsdp=8,remat=none", model=_beside(1e-3), program=PLAIN)
    block = (here.memory.activations - p.memory.activations) / 2
    # Each block goes there once and comes back once, and nothing else takes as long.
    assert p.seconds["copies to the host"] == pytest.approx(2 * 4 * block / 1e6, rel=0.02)
    assert sum(p.seconds.values()) == pytest.approx(p.step_s)
    assert p.step_s > here.step_s + 0.98 * p.seconds["copies to the host"]


def test_what_cannot_be_offloaded_is_refused():
    with pytest.raises(Infeasible, match=r"does not say how fast .*; add host_bytes_per_s"):
        price("fsdp=8,offload=1", model=_beside(None))
    with pytest.raises(Infeasible, match="blocks; offload no more blocks than that"):
        price("fsdp=8,offload=1000", model=_beside(1.0))
    with pytest.raises(PaseError, match="offload needs a model without stages"):
        parse("dp=2,pp=4,offload=1", 8)
    assert str(parse("fsdp=8,offload=2,remat=none", 8)) == "fsdp=8,offload=2,remat=none"
