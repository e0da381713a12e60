"""Two processes with four host devices each make the same step as one device."""

import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import optax
import pytest

import pase
from bench.cases.plans import DEVICES, reduced
from pase.backends.audit.xla import unsharded_step
from pase.schedule.plan import Update
from tests.backends.jax.nnx_models import BATCH, OPTIMIZER, Dropped, rngs, squares
from tests.backends.jax.steps.test_delayed import scheduled
from tests.program import COMPILED_QUICKLY

ROOT = Path(__file__).parents[3]
PROCESSES = 2

WORKER = f"""
import sys
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", {DEVICES // PROCESSES})
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], {PROCESSES}, int(sys.argv[2]), initialization_timeout=120)

import optax
from bench.cases.plans import reduced

case = reduced("mlp")
jp = case.plan("ours@2x4").jax
optimizer = optax.adam(1e-3)
assert jax.process_count() == {PROCESSES} and len(jax.local_devices()) == {DEVICES // PROCESSES}
params, batch = jp.device_put(*case.model.init(0))
state = jax.jit(optimizer.init, out_shardings=jp.state_shardings(optimizer))(params)
step = jp.train_step(optimizer)
for _ in range(2):
    params, state, loss = step(params, state, batch)
    print("loss", float(loss), flush=True)
assert any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(params))

from tests.backends.jax.test_processes import delayed_losses, module_losses
for loss in delayed_losses():
    print("late", loss, flush=True)
for loss in module_losses():
    print("module", loss, flush=True)
"""


def delayed_losses():
    """The result of a step that merges two gradients and applies them one iteration late, on all devices."""
    plan, case = late_plan("mlp"), reduced("mlp")
    optimizer = optax.adam(1e-2, eps=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = plan.jax.train_step(optimizer, lowering="manual")
    params, batch = plan.jax.device_put(*case.model.init(0))
    state = plan.jax.init(optimizer, params)
    for _ in range(5):
        params, state, loss = step(params, state, batch)
        yield float(loss)


def module_losses():
    """The losses of a module with random streams, on all devices. It is placed, and then placed again."""
    model = Dropped(rngs())
    plan = pase.compile(squares, model, BATCH, devices=DEVICES, mesh="2x4")
    step = plan.jax.train_step(OPTIMIZER)
    model, batch = plan.jax.device_put(*plan.jax.device_put(model, BATCH))
    state = plan.jax.init(OPTIMIZER, model)
    for _ in range(2):
        model, state, loss = step(model, state, batch)
        yield float(loss)


def late_plan(model):
    """A data-parallel plan with a bucket plan that merges and delays."""
    return scheduled(reduced(model).plan("data_parallel"), 2, (Update(first=0, last=1, at=2),))


def _free_port():
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", 0))
        except OSError as e:
            pytest.skip(f"no port on localhost can be bound: {e}")
        return s.getsockname()[1]


def test_two_processes():
    address = f"127.0.0.1:{_free_port()}"
    env = os.environ | {"XLA_FLAGS": COMPILED_QUICKLY, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WORKER, address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    workers = [
        subprocess.Popen([*command, str(i)], cwd=ROOT, env=env, text=True, **pipes) for i in range(PROCESSES)
    ]
    try:
        said = [w.communicate(timeout=300) for w in workers]
    finally:
        for w in workers:
            w.kill()
    for w, (_, errors) in zip(workers, said, strict=True):
        assert w.returncode == 0, errors[-3000:]
    losses = [
        [float(line.split()[1]) for line in out.splitlines() if line.startswith("loss")] for out, _ in said
    ]
    assert losses[0] == losses[1]
    for name, here in (("late", delayed_losses), ("module", module_losses)):
        found = [[float(x.split()[1]) for x in out.splitlines() if x.startswith(name)] for out, _ in said]
        assert found[0] == found[1] == pytest.approx(list(here()), rel=1e-5)

    model = reduced("mlp").model
    params, batch = model.init(0)
    first = unsharded_step(model.loss_fn, optax.adam(1e-3), params, batch)
    second = jax.jit(model.loss_fn)(first.parameters, batch)
    assert losses[0] == pytest.approx([first.loss, float(second)], rel=1e-4)
