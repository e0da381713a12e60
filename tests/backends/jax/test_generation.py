"""Programs that are not trained: prefill and decode under one plan, compared with one device; memory; throughput."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from bench.cases.plans import Case, case_of
from pase import zoo
from pase.errors import Infeasible, PaseError
from pase.memory.account import in_flight_at_least
from pase.memory.live import live_bytes, lives
from pase.tables.layouts import configs

SEQ, STEPS = 8, 4


@cache
def generation(name: str, **settings: Any) -> tuple[pase.Generation, Any]:
    m = zoo.reduced(name, task="generate", seq=SEQ, tokens=STEPS, **settings)
    assert m.decode is not None
    return pase.Generation(prefill=m.loss_fn, decode=m.decode, tokens=STEPS), m


@cache
def case(name: str) -> Case:
    fn, m = generation(name)
    return case_of(fn, m.params, m.batch, name=name)


@cache
def unsharded(name: str) -> tuple[list[Any], Any]:
    """(tokens of prefill and of every step, cache after the last step)."""
    fn, m = generation(name)
    params, batch = m.init(0)
    token, kept = jax.jit(fn.prefill)(params, batch)
    tokens, step = [token], jax.jit(fn.decode)
    for _ in range(STEPS):
        token, kept = step(params, token, kept)
        tokens.append(token)
    return [np.asarray(t) for t in tokens], kept


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("llama3_8b", "megatron/1x8"),
        ("llama3_8b", "ours@2x4"),
        ("gpt2", "ours@2x4"),
        ("mixtral_8x7b", "expert"),
    ],
)
def test_prefill_and_decode_equal_the_unsharded_ones_token_by_token(name: str, strategy: str) -> None:
    plan = case(name).plan(strategy)
    assert plan is not None
    params, batch = plan.jax.device_put(*generation(name)[1].init(0))
    token, kept = plan.jax.prefill(params, batch)
    stored = kept["keys"].sharding
    tokens = [np.asarray(token)]
    for _ in range(STEPS):
        before = kept
        token, kept = plan.jax.decode(params, token, kept)
        assert before["keys"].is_deleted() and kept["keys"].sharding.is_equivalent_to(stored, 5)
        tokens.append(np.asarray(token))
    wanted, plain = unsharded(name)
    np.testing.assert_array_equal(tokens, wanted)
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_decoding_a_token_is_as_reading_the_prompt_with_it() -> None:
    """In the unsharded models, decoding with the cache gives the token that prefill of the longer prompt gives.

    (Mixtral is left out. Its experts have capacity for a smaller fraction of the tokens of a longer prompt.)
    """
    for name in ("llama3_8b", "gpt2"):
        (_, m), (tokens, _) = generation(name), unsharded(name)
        params, batch = m.init(0)
        longer = jnp.concatenate([batch["tokens"], np.stack(tokens[:-1], 1)], 1)
        again = zoo.reduced(name, task="prefill", seq=SEQ + STEPS).loss_fn(params, {"tokens": longer})[0]
        np.testing.assert_array_equal(again, tokens[-1])


def test_a_plan_of_two_programs_is_saved_and_bound_again(tmp_path: Path) -> None:
    fn, m = generation("gpt2")
    plan = pase.compile(fn, m.params, m.batch, devices=8, mesh="8", baselines=False)
    plan.save(tmp_path / "layout.json")
    again = pase.load(tmp_path / "layout.json").bind(fn, m.params, m.batch)
    assert again.jax.specs == plan.jax.specs and again.jax.traced.programs == ("0.", "1.")


def test_a_step_of_decoding_reads_the_cache_once() -> None:
    """Twice the context adds the time to read the additional cache."""
    short, long = (
        pase.compile(f"zoo:llama3_8b?task=decode&batch=64&context={n}", devices=8, mesh="8", baselines=False)
        for n in (8192, 16384)
    )
    more = 2 * 32 * 64 * 8192 * 8 * 128 * 2 / 8
    from pase.machine import load

    device = load("h100x8").device
    seconds = more / (device.memory_bandwidth_bytes_per_s * device.efficiency["memory"])
    assert long.cost - short.cost == pytest.approx(seconds, rel=0.05)
    assert long.memory.activations - short.memory.activations == more
    assert short.memory.gradients == short.memory.optimizer == 0


def test_what_is_stored_is_split_as_it_is_read() -> None:
    """Parameters stored unsplit would cost the same seconds and more memory."""
    plan = pase.compile(
        "zoo:llama3_8b?task=decode&batch=64", devices=8, mesh="1x8", machine="a100x8", baselines=False
    )
    whole, embedding = 2 * 8_030_261_248, 2 * 128_256 * 4096  # rows are looked up by each device for its own
    assert plan.memory.parameters == pytest.approx(whole / 8 + embedding * 7 / 8, rel=0.01)
    assert plan.cost == pytest.approx(sum(n.cost.total for n in plan.nodes), rel=1e-9)


@pytest.mark.some(2)
@pytest.mark.parametrize(("task", "devices"), [("prefill", 8), ("decode", 8), ("generate", 4)])
def test_no_method_by_hand_is_better(task: str, devices: int) -> None:
    model = f"zoo:mixtral_8x7b?task={task}&batch=8&seq=512&context=1024&layers=2"
    plan = pase.compile(model, devices=devices, max_axes=2)
    assert {"data_parallel", "expert", f"megatron_1x{devices}"} <= plan.baselines.keys()
    assert plan.optimal and plan.cost <= min(plan.baselines.values())
    assert "nothing is trained" in plan.skipped["zero2"]


def test_decode_counts_as_often_as_tokens_says() -> None:
    def cost(task: str, tokens: int) -> float:
        settings = f"batch=8&seq=256&context=1024&layers=2&tokens={tokens}"
        return pase.compile(f"zoo:gpt2?task={task}&{settings}", devices=2, mesh="2", baselines=False).cost

    few, some, many = (cost("generate", n) for n in (100, 200, 300))
    assert many - some == pytest.approx(some - few, rel=1e-6)
    assert some - few == pytest.approx(100 * cost("decode", 1), rel=0.03)


@pytest.mark.parametrize("task", ["prefill", "decode"])
def test_memory_is_what_the_compiler_takes(task: str) -> None:
    """Memory is compared on a CPU, where attention's scores are in memory."""
    sizes = {"batch": 64, "seq": 64, "context": 256, "layers": 4, "vocab": 512}
    m = zoo.reduced("llama3_8b", task=task, attention="plain", **sizes)
    carry = {1: 1} if m.cache is not None else None
    plan = pase.compile(
        m.loss_fn, m.params, *m.inputs, devices=8, mesh="8", mode="inference", carry=carry, baselines=False
    )
    step = plan.jax.step()
    analysed = step.lower(m.params, *m.inputs).compile().memory_analysis()
    made = analysed.output_size_in_bytes - analysed.alias_size_in_bytes
    taken = analysed.argument_size_in_bytes + analysed.temp_size_in_bytes + made
    assert plan.memory.total == pytest.approx(taken, rel=0.35)


