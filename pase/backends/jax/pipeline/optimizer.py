"""An optimizer for a model in stages. Its state is stored and its update runs where the parameters are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.pipeline.arrays import ArrayPlacement
from pase.backends.jax.pipeline.distribute import OnRanks, numbers_in
from pase.backends.jax.pipeline.placement import StagePlacement
from pase.backends.jax.pipeline.stages import StageWeight
from pase.errors import PaseError
from pase.frontends.jax.leaves import arrays, trained
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.tree_util import PyTreeDef
    from optax import GradientTransformation

__all__ = ["StagedOptimizer"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedOptimizer:
    """An optax optimizer under a plan in stages. placement: where the parameters are stored."""

    placement: StagePlacement
    optimizer: GradientTransformation
    _updates: dict[bool, OnRanks] = field(default_factory=dict, init=False, repr=False)

    def init(self, params: Tree) -> Tree:
        """The state for the trained leaves of these parameters. Each part is stored where it is updated."""
        import jax

        (mine,) = self.placement.placed((arrays(params),))
        leaves, tree = jax.tree.flatten(trained(mine))

        def fn(*flat: Array) -> list[Array]:
            return list(jax.tree.leaves(self.optimizer.init(jax.tree.unflatten(tree, flat))))

        made = self._on_ranks(
            fn, leaves, self.placement.trained_parts, self._stored, self._state_placements, {}, False
        )(leaves)
        return jax.tree.unflatten(self._form, made)

    def placed(self, state: Tree) -> Tree:
        """The state moved to where it is updated.

        It may have been made from cut parameters or from parameters in the form of the model.
        """
        import jax
        import optax

        given: PyTreeDef = jax.tree.structure(state)
        if given != self._form:
            own = self.placement.leaves(self.placement.shape_of)
            form: PyTreeDef = jax.tree.structure(jax.eval_shape(self.optimizer.init, own))
            if given != form:
                raise PaseError(
                    f"it is {given}, but the step needs {self._form}",
                    where="the optimizer's state",
                    fix="make it with plan.jax.init(optimizer, params)",
                )
            state = optax.tree_map_params(
                self.optimizer,
                lambda x, i: self.placement.put(i, x, self.placement.updated_as),
                state,
                self.placement.leaves(lambda i: i),
            )
        leaves = [h.put(x) for x, h in zip(jax.tree.leaves(state), self._state_placements, strict=True)]
        return jax.tree.unflatten(self._form, leaves)

    def updated(self, grads: Tree, state: Tree, params: Tree, loss: Array, donate: bool) -> tuple[Tree, Tree]:
        """(trained parameters, state) after the update. Each part is where the plan stores it.

        loss: of the step, for optimizers that read it (``reduce_on_plateau``).
        """
        import jax
        import optax

        everywhere, optimizer = self.placement.everywhere, optax.with_extra_args_support(self.optimizer)
        flat, tree = jax.tree.flatten((everywhere.put(loss), grads, state, params))

        def update(loss: Array, grads: Tree, state: Tree, params: Tree) -> list[Array]:
            updates, state = optimizer.update(grads, state, params, value=loss)
            return list(jax.tree.leaves((optax.apply_updates(params, updates), state)))

        def fn(*given: Array) -> list[Array]:
            return update(*jax.tree.unflatten(tree, given))

        if donate not in self._updates:
            self._check_numbers(update, loss)
            last = len(flat) - len(self._stored)
            parts = self.placement.trained_parts
            as_kept = [self.placement.updated_as[w] for w in parts]
            self._updates[donate] = self._on_ranks(
                fn,
                flat,
                [None, *parts, *self._state_parts, *parts],
                [everywhere, *as_kept, *self._state_placements, *self._stored],
                [*self._stored, *self._state_placements],
                {last + i: placement for i, placement in enumerate(as_kept)},
                donate,
            )
        out: tuple[Tree, Tree] = jax.tree.unflatten(
            jax.tree.structure((params, state)), self._updates[donate](flat)
        )
        return out

    def _check_numbers(self, update: Callable[..., Sequence[Array]], loss: Array) -> None:
        """Raise PaseError if the update computes with a number that depends on how many layers a part of a stack has.

        update: from (loss, gradients, state, parameters).
        """
        import jax

        cut, whole = (
            set(numbers_in(jax.make_jaxpr(update)(loss, p, jax.eval_shape(self.optimizer.init, p), p)))
            for p in (
                self.placement.tree(self.placement.shape),
                self.placement.leaves(self.placement.shape_of),
            )
        )
        if more := cut - whole:
            raise PaseError(
                f"the optimizer cannot be run in stages: it computes with the number {min(more)}, which depends on how "
                "many layers of a stack a stage has",
                where="optimizer",
                fix="make each layer a leaf of its own, or choose an optimizer that does not use the sizes of stacks",
            )

    def _on_ranks(
        self,
        fn: Callable[..., Sequence[Array]],
        given: Sequence[Array],
        parts: Sequence[StageWeight | None],
        placements: Sequence[ArrayPlacement],
        out_placements: Sequence[ArrayPlacement],
        reshard_to: dict[int, ArrayPlacement],
        donate: bool,
    ) -> OnRanks:
        """Make fn run on the ranks.

        given: its arguments. parts: for each of them, the part of the parameters whose rows it has, if any. reshard_to:
        argument -> the layout to which it is resharded first.
        """
        import jax

        paths = self.placement.plan.traced.param_paths
        return OnRanks(
            fn=fn,
            given=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given),
            placements=tuple(placements),
            out_placements=tuple(out_placements),
            ranks=self.placement.plan.pipeline.degree,
            parts={
                i: (paths[w.leaf], w.rows[0])
                for i, w in enumerate(parts)
                if w is not None and w.rows is not None and len(self.placement.parts_of[w.leaf]) > 1
            },
            reshard_to=reshard_to,
            donate=donate,
        )

    @cached_property
    def _stored(self) -> list[ArrayPlacement]:
        return [self.placement.stored[w] for w in self.placement.trained_parts]

    @cached_property
    def _shapes(self) -> Tree:
        """Shapes of the state for cut parameters."""
        import jax

        return jax.eval_shape(self.optimizer.init, self.placement.tree(self.placement.shape))

    @property
    def _form(self) -> PyTreeDef:
        import jax

        return jax.tree.structure(self._shapes)

    @cached_property
    def _state_placements(self) -> list[ArrayPlacement]:
        """Where each leaf of the state is stored.

        A leaf that mirrors a parameter is stored like its gradient. All other leaves are replicated on all ranks.
        """
        everywhere, updated_as = self.placement.everywhere, self.placement.updated_as
        return [
            everywhere
            if w is None
            else updated_as[w]
            if shape == self.placement.shape(w).shape
            else replace(updated_as[w], spec=everywhere.spec)
            for w, shape in self._owners
        ]

    @cached_property
    def _state_parts(self) -> list[StageWeight | None]:
        """For each leaf of the state, the part of the parameters for each row of which it has a row."""
        shape = self.placement.shape
        return [w if w and at[:1] == shape(w).shape[:1] else None for w, at in self._owners]

    @cached_property
    def _owners(self) -> list[tuple[StageWeight | None, tuple[int, ...]]]:
        """For each leaf of the state, the part of the parameters that it belongs to, if any, and its shape."""
        import jax
        import optax

        def masked(leaf: object) -> bool:
            return isinstance(leaf, optax.MaskedNode)  # optax puts it where a transformation does not apply

        owners = optax.tree_map_params(
            self.optimizer,
            lambda leaf, w: leaf if masked(leaf) else w,
            self._shapes,
            self.placement.tree(lambda w: w),
            transform_non_params=lambda _: -1,
            is_leaf=masked,
        )
        shapes = [x.shape for x in jax.tree.leaves(self._shapes)]
        found = [None if w == -1 else w for w in jax.tree.leaves(owners)]
        return list(zip(found, shapes, strict=True))
