"""Layouts of a step's results and of an optimizer's state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax.sharding import Mesh as JaxMesh
    from optax import GradientTransformation

    from pase.frontends.jax.frontend import TracedJax

__all__ = ["returned", "state_shardings"]


def returned(traced: TracedJax, arrive: tuple[Tree, ...], mesh: JaxMesh) -> Tree:
    """Shardings of what the function returns.

    The loss is replicated. Values for the next call have their input layouts. The others are None, which leaves the
    layout to XLA. arrive: the shardings of the function's arguments.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    leaves = jax.tree.leaves(arrive)
    flat: list[NamedSharding | None] = [None] * len(traced.jaxpr.out_avals)
    for i, j in traced.carried.items():
        flat[j] = leaves[i]
    if traced.mode == "train":
        flat[0] = NamedSharding(mesh, PartitionSpec())
    out = jax.tree.unflatten(traced.out_tree, flat)
    return out[0] if traced.mode == "train" and not traced.has_aux else out


def state_shardings(optimizer: GradientTransformation, params: Tree, gradients: Tree, mesh: JaxMesh) -> Tree:
    """Shardings of an optimizer's state. State that mirrors a parameter is stored like its gradient.

    params: the shapes of the trained leaves. gradients: the shardings of their gradients. Raises PaseError if the
    state has several arrays for a parameter.
    """
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    state = jax.eval_shape(optimizer.init, params)
    whole = NamedSharding(mesh, PartitionSpec())

    def masked(leaf: object) -> bool:
        return isinstance(leaf, optax.MaskedNode)  # optax puts it where a transformation does not apply

    def like(leaf: Tree, param: Tree, sharding: Tree) -> Tree:
        return leaf if masked(leaf) else sharding if leaf.shape == param.shape else whole

    try:
        return optax.tree_map_params(
            optimizer,
            like,
            state,
            params,
            gradients,
            transform_non_params=lambda _: whole,
            is_leaf=masked,
        )
    except ValueError as e:  # optax.sm3 has one array for each dim of a parameter
        raise PaseError(
            "its state has another structure than one array per parameter, so its layout is not known",
            where="the optimizer",
            fix="write the step yourself with plan.jax.value_and_grad(), and place the state as you want it",
        ) from e