def test_what_nodes_have_in_flight_bounds_what_is_live() -> None:
    from pase.machine import mesh_from

    graph, mesh = case("gpt2").problem.graph, mesh_from("2x4", 8)
    spaces = [configs(n, mesh) for n in graph.nodes]
    least = in_flight_at_least(graph, mesh, spaces)
    rng = np.random.default_rng(0)
    for _ in range(20):
        choice = [rng.integers(len(s)) for s in spaces]
        chosen = {n.name: s[i] for n, s, i in zip(graph.nodes, spaces, choice, strict=True)}
        assert (
            max(b[i] for b, i in zip(least, choice, strict=True)) <= live_bytes(graph, mesh, chosen) * 1.001
        )
    leaves = {t.name for t in graph.tensors.values() if t.role in ("parameter", "input")}
    assert not leaves & lives(graph).array.keys()


def decode(params: Any, token: Any, cache: Any) -> Any:
    new = token @ params["k"]
    cache = {"x": jnp.roll(cache["x"], 1, 1).at[:, 0].set(new)}
    weights = jax.nn.softmax(jnp.einsum("bd,btd->bt", token @ params["q"], cache["x"]))
    return jnp.einsum("bt,btd->bd", weights, cache["x"]) @ params["o"], cache


def test_throughput_takes_the_batch_that_fits() -> None:
    params = {n: jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16) for n in "kqo"}
    (b,) = jax.export.symbolic_shape("b")
    inputs = (
        jax.ShapeDtypeStruct((b, 1024), jnp.bfloat16),
        {"x": jax.ShapeDtypeStruct((b, 512, 1024), jnp.bfloat16)},
    )
    asked: dict[str, Any] = {
        "devices": 4,
        "mesh": "4",
        "mode": "inference",
        "carry": {1: 1},
        "baselines": False,
    }
    plan = pase.compile(decode, params, *inputs, objective="throughput", memory_limit="200MiB", **asked)
    assert plan.memory.total <= 200 * 2**20 and plan.work.examples is not None
    with pytest.raises(Infeasible):
        pase.compile(
            decode, params, *inputs, dims={"b": 2 * plan.work.examples}, memory_limit="200MiB", **asked
        )
    with pytest.raises(PaseError, match="size"):
        pase.compile(decode, params, *_bound(inputs), objective="throughput", **asked)
    with pytest.raises(PaseError, match="batch="):
        pase.compile("zoo:gpt2?task=decode&batch=8", devices=4, objective="throughput")


