"""Your own step under a plan: own optimizer, own update, own jax.jit, on eight devices of this computer.

.venv/bin/python examples/own_step.py [--steps 20]

``plan.jax.value_and_grad()`` takes the place of ``jax.value_and_grad(loss_fn)``: the plan is inside of it. All the
rest of the step is yours; ``in_shardings`` and ``gradient_shardings`` say how its arguments and results are stored.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp

import pase


def loss_fn(params, batch):
    hidden = jax.nn.gelu(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps

    key = jax.random.key(0)
    params = {"up": jax.random.normal(key, (128, 512)) / 12, "down": jax.random.normal(key, (512, 128)) / 24}
    batch = {"x": jax.random.normal(key, (256, 128)), "y": jnp.ones((256, 128))}
    plan = pase.compile(loss_fn, params, batch, devices=len(jax.devices()), machine="1080tix8", mesh="2x4")
    graded = plan.jax.value_and_grad()

    def step(params, momentum, batch):
        """Heavy-ball descent, gradients clipped to a norm of one."""
        loss, grads = graded(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g / jnp.maximum(norm, 1.0), momentum, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, loss

    stored, arrives = plan.jax.in_shardings()
    kept = plan.jax.gradient_shardings()
    jitted = jax.jit(
        step, in_shardings=(stored, kept, arrives), out_shardings=(stored, kept, None), donate_argnums=(0, 1)
    )
    params, batch = plan.jax.device_put(params, batch)
    momentum = jax.tree.map(lambda p, s: jax.device_put(jnp.zeros_like(p), s), params, kept)
    for i in range(steps):
        params, momentum, loss = jitted(params, momentum, batch)
        if i % 5 == 0 or i == steps - 1:
            print(f"step {i:3}  loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
