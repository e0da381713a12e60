"""Train a small Flax model under a plan, on eight devices of this computer.

.venv/bin/python examples/train.py [--steps 20]

The devices are JAX host devices, so it runs anywhere; on real accelerators, leave the two environment lines out.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import pase


class Block(nnx.Module):
    """A pre-norm feed-forward block with dropout, whose random stream each step advances."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class Classifier(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(128, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(128, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps

    model = Classifier(rngs=nnx.Rngs(0))

    def loss_fn(model, batch):
        logits = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(128, 16))
    x = rng.normal(size=(512, 128)).astype(np.float32)
    batch = {"x": jnp.asarray(x), "y": jnp.asarray((x @ teacher).argmax(axis=1), dtype=jnp.int32)}

    plan = pase.compile(
        loss_fn, model, batch, devices=len(jax.devices()), machine="1080tix8", mesh="data=4,model=2"
    )
    print(plan)

    optimizer = optax.adamw(1e-3)
    step = plan.jax.train_step(optimizer)
    model, batch = plan.jax.device_put(model, batch)
    state = plan.jax.init(optimizer, model)
    for i in range(steps):
        model, state, loss = step(model, state, batch)
        if i % 5 == 0 or i == steps - 1:
            print(f"step {i:3}  loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
