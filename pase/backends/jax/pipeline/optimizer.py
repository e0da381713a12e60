"""An optimizer for a model in stages. Its state is stored, and its update runs, where the parameters are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.pipeline.arrays import Home
from pase.backends.jax.pipeline.distribute import OnRanks
from pase.backends.jax.pipeline.placement import StageHomes
from pase.errors import PaseError
from pase.frontends.jax.leaves import arrays, trained
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array, ShapeDtypeStruct
    from jax.tree_util import PyTreeDef
    from optax import GradientTransformation

__all__ = ["StagedOptimizer"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedOptimizer:
    """homes: where the parameters are stored. optimizer: from optax."""

    homes: StageHomes
    optimizer: GradientTransformation
    _updates: dict[bool, OnRanks] = field(default_factory=dict, init=False, repr=False)

    def init(self, params: Tree) -> Tree:
        """The state for the trained leaves of these parameters. Each part of it is where it is updated."""
        import jax

        (mine,) = self.homes.placed((arrays(params),))
        leaves, tree = jax.tree.flatten(trained(mine))

        def fn(*flat: Array) -> list[Array]:
            return list(jax.tree.leaves(self.optimizer.init(jax.tree.unflatten(tree, flat))))

        made = self._on_ranks(fn, leaves, self._stored, self._state_homes, {}, False)(leaves)
        return jax.tree.unflatten(self._form, made)

    def placed(self, state: Tree) -> Tree:
        """The state moved to where it is updated. It may come from cut parameters or from the model's own."""
        import jax
        import optax

        given: PyTreeDef = jax.tree.structure(state)
        if given != self._form:
            own = self.homes.leaves(self.homes.shape_of)
            form: PyTreeDef = jax.tree.structure(jax.eval_shape(self.optimizer.init, own))
            if given != form:
                raise PaseError(
                    f"the optimizer's state is {given}, but the step needs {self._form}: "
                    f"plan.jax.init(optimizer, params) makes it"
                )
            state = optax.tree_map_params(
                self.optimizer,
                lambda x, i: self.homes.put(i, x, self.homes.updated_as),
                state,
                self.homes.leaves(lambda i: i),
            )
        leaves = [h.put(x) for x, h in zip(jax.tree.leaves(state), self._state_homes, strict=True)]
        return jax.tree.unflatten(self._form, leaves)

    def updated(self, grads: Tree, state: Tree, params: Tree, donate: bool) -> tuple[Tree, Tree]:
        """(trained parameters, state) after the update, with each part where it is stored."""
        import jax
        import optax

        flat, tree = jax.tree.flatten((grads, state, params))

        def fn(*given: Array) -> list[Array]:
            grads, state, params = jax.tree.unflatten(tree, given)
            updates, state = self.optimizer.update(grads, state, params)
            return list(jax.tree.leaves((optax.apply_updates(params, updates), state)))

        if donate not in self._updates:
            last = len(flat) - len(self._stored)
            as_kept = [self.homes.updated_as[w] for w in self.homes.trained_parts]
            self._updates[donate] = self._on_ranks(
                fn,
                flat,
                [*as_kept, *self._state_homes, *self._stored],
                [*self._stored, *self._state_homes],
                {last + i: home for i, home in enumerate(as_kept)},
                donate,
            )
        out: tuple[Tree, Tree] = jax.tree.unflatten(
            jax.tree.structure((params, state)), self._updates[donate](flat)
        )
        return out

    def _on_ranks(
        self,
        fn: Callable[..., Sequence[Array]],
        given: Sequence[Array],
        homes: Sequence[Home],
        out_homes: Sequence[Home],
        laid: dict[int, Home],
        donate: bool,
    ) -> OnRanks:
        """Make fn run on the ranks.

        given: its arguments, which begin with gradients or parameters. laid: argument -> the layout that it is brought
        into first. These arguments are the parameters again, in the same order.
        """
        import jax

        paths = self.homes.plan.traced.param_paths
        parts = {
            i: (paths[w.leaf], w.rows[0])
            for i, w in enumerate(self.homes.trained_parts)
            if w.rows is not None
        }
        last = min(laid, default=0)
        return OnRanks(
            fn=fn,
            given=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given),
            homes=tuple(homes),
            out_homes=tuple(out_homes),
            ranks=self.homes.plan.pipeline.degree,
            parts=parts | {last + i: part for i, part in parts.items()},
            laid=laid,
            donate=donate,
        )

    @cached_property
    def _stored(self) -> list[Home]:
        return [self.homes.stored[w] for w in self.homes.trained_parts]

    @cached_property
    def _shapes(self) -> Tree:
        """Shapes of the state for parameters that are cut."""
        import jax

        return jax.eval_shape(self.optimizer.init, self.homes.tree(self.homes.shape))

    @property
    def _form(self) -> PyTreeDef:
        import jax

        return jax.tree.structure(self._shapes)

    @cached_property
    def _state_homes(self) -> list[Home]:
        """Where each leaf of the state is stored. A leaf that mirrors a parameter is with its gradient; the others are
        everywhere.
        """
        import jax
        import optax

        everywhere = self.homes.everywhere

        def masked(leaf: object) -> bool:
            return isinstance(leaf, optax.MaskedNode)  # optax leaves it where a transformation does not apply

        def like(leaf: Tree, param: ShapeDtypeStruct, home: Home) -> Tree:
            if masked(leaf):
                return leaf
            return home if leaf.shape == param.shape else replace(home, spec=everywhere.spec)

        homes = optax.tree_map_params(
            self.optimizer,
            like,
            self._shapes,
            self.homes.tree(self.homes.shape),
            self.homes.tree(lambda w: self.homes.updated_as[w]),
            transform_non_params=lambda _: everywhere,
            is_leaf=masked,
        )
        return list(jax.tree.leaves(homes))
