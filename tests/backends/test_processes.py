"""Two processes of four host devices each do the step that one device does."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import optax
import pytest

from bench.cases.plans import DEVICES, reduced
from pase.backends.truth import unsharded_step

ROOT = Path(__file__).parents[2]
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

case = reduced("gpt2")
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
"""


def _free_port():
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", 0))
        except OSError as e:
            pytest.skip(f"no port on localhost can be bound: {e}")
        return s.getsockname()[1]


def test_two_processes():
    address = f"127.0.0.1:{_free_port()}"
    env = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONPATH": str(ROOT)}
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

    model = reduced("gpt2").model
    params, batch = model.init(0)
    first = unsharded_step(model.loss_fn, optax.adam(1e-3), params, batch)
    second = jax.jit(model.loss_fn)(first.parameters, batch)
    assert losses[0] == pytest.approx([first.loss, float(second)], rel=1e-4)
