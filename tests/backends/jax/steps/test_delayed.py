"""Steps whose gradients are applied in later steps.

The numbers are those of reference updates in numpy, and the compiled program has the reductions in the plan's steps.
"""

import re
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.cases.plans import case_of, reduced
from bench.cases.schedules import link
from pase.backends.jax.steps.updates import DelayedIteration, waiting_bytes
from pase.errors import PaseError
from pase.local.interpret import loss_and_gradients
from pase.local.text import program_from_text, program_text
from pase.local.verify import verify_program
from pase.plan.buckets import holding, problem_of
from pase.schedule.plan import BucketPlan, Message, Piece, Update
from pase.schedule.registry import Options, get_policy
from tests.backends.jax.spmd.test_messages import ancestors

LAYERS, WIDTH = 3, 16
DELAYED = {
    "late by one": (1, (Update(first=0, last=0, at=1),)),
    "two merged, late by one": (2, (Update(first=0, last=1, at=2),)),
    "three merged": (3, (Update(first=0, last=2, at=2),)),
    "one, two, one": (
        4,
        (Update(first=0, last=0, at=1), Update(first=1, last=2, at=3), Update(first=3, last=3, at=4)),
    ),
}


def looped(params, x):
    """A loop over layers, weights that are read before and after it, and a weight that is read twice."""
    h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), jnp.tanh(x @ params["in"]), params["stack"])[0]
    y = jnp.tanh(h @ params["in"].T @ params["out"])
    return jnp.sum(y * y)


def curved(params, x):
    """The same model, in which the derivative of an op on a parameter depends on the parameter's value."""
    return looped(params | {"out": jnp.tanh(params["out"])}, x)


@pytest.fixture(scope="module")
def drawn():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape) / 4

    params = {"in": draw(8, WIDTH), "stack": draw(LAYERS, WIDTH, WIDTH), "out": draw(8, 4)}
    return params, [draw(16, 8) for _ in range(11)]


def scheduled(plan, period, updates):
    """The plan with a bucket plan of these updates: tensors split in two, small ones merged, sent in any order."""
    problem, messages = problem_of(plan), []
    for u, update in enumerate(updates):
        span = update.at - update.last + 1
        for k, (t, tensor) in enumerate(reversed(list(enumerate(problem.tensors)))):
            half = tensor.nbytes // 2
            pieces = [
                Piece(tensor=t, offset=0, nbytes=half),
                Piece(tensor=t, offset=half, nbytes=tensor.nbytes - half),
            ]
            if k % 3 == 0:
                pieces = [Piece(tensor=t, offset=0, nbytes=tensor.nbytes)]
            messages += [
                Message(
                    pieces=(p,),
                    update=u,
                    iteration=(k + i) % span,
                    phase="forward" if (k + i) % span else None,
                )
                for i, p in enumerate(pieces)
            ]
    made = BucketPlan(
        policy="by hand", messages=tuple(messages), dispatch="priority", period=period, updates=updates
    )
    return holding(plan, problem, made)


