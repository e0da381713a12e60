"""Training with a plan and its bucket plan: the numbers are the plain step's, and the collectives the plan's."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="the extra `jax` is not installed")
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import pase  # noqa: E402
from bench.cases.plans import Case, case_of, reduced  # noqa: E402
from bench.cases.schedules import link  # noqa: E402
from pase.api import Plan  # noqa: E402
from pase.backends.jax.bucket_runner import step_from_plan  # noqa: E402
from pase.errors import PaseError  # noqa: E402
from pase.local.text import program_from_text, program_text  # noqa: E402
from pase.local.verify import verify_program  # noqa: E402
from pase.plan.buckets import problem_of  # noqa: E402
from pase.schedule.registry import Options, get_policy  # noqa: E402
from pase.schedule.simulate import as_sequence  # noqa: E402


def by_hand(case: Case, optimizer: Any, steps: int) -> tuple[Any, list[float]]:
    params = case.model.init(0)[0]
    state, losses = optimizer.init(params), []

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(case.model.loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for i in range(steps):
        params, state, loss = step(params, state, case.model.init(i)[1])
        losses.append(float(loss))
    return params, losses


def test_sequence_parallel_megatron_with_sharded_storage() -> None:
    """GPT-2 on 4 data x 2 model, activations split by sequence over `model`, some parameters stored over `data`."""
    case = reduced("gpt2")
    plan = case.plan("megatron_sp_fsdp_4x2")
    assert plan is not None
    kinds = {t.kind for t in plan.bucket_problem.tensors if t.axes.names == ("data",)}  # type: ignore[union-attr]
    assert {"reduce_scatter", "all_gather"} <= kinds
    optimizer = optax.adam(1e-2, eps=1e-3)
    runner = step_from_plan(plan, case.model.loss_fn, optimizer)
    params = case.model.init(0)[0]
    assert runner.left_over() == ()
    state, loss = runner.step(runner.init(params), case.model.init(0)[1])
    got, _ = runner.finish(state)
    expected, plain = by_hand(case, optimizer, 1)
    np.testing.assert_allclose(float(loss), plain[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, expected)
    # Between steps, a parameter has the plan's storage layout.
    stored = {path: t.state or t.storage for path, t in plan.parameters.items()}
    for keys, x in jax.tree_util.tree_leaves_with_path(got):
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        split = [a for axes in stored[path] for a in axes]
        assert (
            x.addressable_shards[0].data.size * int(np.prod([plan.jax.mesh().shape[a] for a in split]))
            == x.size
        )


def toy(batch: int = 16) -> tuple[Any, Any, tuple[Any, Any]]:
    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)

    g = np.random.default_rng(0)
    params = {
        "a": jnp.asarray(g.normal(size=(32, 64)), "float32"),
        "b": jnp.asarray(g.normal(size=(64, 8)), "float32"),
    }
    data = (
        jnp.asarray(g.normal(size=(batch, 32)), "float32"),
        jnp.asarray(g.normal(size=(batch, 8)), "float32"),
    )
    return loss_fn, params, data


def planned(strategy: str, batch: int = 16) -> tuple[Any, Any, tuple[Any, Any], Plan]:
    loss_fn, params, data = toy(batch)
    plan = case_of(loss_fn, params, *data).plan(strategy)
    assert plan is not None
    return loss_fn, params, data, plan


@pytest.mark.some(1)
@pytest.mark.parametrize("mean", [True, False])
def test_zero_3_moves_what_the_plan_says(mean: bool) -> None:
    """The program of FSDP has as many reduce-scatters and all-gathers as the plan has messages.

    The program determines whether the loss is a mean over the batch or a sum.
    """
    loss_fn, params, data = toy()
    scaled = loss_fn if mean else (lambda p, x, y: loss_fn(p, x, y) * x.shape[0])
    plan = case_of(scaled, params, *data).plan("fsdp")
    assert plan is not None and all(any(t.state or t.storage) for t in plan.parameters.values())
    optimizer = optax.sgd(0.1 if mean else 0.1 / 16)
    runner = step_from_plan(plan, scaled, optimizer)
    assert runner.left_over() == ()
    state = runner.init(params)
    for _ in range(2):
        state, loss = runner.step(state, *data)
    got, _ = runner.finish(state)
    state_, p = optimizer.init(params), params
    for _ in range(2):
        plain, grads = jax.value_and_grad(scaled)(p, *data)
        updates, state_ = optimizer.update(grads, state_, p)
        p = optax.apply_updates(p, updates)
    np.testing.assert_allclose(float(loss), float(plain), rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, p)
    alone = step_from_plan(plan, scaled, optimizer, overlap=False)
    start = alone.init(params)
    text = alone.stepper.lower(start.params, start.opt_state, *data).compile().as_text()
    messages = alone.jax.program.messages
    for kind, way in (("all-gather", "there"), ("reduce-scatter", "back")):
        assert (
            len(re.findall(rf" {kind}(?:-start)?\(", text)) == len([m for m in messages if m.way == way]) > 0
        )


def test_what_is_sent_during_the_next_forward_is_sent_by_the_next_step() -> None:
    """On a slow network, gradient reductions end after backward, so the next program sends them.

    After the update, that program gathers the parameters in the plan's messages. The numbers are the plain step's.
    """
    loss_fn, params, data = toy()
    for strategy in ("data_parallel", "fsdp"):
        plan = case_of(loss_fn, params, *data).plan(strategy)
        nbytes = sum(t.nbytes for t in problem_of(plan).tensors)
        slow = link("slow", alpha_s=1e-9, beta=0.9 * problem_of(plan).compute_s / nbytes)
        problem = problem_of(plan, links=(slow,))
        made = get_policy("bytescheduler").make(problem, Options(partition_elements=300))
        optimizer = optax.adam(1e-2, eps=1e-3)
        runner = step_from_plan(plan, loss_fn, optimizer, buckets=(problem, as_sequence(problem, made)))
        program = runner.jax.program
        late = [m for m in program.messages if m.late]
        assert late and all(m.way == "back" for m in late)
        verify_program(program)
        assert program_from_text(program_text(program)) == program
        state, wanted = runner.init(params), (params, optimizer.init(params))
        for _ in range(3):
            before = state
            state, loss = runner.step(state, *data)
            plain, grads = jax.value_and_grad(loss_fn)(wanted[0], *data)
            updates, opt_state = optimizer.update(grads, wanted[1], wanted[0])
            wanted = optax.apply_updates(wanted[0], updates), opt_state
            np.testing.assert_allclose(float(loss), float(plain), rtol=1e-5)
        got, _ = runner.finish(state)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, wanted[0])
        counts = []
        for number, given in ((0, runner.init(params)), (2, before)):
            step = runner.stepper.at(number)
            text = step.lower(given.params, given.opt_state, given.waiting, *data).compile().as_text()
            counts.append(len(re.findall(r" (?:reduce-scatter|all-reduce)(?:-start)?\(", text)))
            gathers = [m for m in program.messages if m.way == "there"]
            assert len(re.findall(r" all-gather(?:-start)?\(", text)) == len(gathers)
        assert counts[1] - counts[0] == len(late)


def test_a_bucket_plan_of_other_seconds_is_run_as_it_is() -> None:
    """A network and blocks of measured seconds: which messages are late follows from them, not from the plan's own."""
    loss_fn, params, data, plan = planned("data_parallel")
    own = plan.bucket_problem
    assert own is not None
    nbytes, compute_s = sum(t.nbytes for t in own.tensors), 0.01 * len(own.blocks)
    problem = replace(
        own,
        blocks=tuple(replace(b, seconds=0.01) for b in own.blocks),
        links=(link("measured", alpha_s=1e-6, beta=1.5 * compute_s / nbytes),),
    )
    made = get_policy("priority").make(problem, Options())
    optimizer = optax.sgd(0.1)
    runner = step_from_plan(plan, loss_fn, optimizer, buckets=(problem, made))
    assert runner.left_over() == () and runner.jax.schedule.problem is problem  # type: ignore[union-attr]
    assert [m.late for m in runner.jax.program.messages] == [0, 1]
    slower = replace(problem, blocks=tuple(replace(b, seconds=0.1) for b in own.blocks))
    assert not any(
        m.late for m in step_from_plan(plan, loss_fn, optimizer, buckets=(slower, made)).jax.program.messages
    )
    state = runner.init(params)
    for _ in range(2):
        state, loss = runner.step(state, *data)
    got, _ = runner.finish(state)
    for _ in range(2):
        plain, grads = jax.value_and_grad(loss_fn)(params, *data)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    np.testing.assert_allclose(float(loss), float(plain), rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, params)
    other = replace(problem, tensors=tuple(replace(t, name=f"{t.name}'") for t in problem.tensors))
    with pytest.raises(PaseError) as e:
        step_from_plan(plan, loss_fn, optimizer, buckets=(other, made))
    assert "bucket_problem" in e.value.fix


