"""A loop's iteration prefetches what the next one reads first, as XLA's compiled program shows, with equal results and
equal bytes."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pase
from bench.cases.plans import TOLERANCE, case_of
from pase.backends.audit.xla import compare, sharded_step
from pase.ir.blocks import accumulated
from pase.memory.account import memory, prefetched_bytes
from pase.tables.itemize import config_of

OPTIMIZER = optax.sgd(0.1)


def layer(x, p):
    """Two matmuls. No product of the same iteration is before the gather for the first one."""
    return x + jnp.tanh(x @ p["up"]) @ p["down"], None


def model(turned):
    def loss(params, batch):
        return jnp.mean(jax.lax.scan(turned, batch @ params["first"], params["layers"])[0] ** 2)

    return loss


def example(layers):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / 8, "float32")

    blocks = {"up": draw(layers, 64, 128), "down": draw(layers, 128, 64)}
    return {"first": draw(64, 64), "layers": blocks}, draw(32, 64)


def bodies(text):
    """The bodies of loops in a compiled program, each as instruction name -> (opcode, operands, line)."""
    found = []
    for name in set(re.findall(r"body=%([\w.\-]+)", text)):
        start = re.search(rf"^%{re.escape(name)} .*$", text, re.M).end()
        lines = text[start : text.index("\n}", start)].splitlines()
        made = [re.match(r"\s+(?:ROOT )?%([\w.\-]+) = \(?.*? ([\w\-]+)\((.*)", x) for x in lines]
        found.append(
            {m[1]: (m[2], re.findall(r"%([\w.\-]+)", m[3].split("), ")[0]), m[0]) for m in made if m}
        )
    return found


def closure(of, edges):
    """Everything that can be reached along the edges."""
    seen, left = set(), [of]
    while left:
        for other in edges(left.pop()):
            if other not in seen:
                seen.add(other)
                left.append(other)
    return seen


def early(body):
    """The prefetching gathers of a loop's body: they read only loop invariants and the iteration number, and only the
    results of the iteration read them."""
    root = body[next(n for n, (_, _, line) in body.items() if "ROOT" in line)][1]
    kept = {n for i, n in enumerate(root) if body[n][0] == "get-tuple-element" and f"index={i}" in body[n][2]}
    found = []
    for name, (opcode, _, _) in body.items():
        if not opcode.startswith("all-gather"):
            continue
        before = closure(name, lambda n: body[n][1] if n in body else [])
        taken = {n for n in before if n in body and body[n][0] == "get-tuple-element"}
        behind = closure(name, lambda n: [m for m, (_, reads, _) in body.items() if n in reads])
        plain = {"bitcast", "copy", "reshape", "transpose", "tuple"}
        counter = {n for n in taken if "= s32[] " in body[n][2]}
        if taken <= kept | counter and all(body[n][0] in plain for n in behind):
            found.append(name)
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "rematerialised"])
@pytest.mark.parametrize("layers", [2, 4])
def test_the_first_gather_of_a_turn_runs_in_the_turn_before(again, layers):
    params, batch = example(layers)
    plain = case_of(model(jax.checkpoint(layer) if again else layer), params, batch).plan("fsdp")
    ahead = replace(plain, overlap=0.0)
    before = sharded_step(plain, OPTIMIZER, params, batch, lowering="manual")
    step = sharded_step(ahead, OPTIMIZER, params, batch, lowering="manual")
    assert step.differences(before) == dict.fromkeys(TOLERANCE, 0.0)
    for compiled in (before.compiled, step.compiled):
        assert all(r.compiled == r.predicted for r in compare(plain, compiled, "manual"))
    if layers == 4:  # with 2 layers, one iteration is left, which is no loop in the compiled program
        assert not any(map(early, bodies(before.compiled.as_text())))
        assert [len(early(b)) for b in bodies(step.compiled.as_text()) if early(b)] == [1] * (1 + again)


def test_messages_that_wait_for_nothing_go_ahead_too():
    params, batch = example(4)
    plan = replace(case_of(model(jax.checkpoint(layer)), params, batch).plan("fsdp"), overlap=0.0)
    scheduled = plan.scheduled("ours")
    step = sharded_step(scheduled, OPTIMIZER, params, batch, lowering="manual")
    assert step.differences(sharded_step(plan, OPTIMIZER, params, batch, lowering="manual")) == dict.fromkeys(
        TOLERANCE, 0.0
    )
    assert all(r.compiled == r.predicted for r in compare(scheduled, step.compiled, "manual"))
    free = [m for m in scheduled.jax.program.messages if m.way == "there" and not m.after]
    assert bool(sum(len(early(b)) for b in bodies(step.compiled.as_text()))) == bool(free)


def test_what_is_gathered_ahead_is_in_the_account():
    params, batch = example(4)
    loss = model(jax.checkpoint(layer))
    fsdp = case_of(loss, params, batch).plan("fsdp")
    graph, mesh = fsdp.split_graph, fsdp.mesh
    configs = {n.name: config_of(n, fsdp.strategy[n.name], mesh) for n in graph.nodes}
    one = 64 * 128 * 4  # the whole first matrix of an iteration
    assert prefetched_bytes(graph, configs, mesh) == one
    assert prefetched_bytes(accumulated(graph, 2), configs, mesh) == one
    without, ahead = (memory(graph, mesh, configs, "adam", prefetch=on) for on in (False, True))
    assert ahead.total - without.total == one == ahead.buffers - without.buffers
    kept = case_of(model(layer), params, batch).plan("fsdp")  # gathered parameters are residuals
    assert prefetched_bytes(kept.split_graph, configs, mesh) == 0


def test_what_reads_an_inner_loop_waits_for_it_in_the_account_and_in_the_step():
    """A loop inside of an iteration counts as a product, even if it contains none."""

    def after_a_loop(x, p):
        return layer(jax.lax.scan(lambda h, _: (jnp.tanh(h), None), x, None, length=3)[0], p)

    params, batch = example(4)
    plan = case_of(model(jax.checkpoint(after_a_loop)), params, batch).plan("fsdp")
    configs = {n.name: config_of(n, plan.strategy[n.name], plan.mesh) for n in plan.split_graph.nodes}
    assert prefetched_bytes(plan.split_graph, configs, plan.mesh) == 0
    lowered = replace(plan, overlap=0.0).jax.lower_train_step(OPTIMIZER, lowering="manual")
    assert not any(map(early, bodies(lowered.compile().as_text())))


def test_steps_gather_ahead_where_the_price_says_so():
    params, batch = example(2)
    for overlap, ahead in (("none", False), ("parameters", True)):
        plan = pase.compile(
            model(layer), params, batch, devices=8, machine="h100x8", mesh="8", overlap=overlap
        )
        assert plan.jax.prefetch == ahead
