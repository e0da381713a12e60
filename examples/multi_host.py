"""Train a plan on several hosts, save it, and go on with another number of devices.

Try it here, with four processes of two devices each, and then go on with two processes of one device:

python examples/multi_host.py --local 4 --devices-each 2 --steps 6 --save /tmp/run
python examples/multi_host.py --local 2 --devices-each 1 --steps 4 --resume /tmp/run

On a cluster, start it once per host, without --local (docs/how-to/clusters.md). Under SLURM, Open MPI, Kubernetes and
Cloud TPU it finds the other hosts by itself, under torchrun by RANK, WORLD_SIZE and MASTER_ADDR, and elsewhere by
--coordinator HOST:PORT --processes N --process I.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import pase

BATCH, WIDTH, LAYERS = 64, 128, 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save", type=Path, help="a folder that all hosts see, which does not exist yet")
    parser.add_argument("--resume", type=Path, help="a folder that --save wrote, with any number of devices")
    parser.add_argument(
        "--local", type=int, help="start this many processes here, instead of being one of them"
    )
    parser.add_argument(
        "--devices-each", type=int, help="CPU devices of each process, to try it without GPUs"
    )
    parser.add_argument("--coordinator", help="HOST:PORT of process 0")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    return parser.parse_args()


def connect(given: argparse.Namespace) -> None:
    """Connect this process with the others. Afterwards jax.devices() are the devices of all hosts."""
    if given.devices_each:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.devices_each)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if given.coordinator:
        jax.distributed.initialize(given.coordinator, given.processes, given.process)
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun; its own port is taken
        port = int(os.environ["MASTER_PORT"]) + 1
        jax.distributed.initialize(
            f"{os.environ['MASTER_ADDR']}:{port}",
            int(os.environ["WORLD_SIZE"]),
            int(os.environ["RANK"]),
            local_device_ids=int(os.environ["LOCAL_RANK"]) if not given.devices_each else None,
        )
    else:
        jax.distributed.initialize()  # SLURM, Open MPI, Kubernetes and Cloud TPU say who and where the hosts are


def loss_fn(params, batch):
    x = batch["x"]
    for layer in params:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x - batch["y"]) ** 2)


def init(key):
    keys = jax.random.split(key, 2 * LAYERS)
    made = [0.1 * jax.random.normal(k, (WIDTH, WIDTH)) for k in keys]
    return [{"up": up, "down": down} for up, down in zip(made[::2], made[1::2], strict=True)]


def rows(step: int, first: int, last: int) -> dict[str, np.ndarray]:
    """Rows of a step's batch, from the first to the one before the last: each host makes or reads only its own."""
    x = np.random.default_rng(step).normal(size=(BATCH, WIDTH)).astype(np.float32)
    return {"x": x[first:last], "y": np.roll(x, 1, axis=1)[first:last]}


def compiled(devices: int) -> pase.Plan:
    """The plan, which is the same in every process: the search does not depend on the clock.

    For a large model, compile once, save layout.json, and use pase.load("layout.json").bind(loss_fn, params, batch).
    """
    batch = {k: jax.ShapeDtypeStruct((BATCH, WIDTH), "float32") for k in "xy"}
    fsdp = {"batch": ("data", None), "*.up": ("data", None), "*.down": ("data", None)}
    shapes, mesh = jax.eval_shape(init, jax.random.key(0)), f"data={devices}"
    return pase.compile(
        loss_fn,
        shapes,
        batch,
        devices=devices,
        machine="h100x8",
        mesh=mesh,
        constraints=fsdp,
        baselines=False,
    )


def train(given: argparse.Namespace) -> None:
    plan, main = compiled(len(jax.devices())), jax.process_index() == 0
    if main:
        print(f"{jax.process_count()} processes, {len(jax.devices())} devices, mesh {plan.mesh.by_name}")
    optimizer = optax.adam(1e-2)
    step = plan.jax.train_step(optimizer)
    params_at, batch_at = plan.jax.in_shardings()
    state_at = plan.jax.state_shardings(optimizer)
    start = 0
    if given.resume:
        # Each device reads its part, whatever parts the devices of the earlier run wrote.
        shapes = jax.eval_shape(init, jax.random.key(0))
        state_shapes = jax.eval_shape(optimizer.init, shapes)
        wanted = {"params": placed(shapes, params_at), "state": placed(state_shapes, state_at), "step": 0}
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(given.resume.absolute(), wanted)
        params, state, start = found["params"], found["state"], int(found["step"])
    else:
        params = jax.jit(init, out_shardings=params_at)(jax.random.key(0))  # made where it is stored
        state = jax.jit(optimizer.init, out_shardings=state_at)(params)

    first, last = rows_here(batch_at["x"], BATCH)
    for i in range(start, start + given.steps):
        own = rows(i, first, last)
        batch = {
            k: jax.make_array_from_process_local_data(batch_at[k], x, (BATCH, WIDTH)) for k, x in own.items()
        }
        params, state, loss = step(params, state, batch)
        if main:
            print(f"step {i} loss {float(loss):.6f}", flush=True)
    if given.save:
        run = {"params": params, "state": state, "step": start + given.steps}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(given.save.absolute(), run)
        if main:
            print(f"saved {given.save}")


def placed(shapes, shardings):
    """Shapes with shardings, as orbax reads arrays."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def rows_here(sharding, size: int) -> tuple[int, int]:
    """The rows of the batch that this process's devices hold, from the first to the one after the last."""
    held = sharding.addressable_devices_indices_map((size, WIDTH)).values()
    ends = [index[0].indices(size)[:2] for index in held]
    return min(a for a, _ in ends), max(b for _, b in ends)


def start_here(given: argparse.Namespace) -> None:
    """Start the processes here, as a cluster would on its hosts, and wait for them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{s.getsockname()[1]}"
    own = [
        a
        for flag in ("steps", "save", "resume", "devices_each")
        if (v := getattr(given, flag)) is not None
        for a in (f"--{flag.replace('_', '-')}", str(v))
    ]
    command = [sys.executable, __file__, *own, "--coordinator", coordinator, "--processes", str(given.local)]
    started = [subprocess.Popen([*command, "--process", str(i)]) for i in range(given.local)]
    try:
        codes = [p.wait() for p in started]
    finally:
        for p in started:
            p.kill()
    if any(codes):
        raise SystemExit(f"processes ended with {codes}")


if __name__ == "__main__":
    options = arguments()
    if options.local:
        start_here(options)
    else:
        connect(options)
        train(options)
