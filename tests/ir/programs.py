"""Random small JAX programs: a loss built from a few ops over a pool of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

WIDTH, ROWS, SEQ = 8, 4, 6

STEPS = (
    "matmul",
    "matmul",
    "attend",
    "add",
    "mul",
    "tanh",
    "softmax",
    "norm",
    "transposed",
    "heads",
    "split",
    "concat",
    "shift",
    "gather",
    "cumsum",
    "sort",
    "pool",
    "scan",
    "remat",
    "jit",
    "argmax",
    "scale",
    "self",
    "mean",
    "outer",
)

programs = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=9
)


def build(steps: Sequence[tuple[str, int, int]]) -> tuple[Callable[..., Any], Any, Any]:
    """Returns (loss, params, batch) with shapes. Every value in the pool is [ROWS, SEQ, WIDTH]."""
    import jax
    import jax.numpy as jnp

    def loss(params: Any, x: Any) -> Any:
        pool = [x]
        for k, (step, i, j) in enumerate(steps):
            a, b, w = pool[i % len(pool)], pool[j % len(pool)], params[f"w{k}"]
            pool.append(_step(step, a, b, w, i))
        return sum(jnp.mean(v) for v in pool[1:]) + jnp.sum(params["bias"])

    shape = jax.ShapeDtypeStruct
    params = {f"w{k}": shape((WIDTH, WIDTH), jnp.float32) for k in range(len(steps))}
    params["bias"] = shape((WIDTH,), jnp.float32)
    return loss, params, shape((ROWS, SEQ, WIDTH), jnp.float32)


def _step(step: str, a: Any, b: Any, w: Any, i: int) -> Any:
    import jax
    import jax.numpy as jnp

    match step:
        case "matmul":
            return a @ w
        case "attend":
            return jax.nn.softmax(jnp.einsum("bsd,btd->bst", a, b)) @ a
        case "add":
            return a + b
        case "mul":
            return a * b
        case "tanh":
            return jnp.tanh(a)
        case "softmax":
            return jax.nn.softmax(a, axis=i % 3)
        case "norm":
            return (a - a.mean(-1, keepdims=True)) * jax.lax.rsqrt(a.var(-1, keepdims=True) + 1e-6)
        case "transposed":  # x + xᵀ over two dims cannot be one walk
            square = jnp.einsum("bsd,btd->bst", a, b)
            return (square + square.swapaxes(1, 2)) @ a
        case "heads":
            q = a.reshape(ROWS, SEQ, 2, WIDTH // 2).transpose(0, 2, 1, 3)
            return jnp.tanh(q).transpose(0, 2, 1, 3).reshape(a.shape)
        case "split":
            left, right = jnp.split(a, 2, axis=-1)
            return jnp.concatenate([right, left * 2], axis=-1) @ w
        case "concat":
            return jnp.concatenate([a, b], axis=1)[:, 1 : SEQ + 1]
        case "shift":
            return jnp.pad(a, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        case "gather":
            return jnp.take(a, jnp.argmax(b[:, :, 0], axis=1) % SEQ, axis=1)[:, :1] + a
        case "cumsum":
            return jnp.cumsum(a, axis=i % 3)
        case "sort":
            return jnp.sort(a, axis=1)
        case "pool":
            return jax.lax.reduce_window(a, -jnp.inf, jax.lax.max, (1, 3, 1), (1, 1, 1), "SAME")
        case "scan":
            return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) + a, None), b, None, length=3)[0]
        case "remat":
            return jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w)(a)
        case "jit":
            return jax.jit(lambda x, y: jnp.sin(x) @ w + y)(a, b)
        case "argmax":
            return a * jax.nn.one_hot(jnp.argmax(b, -1), WIDTH)
        case "scale":
            return a * w[0] + w[:, 0]
        case "self":
            return a * a + a
        case "mean":
            return a - b.mean((0, 1))
        case "outer":
            return jnp.einsum("bsd,de,bse->bsd", a, w, b)
    raise AssertionError(step)
