"""A jitted step under a plan that accepts what users pass: modules, and arrays in other layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.jax.contexts import untyped, without_mesh
from pase.frontends.jax.leaves import arrays
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import NamedSharding

__all__ = ["Stepper", "global_array", "shape_and_dtype"]


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """A jitted function that is called like the function it was made from.

    Arguments are moved to the layouts that it expects. Static leaves of modules are not passed to the program; they are
    put back into the results.
    """

    run: Callable[..., Tree]
    """The function on pytrees that hold only arrays."""
    in_shardings: tuple[Tree, ...]
    out_shardings: Tree
    donate: tuple[int, ...]
    whole: Callable[[Tree], Tree]
    """Puts the static leaves back into the results."""
    padded: Callable[[tuple[Tree, ...]], tuple[Tree, ...]] = tuple
    """Adds the plan's padding to the arguments."""

    @cached_property
    def jitted(self) -> Tree:
        """The result of jax.jit, for pytrees of arrays that are already in the expected layouts."""
        import jax

        return jax.jit(
            self.run,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=self.donate,
        )

    @without_mesh()
    def __call__(self, *args: Tree) -> Tree:
        import jax

        given = arrays(args)
        if len(given) != len(self.in_shardings):
            raise PaseError(
                f"the step takes {len(self.in_shardings)} arguments, but was called with {len(given)}",
                fix="call it with the arguments that the plan was compiled for",
            )
        for k, (x, s) in enumerate(zip(given, self.in_shardings, strict=True)):
            form: Tree = jax.tree.structure(x)
            if form != jax.tree.structure(s):
                raise PaseError(
                    f"it is {form}, but must be {jax.tree.structure(s)}",
                    where=f"argument {k} of the step",
                    fix="to make the optimizer's state, call plan.jax.init(optimizer, params)",
                )
        placed = jax.tree.map(_placed, self.padded(given), self.in_shardings)
        return self.whole(self.jitted(*placed))

    @without_mesh()
    def lower(self, *args: Tree) -> Tree:
        """Lower the step for arrays or shapes without running it. Call ``.compile()`` on the result to compile it."""
        import jax

        def struct(x: Tree, sharding: Tree) -> Tree:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return self.jitted.lower(*jax.tree.map(struct, arrays(args), self.in_shardings))


def _placed(x: Tree, sharding: Tree) -> Tree:
    """Move an array that is committed to another layout. jit itself handles all other values."""
    import jax

    x = untyped(x)
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return x
    return x if x.sharding.is_equivalent_to(sharding, x.ndim) else jax.device_put(x, sharding)


def global_array(leaf: Tree, sharding: NamedSharding) -> Array:
    """A copy of an array in the given layout. With several processes, each must pass the whole array."""
    import jax
    import numpy as np

    if jax.process_count() == 1:
        # The step donates its arguments, so none of them may share memory with the caller's arrays.
        mine = jax.numpy.array(leaf, copy=True) if isinstance(leaf, jax.Array) else leaf
        return jax.device_put(mine, sharding)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def shape_and_dtype(leaf: Tree) -> tuple[tuple[int, ...], object]:
    """The shape and dtype as JAX sees them: 64-bit numbers become 32-bit ones unless x64 is enabled."""
    import jax

    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)
    return jax.numpy.shape(leaf), jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