def test_inputs_that_arrive_whole_are_split_as_their_readers_do() -> None:
    """The search may leave inputs replicated, because a slice sends nothing. Parameters may be stored split."""
    loss_fn, params, data = toy(2**14)
    plan = pase.compile(loss_fn, params, *data, devices=8, mesh="2x2x2", baselines=False)
    assert any(not t.storage[0] for t in plan.inputs.values())
    optimizer = optax.sgd(0.1)
    runner = step_from_plan(plan, loss_fn, optimizer)
    assert runner.left_over() == ()
    state, loss = runner.step(runner.init(params), *data)
    got, _ = runner.finish(state)
    plain, grads = jax.value_and_grad(loss_fn)(params, *data)
    np.testing.assert_allclose(float(loss), float(plain), rtol=1e-5)
    jax.tree.map(
        lambda a, p, g: np.testing.assert_allclose(a, p - 0.1 * g, rtol=1e-4, atol=1e-6), got, params, grads
    )


def test_what_needs_no_runner_or_is_another_program_is_said() -> None:
    loss_fn, _, _, plan = planned("data_parallel")
    with pytest.raises(PaseError) as e:
        step_from_plan(replace(plan, collectives=()), loss_fn, optax.sgd(0.1))
    assert "plan.jax.train_step" in e.value.fix
    with pytest.raises(PaseError) as e:
        step_from_plan(plan, lambda p, x, y: 2 * loss_fn(p, x, y) ** 3, optax.sgd(0.1))
    assert e.value.where == "loss_fn"


