"""Reads the parameters of a checkpoint into a plan's layouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pase.errors import PaseError, install_line
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import ShapeDtypeStruct
    from jax.sharding import NamedSharding

__all__ = ["restored"]


def restored(
    path: str | Path, shapes: Tree, shardings: Tree, model: str, written: str = "the same parameters"
) -> Tree:
    """The arrays of an orbax checkpoint (of ``StandardCheckpointer``). Each device reads its part.

    shapes, shardings: trees of the checkpoint's structure. model, written: the model's name, and what the checkpoint
    should hold, for messages. Raises PaseError if the checkpoint is missing or has other arrays.
    """
    import jax

    try:
        import orbax.checkpoint as ocp
    except ModuleNotFoundError as e:
        raise PaseError(
            "reading orbax checkpoints needs the package orbax-checkpoint",
            where="plan.jax.restore",
            fix=install_line("checkpoints"),
        ) from e

    def wanted(shape: ShapeDtypeStruct, sharding: NamedSharding) -> ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    target = jax.tree.map(wanted, shapes, shardings)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path, target)
    except (OSError, ValueError, KeyError) as e:
        raise PaseError(
            f"cannot restore '{model}' from this checkpoint ({e})",
            where=str(path),
            fix=f"give a checkpoint that orbax's StandardCheckpointer wrote for {written}",
        ) from e
