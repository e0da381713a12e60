"""Plain JAX programs: control flow, collectives under vmap, callbacks, sparse arrays, custom derivatives."""

from __future__ import annotations

from typing import Any

from bench.programs.catalog import LibraryProgram, normal, program


def _weights() -> Any:
    return {k: normal(32, 32, seed=i, scale=0.2) for i, k in enumerate("abc")}


@program
def branch() -> LibraryProgram:
    import jax
    import jax.numpy as jnp

    def loss(p: Any, x: Any) -> Any:
        h = jax.lax.cond(jnp.sum(x) > 0, lambda h: jnp.tanh(h @ p["a"]) @ p["b"], lambda h: h @ p["c"], x)
        return jnp.mean(h**2)

    return loss, _weights(), normal(64, 32)


@program
def switch_in_scan() -> LibraryProgram:
    import jax
    import jax.numpy as jnp

    def loss(p: Any, x: Any) -> Any:
        made = [lambda h: h @ p["a"], lambda h: jnp.sin(h), lambda h: jnp.tanh(h @ p["b"]) @ p["c"]]
        h, _ = jax.lax.scan(lambda h, i: (jax.lax.switch(i % 3, made, h), None), x, jnp.arange(5))
        return jnp.mean(h**2)

    return loss, _weights(), normal(64, 32)


@program
def newton_while() -> LibraryProgram:
    import jax
    import jax.numpy as jnp

    def loss(p: Any, x: Any) -> Any:
        a = jax.lax.stop_gradient(p["a"])
        _, h = jax.lax.while_loop(
            lambda c: (c[0] < 20) & (jnp.max(jnp.abs(c[1])) > 0.1),
            lambda c: (c[0] + 1, jnp.tanh(c[1] @ a)),
            (0, x),
        )
        return jnp.mean((h @ p["b"]) ** 2)

    return loss, _weights(), normal(64, 32)


@program
def batch_statistics_under_vmap() -> LibraryProgram:
    import jax
    import jax.numpy as jnp

    def loss(p: Any, x: Any) -> Any:
        def one(x: Any) -> Any:
            h = x @ p["a"]
            mean = jax.lax.pmean(h, "batch")
            spread = jax.lax.pmean((h - mean) ** 2, "batch")
            top = jax.lax.pmax(jax.lax.stop_gradient(jnp.sum(h)), "batch")
            return (h - mean) / jnp.sqrt(spread + 1e-5) + jax.lax.axis_index("batch") + top

        return jnp.mean(jax.vmap(one, axis_name="batch")(x) ** 2)

    return loss, _weights(), normal(64, 32)


@program
def straight_through() -> LibraryProgram:
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def rounded(x: Any) -> Any:
        return jnp.round(x * 8).astype(jnp.int8)

    rounded.defvjp(lambda x: (rounded(x), x.shape), lambda shape, g: (jnp.zeros(shape),))

    def loss(p: Any, x: Any) -> Any:
        whole = jax.lax.stop_gradient(rounded(p["a"]).astype(jnp.float32) / 8 - p["a"]) + p["a"]
        return jnp.mean((x @ whole) ** 2)

    return loss, _weights(), normal(64, 32)


@program
def own_gradient() -> LibraryProgram:
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    def backward(kept: Any, g: Any) -> Any:
        x, w = kept
        return jnp.clip(g, -1, 1) @ w.T, (x.T @ jnp.tanh(g)) @ (w.T @ w)

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    return (
        lambda p, x: jnp.mean(product(jnp.tanh(product(x, p["a"])), p["b"]) ** 2),
        _weights(),
        normal(64, 32),
    )


@program
def callback() -> LibraryProgram:
    import jax
    import jax.numpy as jnp
    import numpy as np

    def loss(p: Any, x: Any) -> Any:
        y = jax.pure_callback(lambda x: np.sort(x, -1), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jnp.mean((y @ p["a"]) ** 2)

    return loss, _weights(), normal(64, 32)


@program
def sparse_matrix() -> LibraryProgram:
    import jax.numpy as jnp
    from jax.experimental import sparse

    dense = jnp.where(normal(48, 32, seed=9) > 1.0, 1.0, 0.0)
    matrix = sparse.BCOO.fromdense(dense)
    return lambda p, m, x: jnp.mean((m @ (p["a"] @ x)) ** 2), _weights(), matrix, normal(32, 64)


@program
def shard_map_inside() -> LibraryProgram:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(p: Any, x: Any) -> Any:
        body = jax.shard_map(
            lambda h: h / jnp.sqrt(jax.lax.pmean(jnp.mean(h**2), "rows") + 1.0),
            mesh=mesh,
            in_specs=P("rows"),
            out_specs=P("rows"),
        )
        return jnp.mean(jnp.square(body(x @ p["a"]) @ p["b"]))

    return loss, _weights(), normal(64, 32)


@program
def integer_leaves() -> LibraryProgram:
    import jax
    import jax.numpy as jnp

    params = {"w": normal(32, 32, scale=0.2), "step": jnp.int32(3), "key": jax.random.key(7)}

    def loss(p: Any, x: Any) -> Any:
        noise = jax.random.normal(p["key"], x.shape)
        return jnp.mean(((x + noise) @ p["w"]) ** 2) / (1 + p["step"])

    return loss, params, normal(64, 32)
