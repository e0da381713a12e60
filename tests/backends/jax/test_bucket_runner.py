"""Runs of bucket plans. Plain ones equal the plain step; delayed and merged ones equal reference updates."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="the extra `jax` is not installed")
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from bench.cases.schedules import link  # noqa: E402
from pase.backends.jax.bucket_runner import BucketRunner, gradient_problem  # noqa: E402
from pase.errors import PaseError  # noqa: E402
from pase.schedule import (  # noqa: E402
    AxisGroup,
    BucketPlan,
    ComputeBlock,
    Options,
    ScheduleProblem,
    Transfer,
    Update,
    get_policy,
    whole,
)

LAYERS, WIDTH = 3, 16


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    def layer(h: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(layer, x @ params["in"], params["stack"])
    return jnp.mean((h @ params["out"]["w"] + params["out"]["b"] - y) ** 2)


graded = jax.jit(jax.value_and_grad(loss_fn))


def setup(seed: int = 0) -> tuple[Any, ScheduleProblem, list[tuple[Any, Any]]]:
    keys = jax.random.split(jax.random.key(seed), 5)
    params = {
        "in": jax.random.normal(keys[0], (8, WIDTH)) / 3,
        "stack": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) / 4,
        "out": {"w": jax.random.normal(keys[2], (WIDTH, 4)) / 4, "b": jnp.zeros(4)},
    }
    problem = gradient_problem(
        params,
        (link("a", alpha_s=2e-6, beta=1e-8), link("b", alpha_s=2e-6, beta=2e-8)),
        forward_s=5e-6,
        backward_s=9e-6,
    )
    g = np.random.default_rng(seed)
    batches = []
    for _ in range(9):
        x = g.normal(size=(16, 8)).astype(np.float32)
        batches.append((jnp.asarray(x), jnp.asarray(np.sin(x[:, :4]) + x[:, 4:])))
    return params, problem, batches


def cube(*sizes: int) -> Mesh:
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 host devices")
    return Mesh(np.asarray(jax.devices()[:8]).reshape(sizes), ("data", "data2", "model"))


def mesh(*sizes: int) -> Mesh:
    names = ("data", "model")[: len(sizes)]
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 host devices")
    return Mesh(np.asarray(jax.devices()[:8]).reshape(sizes), names)


def reference(params: Any, batches: list[Any], plan: BucketPlan, optimizer: Any) -> tuple[Any, list[float]]:
    """The same sequence of updates on one device.

    Gradients are those at the parameters of their own iteration. They are summed over an update's batches and applied
    after its iteration. The optimizer is not called in between.
    """
    state, losses, grads = optimizer.init(params), [], []

    @jax.jit
    def apply(params: Any, state: Any, mine: Any) -> Any:
        mean = jax.tree.map(lambda *x: sum(x) / len(x), *mine)
        change, state = optimizer.update(mean, state, params)
        return optax.apply_updates(params, change), state

    for it, batch in enumerate(batches):
        loss, g = graded(params, *batch)
        losses.append(float(loss))
        grads.append(g)
        for p in range(it + 1):
            for u in plan.updates:
                if u.at + p * plan.period == it:
                    mine = grads[u.first + p * plan.period : u.last + p * plan.period + 1]
                    params, state = apply(params, state, mine)
    return params, losses


def run(runner: BucketRunner, params: Any, batches: list[Any]) -> tuple[Any, list[float]]:
    state, losses = runner.init(params), []
    for batch in batches:
        state, loss = runner.step(state, *batch)
        losses.append(float(loss))
    return runner.finish(state)[0], losses


def check(
    plan: BucketPlan, problem: ScheduleProblem, params: Any, batches: list[Any], optimizer: Any
) -> list[float]:
    runner = BucketRunner(
        loss_fn=loss_fn, problem=problem, plan=plan, optimizer=optimizer, mesh=mesh(8), data_axes=("data",)
    )
    got, losses = run(runner, params, batches)
    expected, by_hand = reference(params, batches, plan, optimizer)
    np.testing.assert_allclose(losses, by_hand, rtol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), got, expected)
    return losses


@pytest.mark.parametrize("policy", ["ddp", "bytescheduler", "ours"])
def test_without_staleness_it_is_the_plain_step(policy: str) -> None:
    params, problem, batches = setup()
    plan = get_policy(policy).make(problem, Options(mode="fast"))
    check(plan, problem, params, batches[:3], optax.adam(1e-2))


DELAYED = {
    "late by one": (1, (Update(first=0, last=0, at=1),)),
    "two merged, late by one": (2, (Update(first=0, last=1, at=2),)),
    "one, two, one": (
        4,
        (Update(first=0, last=0, at=1), Update(first=1, last=2, at=3), Update(first=3, last=3, at=4)),
    ),
}


@pytest.mark.parametrize("name", list(DELAYED))
def test_delayed_and_merged_updates_are_the_same_by_hand(name: str) -> None:
    """With momentum and weight decay, updates with zero gradients on skipped steps would change parameters."""
    params, problem, batches = setup()
    period, updates = DELAYED[name]
    messages = []
    for u in range(len(updates)):
        for k, t in enumerate(reversed(range(len(problem.tensors)))):
            m = replace(whole(problem, [t], link=k % 2), update=u)
            if k % 3 == 1 and updates[u].at > updates[u].last:
                m = replace(m, iteration=1, phase="forward")
            messages.append(m)
    plan = BucketPlan(
        policy="x", messages=tuple(messages), dispatch="priority", period=period, updates=updates
    )
    optimizer = optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(0.05, momentum=0.9))
    losses = check(plan, problem, params, batches, optimizer)
    assert losses[-1] < losses[0]


def test_deft_and_ours_with_staleness_run_and_learn() -> None:
    """The losses of all three policies fall, and those with delayed updates stay near the plain ones."""
    params, problem, batches = setup()
    slow = replace(problem, links=(link("a", alpha_s=1e-7, beta=1.6e-8),))
    optimizer, curves = optax.sgd(0.05), {}
    for name, staleness in (("ours", 0), ("ours", 2), ("deft", 2)):
        plan = get_policy(name).make(slow, Options(staleness=staleness, mode="fast"))
        assert plan.staleness <= staleness
        curves[name, staleness] = check(plan, slow, params, [batches[i % 9] for i in range(20)], optimizer)
    for losses in curves.values():
        assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    plain = np.mean(curves["ours", 0][-5:])
    assert all(np.mean(x[-5:]) < 1.6 * plain for x in curves.values())


def test_collectives_are_the_plans_in_its_order() -> None:
    """XLA does not combine or reorder messages: it has one all-reduce for each message, with sizes in order."""
    params, problem, batches = setup()
    plan = replace(get_policy("bytescheduler").make(problem, Options()), dispatch="sequence", credit_bytes=1)
    runner = BucketRunner(
        loss_fn=loss_fn,
        problem=problem,
        plan=plan,
        optimizer=optax.sgd(0.1),
        mesh=mesh(8),
        data_axes=("data",),
        overlap=False,
    )
    state = runner.init(params)
    fn = runner.program(params, 0)
    text = fn.lower(params, state.opt_state, (), *batches[0]).compile().as_text()
    shapes = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    # XLA may combine the scalar loss with any of them.
    sizes = [
        [int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"f32\[([\d,]+)\]", s)]
        for s in shapes
    ]
    assert [s for s in sizes if s] == [[m.nbytes // 4] for m in plan.messages]


def test_it_composes_with_sharded_parameters() -> None:
    """4 data x 2 model: weights split over `model` stay split, and buckets contain their local shards."""
    params, problem, batches = setup()
    where = mesh(4, 2)
    specs = {"in": P(None, "model"), "stack": P(None, None, "model"), "out": {"w": P("model"), "b": P()}}
    placed = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(where, s)), params, specs)
    plan = get_policy("ours").make(problem, Options(mode="fast"))
    optimizer = optax.adam(1e-2)
    runner = BucketRunner(
        loss_fn=loss_fn,
        problem=problem,
        plan=plan,
        optimizer=optimizer,
        mesh=where,
        data_axes=("data",),
        specs=specs,
    )
    got, losses = run(runner, placed, batches[:3])
    expected, by_hand = reference(params, batches[:3], plan, optimizer)
    np.testing.assert_allclose(losses, by_hand, rtol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), got, expected)
    assert got["stack"].sharding.spec == specs["stack"]


def test_what_is_sent_during_the_next_forward_is_sent_by_the_next_step() -> None:
    """On a slow network, messages end after backward. The numbers are the plain step's, one program later."""
    params, problem, batches = setup()
    plan = get_policy("ours").make(problem, Options(mode="fast"))
    optimizer = optax.adam(1e-2)
    runner = BucketRunner(
        loss_fn=loss_fn,
        problem=problem,
        plan=plan,
        optimizer=optimizer,
        mesh=mesh(8),
        data_axes=("data",),
    )
    late = [m for m in runner.parameters(params).local.messages if m.late]
    assert late
    got, losses = run(runner, params, batches[:4])
    expected, by_hand = reference(params, batches[:4], plan, optimizer)
    np.testing.assert_allclose(losses, by_hand, rtol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), got, expected)
    # The first program sends the messages of its backward. The second one also sends the late ones of the first.
    state, _ = runner.step(runner.init(params), *batches[0])
    first, second = runner.program(params, 0), runner.program(params, 1)
    sent = [
        len(
            re.findall(
                r" all-reduce(?:-start)?\(",
                fn.lower(s.params, s.opt_state, s.waiting, *batches[0]).compile().as_text(),
            )
        )
        for fn, s in ((first, runner.init(params)), (second, state))
    ]
    # The all-reduce of the scalar loss is one more, unless XLA combines it with another.
    assert sent[1] - sent[0] == len(late) and sent[0] - (len(plan.messages) - len(late)) in (0, 1)


