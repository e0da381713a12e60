"""Batch statistics under a plan: what a step hands to the next is named by carry=, in Flax linen and in dm-haiku.

.venv/bin/python examples/batch_stats.py [--library linen|haiku] [--steps 20]

The loss function takes the statistics as a batch argument and returns their next value beside the loss. ``carry``
says which argument and where in what is returned; the plan then lays both out alike, so that nothing moves between
steps. At the end the statistics are used, as in evaluation.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pase


def linen(x: Any) -> tuple[Any, Any, Any]:
    """(apply(params, stats, x, train) -> (logits, new stats), params, stats)."""
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            x = nn.Conv(16, (3, 3))(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            return nn.Dense(8)(nn.relu(x).mean((1, 2)))

    net = Net()
    made = net.init(jax.random.key(0), x, train=True)

    def apply(params, stats, x, train):
        variables = {"params": params, "batch_stats": stats}
        if not train:
            return net.apply(variables, x, train=False), stats
        logits, new = net.apply(variables, x, train=True, mutable=["batch_stats"])
        return logits, new["batch_stats"]

    return apply, made["params"], made["batch_stats"]


def haiku(x: Any) -> tuple[Any, Any, Any]:
    """(apply(params, stats, x, train) -> (logits, new stats), params, stats)."""
    import haiku as hk

    def net(x, train):
        x = hk.Conv2D(16, 3)(x)
        x = hk.BatchNorm(True, True, 0.9)(x, is_training=train)
        return hk.Linear(8)(jax.nn.relu(x).mean((1, 2)))

    f = hk.without_apply_rng(hk.transform_with_state(net))
    return f.apply, *f.init(jax.random.key(0), x, True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=["linen", "haiku"], default="linen")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(2.0, 3.0, size=(64, 8, 8, 3)), jnp.float32)
    labels = jnp.asarray(rng.integers(8, size=64), jnp.int32)
    apply, params, stats = {"linen": linen, "haiku": haiku}[given.library](x)

    def loss_fn(params, batch, stats):
        logits, stats = apply(params, stats, batch["x"], True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), stats

    batch = {"x": x, "y": labels}
    plan = pase.compile(
        loss_fn, params, batch, stats, devices=len(jax.devices()), machine="1080tix8", mesh="8", carry={1: 1}
    )
    optimizer = optax.adam(1e-2)
    step = plan.jax.train_step(optimizer)
    params, batch, stats = plan.jax.device_put(params, batch, stats)
    opt_state = plan.jax.init(optimizer, params)
    for i in range(given.steps):
        params, opt_state, (loss, stats) = step(params, opt_state, batch, stats)
        if i % 5 == 0 or i == given.steps - 1:
            print(f"step {i:3}  loss {float(loss):.4f}")
    trained, _ = apply(params, stats, x, True)
    evaluated, _ = apply(params, stats, x, False)
    print(f"logits by the statistics kept are off by {float(jnp.abs(trained - evaluated).max()):.3f}")


if __name__ == "__main__":
    main()
