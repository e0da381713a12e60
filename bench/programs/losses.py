"""Every loss of optax on the output of a linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.programs.catalog import PROGRAMS, LibraryProgram, integers, normal, program


def _simple(name: str, targets: Callable[[], Any]) -> None:
    def make() -> LibraryProgram:
        import jax.numpy as jnp
        import optax

        fn = getattr(optax.losses, name)
        return lambda p, x, y: jnp.mean(fn(x @ p, y)), normal(24, 16, scale=0.2), normal(32, 24), targets()

    PROGRAMS[f"losses.{name}"] = make


def _distribution() -> Any:
    import jax

    return jax.nn.softmax(normal(32, 16, seed=1))


def _binary() -> Any:
    return integers(2, 32, 16).astype("float32")


for _name in ("squared_error", "l2_loss", "huber_loss", "log_cosh", "cosine_distance", "cosine_similarity"):
    _simple(_name, lambda: normal(32, 16, seed=1))
for _name in ("sigmoid_binary_cross_entropy", "sigmoid_focal_loss", "poly_loss_cross_entropy"):
    _simple(_name, _binary)
for _name in ("softmax_cross_entropy", "safe_softmax_cross_entropy", "sparsemax_loss", "kl_divergence"):
    _simple(_name, _distribution if _name != "sparsemax_loss" else _binary)
for _name in (
    "softmax_cross_entropy_with_integer_labels",
    "multiclass_hinge_loss",
    "multiclass_perceptron_loss",
):
    _simple(_name, lambda: integers(16, 32))
for _name in ("ranking_softmax_loss",):
    _simple(_name, _binary)


@program
def ntxent() -> LibraryProgram:
    import optax

    return lambda p, x, y: optax.losses.ntxent(x @ p, y), normal(24, 16), normal(64, 24), integers(8, 64)


@program
def ctc() -> LibraryProgram:
    import jax.numpy as jnp
    import optax

    def loss(p: Any, x: Any, labels: Any) -> Any:
        zeros = jnp.zeros
        return optax.losses.ctc_loss(x @ p, zeros(x.shape[:2]), labels, zeros(labels.shape)).mean()

    return loss, normal(24, 16, scale=0.2), normal(8, 12, 24), 1 + integers(15, 8, 4)


@program
def triplet() -> LibraryProgram:
    import optax

    def loss(p: Any, a: Any, b: Any, c: Any) -> Any:
        return optax.losses.triplet_margin_loss(a @ p, b @ p, c @ p).mean()

    return loss, normal(24, 16, scale=0.2), normal(32, 24), normal(32, 24, seed=1), normal(32, 24, seed=2)