SHARDED = {
    "in": P("data"),
    "stack": P(None, "model", ("data", "data2")),
    "out": {"w": P(("model", "data")), "b": P("data2")},
}


def stages(name: str, nbytes: int, at: int, n: int, axes: list[str], sizes: dict[str, int]) -> list[Transfer]:
    """The stages of one parameter (or layer) that is stored split over these axes and first used by block `at` of n."""
    rest = [a for a in ("data", "data2") if a not in axes]
    steps = [("reduce_scatter", axes, nbytes)]
    part = nbytes // int(np.prod([sizes[a] for a in axes]))
    steps += [("all_reduce", rest, part)] * bool(rest)
    for a in reversed(axes):
        part *= sizes[a]
        steps.append(("all_gather", [a], part))
    return [
        Transfer(
            name=f"{name}{'' if kind == 'all_gather' else '.grad'}.{kind}.{i}",
            nbytes=size,
            ready_after=None if i else 2 * n - 1 - at,
            needed_before=at if kind == "all_gather" else None,
            axes=AxisGroup(tuple(over), kind),
            kind=kind,
            follows=(i - 1,) if i else (),
        )
        for i, (kind, over, size) in enumerate(steps)
    ]


def sharded_problem(params: Any, sizes: dict[str, int]) -> ScheduleProblem:
    """A problem with sharded parameters.

    Gradients are reduce-scattered over the data axes of a parameter's storage, then all-reduced over the other data
    axes. Parameters are gathered axis by axis, the most minor one first.
    """
    tensors: list[Transfer] = []
    leaves = jax.tree_util.tree_leaves_with_path(params)
    specs = jax.tree.leaves(SHARDED, is_leaf=lambda s: isinstance(s, P))
    for i, ((path, x), spec) in enumerate(zip(leaves, specs, strict=True)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        axes = [a for dim in spec for a in ((dim,) if isinstance(dim, str) else dim or ()) if a != "model"]
        labels = [f"{name}[{r}]" for r in range(LAYERS)] if name == "stack" else [name]
        for label in labels:
            base = len(tensors)
            made = stages(label, x.size * 4 // len(labels), i, len(leaves), axes, sizes)
            tensors += [replace(t, follows=tuple(f + base for f in t.follows)) for t in made]
    n = len(leaves)
    blocks = [
        ComputeBlock(name=f"b{i}", phase="forward" if i < n else "backward", seconds=1e-6)
        for i in range(2 * n)
    ]
    return ScheduleProblem(
        name="sharded",
        blocks=tuple(blocks),
        tensors=tuple(tensors),
        links=(link("a", alpha_s=1e-6, beta=1e-9),),
    )


@pytest.mark.parametrize("policy", ["ours", "fifo", "bytescheduler"])
def test_sharded_parameters_are_gathered_and_their_gradients_scattered(policy: str) -> None:
    """2 data x 2 data2 x 2 model: storage is split over data axes and others, on one dim and on several.

    Messages are merged and split.
    """
    params, _, batches = setup()
    where = cube(2, 2, 2)
    problem = sharded_problem(params, dict(where.shape))
    plan = get_policy(policy).make(problem, Options(partition_elements=100))
    optimizer = optax.adam(1e-2)
    runner = BucketRunner(
        loss_fn=loss_fn,
        problem=problem,
        plan=plan,
        optimizer=optimizer,
        mesh=where,
        data_axes=("data", "data2"),
        specs=SHARDED,
    )
    assert runner.left_over(params) == ()
    got, losses = run(runner, params, batches[:3])
    expected, by_hand = reference(params, batches[:3], BucketPlan(policy="x", messages=()), optimizer)
    np.testing.assert_allclose(losses, by_hand, rtol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), got, expected)
    assert jax.tree.map(lambda x: x.sharding.spec, got) == SHARDED


def test_stages_that_do_not_lead_to_the_storage_are_sent_by_themselves() -> None:
    """If the data axis is more major than the model axis, a gathered parameter is not contiguous and needs more steps.

    If a stage is missing, the parameter is in no message. The numbers are right in both cases.
    """
    params, _, batches = setup()
    where = cube(2, 2, 2)
    problem = sharded_problem(params, dict(where.shape))
    specs = SHARDED | {"out": {"w": P(("data", "model")), "b": P(("data2", "data"))}}
    plan = get_policy("fifo").make(problem, Options())
    runner = BucketRunner(
        loss_fn=loss_fn,
        problem=problem,
        plan=plan,
        optimizer=optax.sgd(0.1),
        mesh=where,
        data_axes=("data", "data2"),
        specs=specs,
    )
    assert runner.left_over(params) == ("out.b",)
    got, losses = run(runner, params, batches[:2])
    expected, by_hand = reference(params, batches[:2], BucketPlan(policy="x", messages=()), optax.sgd(0.1))
    np.testing.assert_allclose(losses, by_hand, rtol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), got, expected)


def test_what_it_cannot_run_is_said() -> None:
    _, problem, _ = setup()
    plan = get_policy("fifo").make(problem, Options())
    params, other, _ = setup()
    for wrong, named in (
        ({"w": params["in"]}, "'in'"),
        (params | {"w": 1.0}, "parameters w"),
    ):
        runner = BucketRunner(
            loss_fn=loss_fn,
            problem=other,
            plan=plan,
            optimizer=optax.sgd(0.1),
            mesh=mesh(8),
            data_axes=("data",),
        )
        with pytest.raises(PaseError) as e:
            runner.parameters(jax.tree.map(jnp.asarray, wrong))
        assert e.value.where == "problem 'model'" and named in e.value.what
    with pytest.raises(PaseError, match="data_axes"):
        BucketRunner(
            loss_fn=loss_fn,
            problem=problem,
            plan=plan,
            optimizer=optax.sgd(0.1),
            mesh=mesh(8),
            data_axes=("batch",),
        )