def _bound(inputs: Any) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((4, *s.shape[1:]), s.dtype), inputs)


def test_what_is_no_generation_is_said() -> None:
    fn, m = generation("gpt2")
    with pytest.raises(PaseError) as e:
        pase.Generation(prefill=fn.prefill, decode=fn.decode, tokens=0)
    assert e.value.where == "tokens" and "0" in e.value.what
    alone = pase.Generation(prefill=lambda p, b: fn.prefill(p, b)[0], decode=fn.decode, tokens=1)
    with pytest.raises(PaseError) as e:
        pase.compile(alone, m.params, m.batch, devices=8)
    assert e.value.where == "prefill" and "(token, cache)" in e.value.fix

    def wider(p: Any, t: Any, c: Any) -> Any:
        t, c = fn.decode(p, t, c)
        return t.astype(jnp.float32), c

    with pytest.raises(PaseError, match=r"argument 2: .* int32\[8\].* float32\[8\]"):
        pase.compile(
            pase.Generation(prefill=fn.prefill, decode=wider, tokens=1), m.params, m.batch, devices=8
        )
    with pytest.raises(PaseError, match="micro-batches"):
        pase.compile(fn, m.params, m.batch, devices=8, accumulate=2)
    with pytest.raises(PaseError) as e:
        zoo.get("gpt2?task=generate")
    assert {"1024", "128"} <= set(e.value.what.split())
    inputs = _bound(
        (jax.ShapeDtypeStruct((4, 64), "float32"), {"x": jax.ShapeDtypeStruct((4, 8, 64), "float32")})
    )
    params = {n: jax.ShapeDtypeStruct((64, 64), "float32") for n in "kqo"}
    plan = pase.compile(decode, params, *inputs, devices=4, mode="inference", carry={1: 1}, baselines=False)
    with pytest.raises(PaseError, match=r"pase\.Generation"):
        _ = plan.jax.prefill


def test_the_program_runs_training_steps_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pase.cli import main

    plan = pase.compile("zoo:gpt2?task=decode&layers=1&batch=8", devices=2, mesh="2", baselines=False)
    plan.save(tmp_path / "layout.json")
    with pytest.raises(SystemExit) as end:
        main(["run", str(tmp_path / "layout.json")])
    assert end.value.code == 2 and "plan.jax.decode" in capsys.readouterr().err.replace("\n", " ")