def by_hand(plan, params, batches, updates, period, rate):
    """(parameters, losses) of reference updates in numpy.

    Each update is the mean of its steps' gradients, applied after the given step. Only updates change the momentum.
    """
    program, graph = plan.jax.program, plan.graph
    names = dict(zip(sorted(params), plan.jax.leaf_names(), strict=False))
    params, momentum = dict(params), {k: np.zeros_like(v) for k, v in params.items()}
    plain = replace(program, messages=(), period=1, updates=(Update(),))
    (loss,) = program.outputs
    every, losses = [], []
    for it, batch in enumerate(batches):
        given = {names[k]: v for k, v in params.items()} | {plan.jax.leaf_names()[-1]: batch}
        numbers = {}
        value, grads = loss_and_gradients(plain, graph, given, loss, numbers)
        losses.append(float(value))
        every.append({k: grads[names[k]] for k in params})
        for u in updates:
            for k in range(it // period + 1):
                first, last, at = (i + k * period for i in (u.first, u.last, u.at))
                if at == it:
                    for name in params:
                        mean = sum(g[name] for g in every[first : last + 1]) / (last - first + 1)
                        momentum[name] = 0.9 * momentum[name] + mean
                        params[name] = params[name] - rate * momentum[name]
    return params, losses


@pytest.mark.some(3)
@pytest.mark.parametrize(("name", "fn"), [*((name, looped) for name in DELAYED), ("late by one", curved)])
def test_delayed_steps_are_the_updates_by_hand(drawn, name, fn):
    period, updates = DELAYED[name]
    params, batches = drawn
    with jax.enable_x64(True):
        plain = case_of(fn, jax.tree.map(jnp.asarray, params), jnp.asarray(batches[0])).plan("data_parallel")
        plan = scheduled(plain, period, updates)
        program = plan.jax.program
        verify_program(program)
        assert program_from_text(program_text(program)) == program
        optimizer = optax.sgd(0.05, momentum=0.9)
        with pytest.warns(UserWarning, match="by design"):
            step = plan.jax.train_step(optimizer, lowering="manual")
        held, _ = plan.jax.device_put(params, batches[0])
        state, losses = plan.jax.init(optimizer, held), []
        for batch in batches:
            held, state, loss = step(held, state, batch)
            losses.append(float(loss))
        expected, wanted = by_hand(plan, params, batches, updates, period, 0.05)
    np.testing.assert_allclose(losses, wanted, rtol=1e-12)
    for k in params:
        np.testing.assert_allclose(held[k], expected[k], rtol=0, atol=1e-12)


SUM = re.compile(r"%(\S+) = .* all-reduce(?:-start)?\(.*op_name=\"[^\"]*?message back of ([^/\")]*)")


def texts(plan, optimizer):
    """For each iteration of the steady period: (the iteration, the text of its compiled program)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = plan.jax.train_step(optimizer, lowering="manual")
    shapes = plan.jax._shapes()
    state, program = jax.eval_shape(optimizer.init, shapes[0]), plan.jax.program
    begin = (max(u.at for u in program.updates) // program.period + 1) * program.period
    for n in range(begin, begin + program.period):
        yield (
            DelayedIteration(program=program, number=n),
            step.lower(shapes[0], state, *shapes[1:], iteration=n).compile().as_text(),
        )


def test_what_waits_is_summed_where_the_plan_has_it_and_beside_the_step(drawn):
    """Over a period, each byte of each gradient is reduced once for every update.

    Reductions of earlier gradients do not depend on this step's batch.
    """
    params, batches = drawn
    period, updates = DELAYED["one, two, one"]
    params, batch = jax.tree.map(lambda x: jnp.asarray(x, "float32"), (params, batches[0]))
    plan = scheduled(case_of(looped, params, batch).plan("data_parallel"), period, updates)
    program, summed = plan.jax.program, 0
    for iteration, text in texts(plan, optax.sgd(0.1)):
        wanted = [m for u in iteration.updates for m in iteration.messages(u)[1]]
        lines = [line for line in text.splitlines() if SUM.search(line)]
        tensors = [SUM.search(line)[2] for line in lines]
        names = [{program.transfers[p.transfer].tensor for p in m.chunks} for m in wanted]
        assert [set(t.split(", ")) for t in tensors] == names
        sizes = [
            int(np.prod([int(n) for n in re.search(r"f32\[([\d,]+)\]", x)[1].split(",")])) for x in lines
        ]
        assert sizes == [sum(p.nbytes for p in m.chunks) // 4 for m in wanted]
        summed += 4 * sum(sizes)
        earlier = sum(len(iteration.messages(u)[1]) for u in iteration.updates if u.last < iteration.number)
        found = ancestors(text)
        (given,) = re.findall(r"%(\S+) = f32\[2,8\]\S* parameter\(\d+\)", text[text.index("\nENTRY ") :])
        late = [line for line in lines[:earlier] if "f32[]" not in line]  # XLA may combine the loss with one
        assert len(late) >= earlier - 1 and not any(given in found[SUM.search(x)[1]] for x in late)
    whole = sum(c.nbytes * c.times for c in plan.collectives if c.phase == "backward" and c.nbytes > 8)
    assert summed == whole * len(updates)


@pytest.mark.parametrize("model", ["mlp", pytest.param("gpt2", marks=pytest.mark.release)])
def test_deft_in_the_step_is_its_updates_by_hand(model):
    """On a network that takes 1.7 times the compute, DeFT merges and delays updates, and splits and merges messages.

    By hand, each update is the mean of its steps' gradients, each at the parameters of its own step.
    """
    case = reduced(model)
    plan = case.plan("data_parallel")
    problem = problem_of(plan)
    nbytes = sum(t.nbytes for t in problem.tensors)
    problem = problem_of(plan, links=(link("slow", alpha_s=1e-9, beta=1.7 * problem.compute_s / nbytes),))
    plan = holding(plan, problem, get_policy("deft").make(problem, Options(staleness=4)))
    program, optimizer = plan.jax.program, optax.adam(1e-2, eps=1e-3)
    assert program.period > len(program.updates) and any(m.late for m in program.messages)
    verify_program(program)
    assert waiting_bytes(program, plan.graph) == plan.waiting_bytes > 0
    assert "of gradients that wait for later steps" in str(plan)
    memory = plan.memory.total + plan.waiting_bytes
    assert [replace(plan, memory_limit=memory + k).fits for k in (-1, 0)] == [False, True]
    params, batch = case.model.init(0)
    with pytest.warns(UserWarning, match="Preserver .* gradients wait on each device"):
        step = plan.jax.train_step(optimizer, donate=False)
    held, state = params, plan.jax.init(optimizer, params)
    wanted, plain, grads = params, optimizer.init(params), []
    graded = jax.jit(jax.value_and_grad(case.model.loss_fn))
    for k in range(plan.bucket_plan.period + 2):
        batch = case.model.init(k)[1]
        held, state, loss = step(held, state, batch)
        value, g = graded(wanted, batch)
        grads.append(g)
        for u in DelayedIteration(program=replace(program, messages=()), number=k).updates:
            if u.at == k:
                mean = jax.tree.map(lambda *x: sum(x) / len(x), *grads[u.first : u.last + 1])
                change, plain = optimizer.update(mean, plain, wanted)
                wanted = optax.apply_updates(wanted, change)
        np.testing.assert_allclose(float(loss), float(value), rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), held, wanted)
    assert jax.tree.map(lambda x: x, state).iteration == k + 1  # a pytree, as checkpoints take it


def test_gradients_that_no_message_carries_wait_as_sums():
    """A gradient of a parameter that a branch reads cannot wait unreduced. It is reduced in its own step."""

    def loss(params, x):
        y = x @ params["w"]
        y = jax.lax.cond(jnp.sum(y) > 0, lambda y: y @ params["v"], lambda y: -y @ params["v"], y)
        return jnp.mean(y * y)

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(8, 8)) / 4, "v": rng.normal(size=(8, 8)) / 4}
    params = jax.tree.map(lambda x: jnp.asarray(x, "float32"), params)
    batches = [jnp.asarray(rng.normal(size=(16, 8)), "float32") for _ in range(4)]
    plain = case_of(loss, params, batches[0]).plan("data_parallel")
    plan = scheduled(plain, 2, (Update(first=0, last=1, at=2),))
    carried = {
        plan.jax.program.transfers[p.transfer].src for m in plan.jax.program.messages for p in m.chunks
    }
    assert carried == {"w"}
    with pytest.warns(UserWarning, match="by design"):
        step = plan.jax.train_step(optax.sgd(0.1), lowering="manual", donate=False)
    held, state = params, plan.jax.init(optax.sgd(0.1), params)
    for batch in batches[:3]:
        held, state, _ = step(held, state, batch)
    grads = [jax.grad(loss)(params, batch) for batch in batches[:2]]
    expected = jax.tree.map(lambda p, a, b: p - 0.1 * (a + b) / 2, params, *grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), held, expected)


def test_what_waits_for_ever_or_twice_is_refused(drawn):
    params, batches = drawn
    period, updates = DELAYED["one, two, one"]
    params, batch = jax.tree.map(lambda x: jnp.asarray(x, "float32"), (params, batches[0]))
    program = scheduled(case_of(looped, params, batch).plan("data_parallel"), period, updates).jax.program
    first, *rest = program.messages
    for messages, named in (
        ((replace(first, late=9), *rest), "update 1"),
        ((replace(first, update=7), *rest), "update 7"),
        ((*program.messages, first), "update 1"),
        ((replace(first, after="out"), *rest), "step's computation"),
        ((replace(first, way="there", late=1), *rest), "gradient"),
        (tuple(m for m in program.messages if m.update != 1), "update"),
    ):
        with pytest.raises(PaseError, match=named):
            verify_program(replace(program, messages=messages))
    with pytest.raises(PaseError, match=r"3 iterations.* 4"):
        verify_program(replace(program, updates=program.updates[1:]))


def test_where_nothing_can_wait_each_step_applies_its_own():
    case = reduced("mlp")
    plan = case.plan("data_parallel").scheduled("deft", Options(staleness=2))
    params, batch = case.model.init(0)
    optimizer = optax.sgd(0.1)
    with pytest.warns(UserWarning, match="plan.jax.train_step"):
        step = plan.jax.train_step(optimizer, lowering="annotated", donate=False)
    held, _, _ = step(params, plan.jax.init(optimizer, params), batch)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(case.model.loss_fn)(params, batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), held, expected)
