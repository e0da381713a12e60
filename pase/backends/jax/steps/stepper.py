"""A jitted step under a plan that accepts what users pass: modules, and arrays in other layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.jax.contexts import untyped, without_mesh
from pase.frontends.jax.leaves import arrays, combine
from pase.frontends.jax.structure import check_structure
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import NamedSharding

__all__ = ["Stepper", "global_array", "host_arrays", "shape_and_dtype", "with_static"]


@dataclass(frozen=True, kw_only=True)
class _Form:
    """The form of arguments, and what is done to such arguments: which leaves are left out, and which are moved."""

    tree: Tree
    types: list[type]
    layouts: list[object]
    taken: list[bool]
    """Which leaves are passed to the program. The others are static."""
    moved: list[tuple[int, NamedSharding]]
    """The leaves among these that arrive in another layout than the program expects, and that layout."""
    passed: Tree
    """The tree structure of what is passed."""


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """A jitted function that is called like the function it was made from.

    Arguments are moved to the layouts that it expects. Static leaves of modules are not passed to the program; they are
    put back into the results.

    A training loop calls it with arguments of one form again and again, such as parameters where the last step left
    them and a batch that is on one device. This form is remembered, because it takes the host longer to check every
    leaf than to start the program.
    """

    run: Callable[..., Tree]
    """The function on pytrees that hold only arrays."""
    in_shardings: tuple[Tree, ...]
    out_shardings: Tree
    donate: tuple[int, ...]
    whole: Callable[[Tree], Tree]
    """Puts the static leaves back into the results."""
    padded: Callable[[tuple[Tree, ...]], tuple[Tree, ...]] = tuple
    """Adds the plan's padding to the arguments. ``tuple`` if it has none."""
    _last: list[_Form] = field(default_factory=list, init=False, repr=False, compare=False)
    """The form of the last arguments, if there were any. Padded and traced arguments are looked at in each call."""

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

        leaves, tree = jax.tree.flatten(args)
        types = list(map(type, leaves))
        for form in self._last:
            if tree == form.tree and types == form.types and _layouts(leaves) == form.layouts:
                if form.moved or not all(form.taken):
                    left = list(compress(leaves, form.taken))
                    for k, sharding in form.moved:
                        left[k] = _placed(left[k], sharding)
                    args = jax.tree.unflatten(form.passed, left)
                return self.whole(self.jitted(*args))
        placed = self._placed(args)
        if self.padded is tuple and not any(isinstance(x, jax.core.Tracer) for x in leaves):
            given = jax.tree.leaves(arrays(args))
            passed, passed_tree = jax.tree.flatten(placed)
            expected = jax.tree.leaves(self.in_shardings)
            taken = _positions(given, leaves)
            if taken is not None:
                moved = [
                    (k, to)
                    for k, (x, y, to) in enumerate(zip(given, passed, expected, strict=True))
                    if x is not y
                ]
                layouts = _layouts(leaves)
                self._last[:] = [
                    _Form(
                        tree=tree, types=types, layouts=layouts, taken=taken, moved=moved, passed=passed_tree
                    )
                ]
        return self.whole(self.jitted(*placed))

    def _placed(self, args: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """The arguments of the program, in the layouts that it expects."""
        import jax

        given = arrays(args)
        if len(given) != len(self.in_shardings):
            raise PaseError(
                f"the step takes {len(self.in_shardings)} arguments, but was called with {len(given)}",
                fix="call it with the arguments that the plan was compiled for",
            )
        for k, (x, s) in enumerate(zip(given, self.in_shardings, strict=True)):
            check_structure(
                jax.tree.structure(x),
                jax.tree.structure(s),
                where=f"argument {k} of the step",
                fix="to make the optimizer's state, call plan.jax.init(optimizer, params)"
                if k == 1
                else "pass what the plan was compiled for, or compile again",
            )
        return tuple(jax.tree.map(_placed, self.padded(given), self.in_shardings))

    @without_mesh()
    def lower(self, *args: Tree) -> Tree:
        """Lower the step for arrays or shapes without running it. Call ``.compile()`` on the result to compile it."""
        import jax

        def struct(x: Tree, sharding: Tree) -> Tree:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return self.jitted.lower(*jax.tree.map(struct, arrays(args), self.in_shardings))


def with_static(kept: Tree) -> Callable[[Tree], Tree]:
    """Returns a function that puts the static leaves ``kept`` back into a tree of this structure."""
    import jax

    return (lambda out: combine(out, kept)) if jax.tree.leaves(kept) else (lambda out: out)


def _layouts(leaves: Sequence[Tree]) -> list[object]:
    """What besides its type decides whether a leaf must be moved or left out: the sharding of JAX's arrays, and the
    dtype of NumPy's."""
    return [getattr(x, "sharding", None) or getattr(x, "dtype", None) for x in leaves]


def _positions(passed: Sequence[object], leaves: Sequence[object]) -> list[bool] | None:
    """For each leaf, whether it is among ``passed``, which has the same order. None if ``passed`` has anything else.

    >>> a, b, c = object(), object(), object()
    >>> _positions([a, c], [a, b, c]), _positions([a, object()], [a, b, c])
    ([True, False, True], None)
    """
    rest = list(reversed(passed))
    taken = [bool(rest) and rest[-1] is x and rest.pop() is x for x in leaves]
    return None if rest else taken


def _placed(x: Tree, sharding: Tree) -> Tree:
    """Move an array that is committed to another layout. jit itself handles all other values."""
    import jax

    x = untyped(x)
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return x
    return x if x.sharding.is_equivalent_to(sharding, x.ndim) else jax.device_put(x, sharding)


def global_array(leaf: Tree, sharding: NamedSharding) -> Array:
    """A copy of an array in the given layout. With several processes, each must pass the whole array, unless the array
    lies on the devices of all of them already."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    if jax.process_count() == 1:
        # The step donates its arguments, so none of them may share memory with the caller's arrays.
        mine = jax.numpy.array(leaf, copy=True) if isinstance(leaf, jax.Array) else leaf
        return jax.device_put(mine, sharding)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        copied: Array = jax.jit(jax.numpy.copy, out_shardings=sharding)(leaf)
        return copied
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        spec = [
            *sharding.spec,
            *[None] * (leaf.ndim - len(sharding.spec)),
            None,
        ]  # a key's words are not split
        words = NamedSharding(sharding.mesh, PartitionSpec(*spec))
        return jax.random.wrap_key_data(
            global_array(jax.random.key_data(leaf), words), impl=jax.random.key_impl(leaf)
        )
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def shape_and_dtype(leaf: Tree) -> tuple[tuple[int, ...], object]:
    """The shape and dtype as JAX sees them: 64-bit numbers become 32-bit ones unless x64 is enabled."""
    import jax

    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)
    return jax.numpy.shape(leaf), jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def host_arrays(tree: Tree) -> Tree:
    """The tree with its arrays whole on the host: in numpy, and keys on one device. The other leaves are kept.

    With several processes, each gets all of them.
    """
    import jax

    return jax.tree.map(_host_array, tree)


def _host_array(leaf: Tree) -> Tree:
    import jax
    import numpy as np

    if not isinstance(leaf, jax.Array):
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            _host_array(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf)
        )
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(leaf, tiled=True))
