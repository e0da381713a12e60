"""Ops for which XLA has special code, with their dims split.

    python -m bench.fuzz.xla_ops                          # all; rows in the result file are kept
    python -m bench.fuzz.xla_ops --ops sort,qr --seeds 9  # these, under nine random strategies

The ops are sorts, calls of LAPACK, convolutions, windows, gathers and others. Each op stands between a product and a
loss, so that every dim may be split before and after it. A step under a random strategy is compiled and run on four
host devices and compared with the unsharded step, in the manual lowering (with XLA where that is not possible) and
annotated. A failed check inside XLA ends the process, so steps run in a child process. Writes
bench/results/xla_ops.json.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.processes import forks_of, rows_apart
from bench.runner import ROOT, Benchmark, option

if TYPE_CHECKING:
    from pase.backends.jax.spmd.lower import Lowering

CPU_S = 300
MESHES = ("2x2", "4")


def _positive(x: Any) -> Any:
    """Returns a positive definite matrix for each example."""
    import jax.numpy as jnp

    return x @ jnp.swapaxes(x, -1, -2) / x.shape[-1] + jnp.eye(x.shape[1])


def operations() -> dict[str, Callable[[Any], Any]]:
    """Returns ops with special code in XLA (custom calls, sharding rules), on [batch, n, n]."""
    return _sorts() | _linear_algebra() | _windows() | _indexed() | _others()


def _sorts() -> dict[str, Callable[[Any], Any]]:
    import jax.numpy as jnp
    from jax import lax

    def several(x: Any) -> Any:
        return lax.sort((x, x * 2, jnp.sin(x)), dimension=1, num_keys=2)[2]

    return {
        "sort": lambda x: lax.sort(x, dimension=1),
        "sort several": several,
        "argsort": lambda x: x * jnp.argsort(x, 2),
        "top_k": lambda x: lax.top_k(x, 3)[0],
        "approx_top_k": lambda x: lax.approx_max_k(x, 3)[0],
        "approx_top_k rows": lambda x: lax.approx_max_k(x, 3, reduction_dimension=1)[0],
        "argmax": lambda x: x * jnp.argmax(x, 1, keepdims=True),
    }


def _linear_algebra() -> dict[str, Callable[[Any], Any]]:
    import jax
    import jax.numpy as jnp
    from jax import lax

    linalg, spd = jnp.linalg, _positive
    eigenvalues = linalg.eigvalsh

    def norm(x: Any) -> Any:
        return linalg.norm(x, axis=(1, 2), keepdims=True)

    return {
        "cholesky": lambda x: linalg.cholesky(spd(x)),
        "qr": lambda x: linalg.qr(x + 3 * jnp.eye(8))[1],
        "svd": lambda x: linalg.svd(x, compute_uv=False),
        "svd vectors": lambda x: linalg.svd(x + jnp.diag(jnp.arange(8.0)), full_matrices=False)[0],
        "eigh": lambda x: eigenvalues(spd(x)),
        "eig": lambda x: jnp.abs(lax.stop_gradient(linalg.eigvals(x))) + x.sum(2),
        "lu": lambda x: jax.scipy.linalg.lu_factor(x + 3 * jnp.eye(8))[0],
        "solve": lambda x: linalg.solve(spd(x), x),
        "triangular_solve": lambda x: jax.scipy.linalg.solve_triangular(spd(x), x),
        "inv": lambda x: linalg.inv(spd(x)),
        "det": lambda x: linalg.slogdet(spd(x))[1],
        "expm": lambda x: jax.vmap(jax.scipy.linalg.expm)(x / 8),
        "schur": lambda x: (
            x * norm(jax.vmap(lambda a: lax.linalg.schur(lax.stop_gradient(a))[0])(x))
        ),  # not unique
        "hessenberg": lambda x: lax.linalg.hessenberg(lax.stop_gradient(x))[0] + x,
        "tridiagonal": lambda x: lax.linalg.tridiagonal_solve(
            x[..., 0] * 0.1, x[..., 1] * 0 + 4, x[..., 2] * 0.1, x
        ),
    }


def _windows() -> dict[str, Callable[[Any], Any]]:
    import jax.numpy as jnp
    from jax import lax

    window = {"window_dimensions": (1, 2, 2), "window_strides": (1, 2, 2), "padding": "SAME"}

    def conv(x: Any, **how: Any) -> Any:
        kernel = jnp.ones((3, 8 // how.get("feature_group_count", 1), 8))
        return lax.conv_general_dilated(
            x, kernel, (1,), [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC"), **how
        )

    return {
        "conv": conv,
        "conv groups": lambda x: conv(x, feature_group_count=4),
        "conv batch groups": lambda x: conv(x, batch_group_count=4),
        "conv dilated": lambda x: conv(x, rhs_dilation=(2,)),
        "conv widened": lambda x: conv(x, lhs_dilation=(2,)),
        "reduce_window": lambda x: lax.reduce_window(x, 0.0, lax.add, **window),
        "max pooling": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, **window),
        "window dilated": lambda x: (
            x
            + lax.reduce_window(
                lax.stop_gradient(x),
                -jnp.inf,
                lax.max,
                (1, 2, 2),
                (1, 1, 1),
                "SAME",
                window_dilation=(1, 2, 2),
            )
        ),
    }


def _indexed() -> dict[str, Callable[[Any], Any]]:
    import jax
    import jax.numpy as jnp
    from jax import lax

    order = jnp.array([3, 1, 0, 2, 5, 4, 7, 6])
    return {
        "reduce_precision": lambda x: lax.reduce_precision(x, 5, 10),
        "gather": lambda x: x[:, order],
        "gather windows": lambda x: jax.vmap(lambda i: lax.dynamic_slice_in_dim(x, i, 3, 1))(order[:4]),
        "gather both": lambda x: x[:, order, order[::-1]],
        "scatter": lambda x: jnp.zeros_like(x).at[:, order].set(x),
        "scatter add": lambda x: jnp.zeros((8, 4, 8)).at[:, order % 4].add(x),
        "scatter max": lambda x: jnp.zeros((8, 4, 8)).at[:, order % 4].max(x),
        "scatter windows": lambda x: jnp.zeros((8, 12, 8)).at[:, 2:10].multiply(x + 1),
    }


def _others() -> dict[str, Callable[[Any], Any]]:
    import jax
    import jax.numpy as jnp
    from jax import lax

    def random_bits(x: Any) -> Any:
        _, bits = lax.rng_bit_generator(jnp.arange(4, dtype=jnp.uint32), x.shape, jnp.uint32)
        return x * (bits % 7)

    return {
        "cumsum": lambda x: lax.cumsum(x, 1),
        "cumprod": lambda x: lax.cumprod(x, 2, reverse=True),
        "cummax": lambda x: lax.cummax(x, 1),
        "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1),
        "associative_scan": lambda x: lax.associative_scan(jnp.multiply, x, axis=1),
        "complex": lambda x: jnp.abs(lax.complex(x, x + 1) ** 2 @ lax.complex(x, -x)),
        "fft": lambda x: jnp.abs(jnp.fft.fft2(x)),
        "rfft": lambda x: jnp.abs(jnp.fft.rfft(x, axis=1)),
        "clamp": lambda x: lax.clamp(-0.5, x, 0.5),
        "dynamic_slice": lambda x: lax.dynamic_slice(x, (0, jnp.argmax(x[0, :, 0]) % 3, 0), (8, 4, 8)),
        "dynamic_update": lambda x: lax.dynamic_update_slice(
            x, x[:, :3] * 2, (0, jnp.argmax(x[0, 0]) % 3, 0)
        ),
        "rng_bit_generator": random_bits,
        "random": lambda x: x * jax.random.gamma(jax.random.key(0), 2.0, x.shape),
        "permutation": lambda x: jax.random.permutation(jax.random.key(0), x, axis=1),
        "bitcast": lambda x: x + lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) % 3,
        "pad inside": lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 1), (0, -1, 2))),
        "reverse": lambda x: lax.rev(x, (1, 2)),
        "searchsorted": lambda x: x * jnp.searchsorted(jnp.sort(x[0, 0]), x),
        "histogram": lambda x: x * jnp.bincount(jnp.argmax(x, 2).ravel(), length=8),
        "unique": lambda x: x + jnp.unique(x[0, 0], size=8),
        "median": lambda x: jnp.median(x, 1),
        "quantile": lambda x: jnp.quantile(x, 0.3, axis=(1, 2)),
        "interpolate": lambda x: jax.image.resize(x, (8, 12, 4), "bicubic"),
        "map_coordinates": lambda x: jax.vmap(
            lambda a: jax.scipy.ndimage.map_coordinates(a, [jnp.arange(4.0) + 0.3] * 2, 1)
        )(x),
        "ragged_dot": lambda x: lax.ragged_dot(
            x.reshape(64, 8), jnp.ones((4, 8, 8)), jnp.array([10, 20, 30, 4])
        ),
    }


def ended(op: str, strategy: str, lowering: Lowering) -> dict[str, Any]:
    """Returns how a step with one op under one strategy ends."""
    import jax
    import jax.numpy as jnp

    from bench.cases.plans import case_of
    from pase.backends.jax.one_program import OneProgramPlan
    from pase.errors import PaseError

    apply = operations()[op]
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=(8, 8)) / 3 for k in ("in", "row")}
    batch = rng.normal(size=(8, 8, 8))

    def loss(p: Any, x: Any) -> Any:
        y = apply(jnp.einsum("bij,jk,li->blk", x, p["in"], p["row"]))
        return jnp.mean(y * jnp.cos(jnp.arange(float(y.size)).reshape(y.shape)))

    try:
        plan = case_of(loss, params, batch, devices=4).plan(strategy)
        assert plan is not None and isinstance(plan.jax, OneProgramPlan)
        value, grads = plan.jax.value_and_grad(lowering=lowering)(params, batch)
    except PaseError as e:
        return {"end": "refused", "message": str(e)[:300]}
    except Exception as e:  # this bench looks for any exception
        return {"end": type(e).__name__, "message": str(e).replace(f"{ROOT}/", "")[:300]}
    right, slopes = jax.jit(jax.value_and_grad(loss))(params, batch)
    off = {k: float(jnp.max(jnp.abs(grads[k] - slopes[k])) / jnp.max(jnp.abs(slopes[k]))) for k in params}
    off["loss"] = float(abs(value - right) / max(abs(right), 1e-3))
    if max(off.values()) > 1e-7:
        return {"end": "wrong", "message": str({k: f"{v:.1e}" for k, v in off.items()})}
    return {"end": "agrees"}


def cases(given: Namespace) -> dict[str, list[str]]:
    """Returns (op, strategy, lowering) of each case."""
    found = [
        [op, f"random{seed}@{MESHES[seed % 2]}", lowering]
        for seed in range(given.seeds)
        for op in (given.ops.split(",") if given.ops else operations())
        for lowering in ("auto", "annotated")
    ]
    return {" ".join(case): case for case in found}


def rows(chosen: dict[str, list[str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields how each case ended, in child processes."""
    found = rows_apart(
        forks_of(["bench.cases.plans"]), ended, [tuple(c) for c in chosen.values()], cpu_s=CPU_S
    )
    for case, row in found:
        yield " ".join(case), row


def ends(found: dict[str, Any]) -> dict[str, Any]:
    """Returns how many cases ended how."""
    counts = Counter(row["end"] for row in found.values())
    return {"of": len(found), "ends": dict(counts.most_common())}


BENCH = Benchmark(
    "xla_ops",
    cases,
    stream=rows,
    at="cases",
    head=ends,
    line=lambda name, row: f"{name}: {row['end']} {row.get('message', '')}",
    options=[
        option("--ops", help="comma-separated; default: all"),
        option("--seeds", type=int, default=4, help="random strategies of each"),
    ],
    environment={
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
    },
    resumes=True,
)


if __name__ == "__main__":
    BENCH.run()