def test_a_fused_attention_runs_inside_of_a_bucketed_step() -> None:

    def attended(fused: bool) -> Any:
        def loss(p: Any, x: Any) -> Any:
            q, k, v = (jnp.einsum("bsd,dhk->bshk", x, p[n]) for n in "qkv")
            y = jax.nn.dot_product_attention(q, k, v, implementation="cudnn" if fused else "xla")
            return jnp.mean(jnp.einsum("bshk,hkd->bsd", y, p["o"]) ** 2)

        return loss

    g = np.random.default_rng(0)
    params = {n: jnp.asarray(g.normal(size=(32, 4, 16)) / 4, "float32") for n in "qkv"}
    params["o"] = jnp.asarray(g.normal(size=(4, 16, 32)) / 4, "float32")
    x = jnp.asarray(g.normal(size=(8, 16, 32)), "float32")
    plan = case_of(attended(True), params, x).plan("megatron_4x2")
    assert plan is not None
    runner = step_from_plan(plan, attended(True), optax.sgd(0.1))
    with pytest.warns(UserWarning, match="which cpu devices lack"):
        state, loss = runner.step(runner.init(params), x)
    expected, grads = jax.value_and_grad(attended(False))(params, x)
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-5)
    got, _ = runner.finish(state)
    updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, updated)
