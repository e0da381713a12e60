"""Where a pipelined plan stores its arrays: parameters, gradients and batch are on the ranks whose stages read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.pipeline.arrays import ArrayPlacement, StackCut, is_cut, rows_of
from pase.backends.jax.pipeline.stages import StageWeight
from pase.backends.jax.steps.stepper import shape_and_dtype
from pase.errors import PaseError
from pase.frontends.jax.leaves import trained
from pase.frontends.jax.structure import check_arguments
from pase.pytree import Tree

if TYPE_CHECKING:
    import numpy as np
    from jax import Array, ShapeDtypeStruct
    from jax.sharding import PartitionSpec
    from jax.tree_util import PyTreeDef

    from pase.backends.jax.one_program import OneProgramPlan
    from pase.backends.jax.pipeline.plan import JaxPipeline
    from pase.tables.axis_layout import Placement

__all__ = ["StagePlacement"]


@dataclass(frozen=True, kw_only=True)
class StagePlacement:
    """A pipelined plan on a set of devices. grid: the devices, [ranks, *axes]."""

    plan: JaxPipeline
    grid: np.ndarray

    @cached_property
    def names(self) -> tuple[str, ...]:
        return self.plan.splits[0].logical_mesh.names

    def _placement(self, ranks: Sequence[int], spec: PartitionSpec) -> ArrayPlacement:
        return ArrayPlacement(ranks=tuple(ranks), grid=self.grid, names=self.names, spec=spec)

    @cached_property
    def everywhere(self) -> ArrayPlacement:
        from jax.sharding import PartitionSpec

        return self._placement(range(self.plan.pipeline.degree), PartitionSpec())

    def split(self, stage: int) -> OneProgramPlan:
        return self.plan.splits[self.plan.pipeline.stages[stage].strategy]

    def _spec(self, stage: int, placements: Mapping[str, Placement], name: str, cut: bool) -> PartitionSpec:
        """The layout of a tensor under the stage's strategy. If it is cut, its dim of layers is not split further."""
        where = placements.get(name, ())
        return self.split(stage).spec(((), *where[1:]) if cut and where else where)

    @cached_property
    def holders(self) -> dict[StageWeight, list[int]]:
        """Part of the parameters -> the stages that hold it. Leaves that no stage reads belong to the first stage."""
        out: dict[StageWeight, list[int]] = {}
        for k, stage in enumerate(self.plan.stages):
            for w in stage.weights:
                out.setdefault(w, []).append(k)
        read = {w.leaf for w in out}
        out |= {StageWeight(i): [0] for i in range(len(self.plan.traced.param_paths)) if i not in read}
        return dict(sorted(out.items(), key=lambda pair: (pair[0].leaf, pair[0].rows or (0, 0))))

    @property
    def copied(self) -> list[str]:
        """Parameters that blocks on several ranks read.

        A tied embedding, which only the ends of the model share, is not among them.
        """
        paths = self.plan.traced.param_paths
        of_blocks = frozenset[int]().union(*(s.read_whole for s in self.plan.stages))
        several = [w.leaf for w, placement in self.stored.items() if len(placement.ranks) > 1]
        return [paths[leaf] for leaf in several if leaf in of_blocks]

    def _placements(self, kind: str) -> dict[StageWeight, ArrayPlacement]:
        rank_of, leaf = self.plan.schedule.rank_of, self.plan.splits[0].leaf_names()
        out = {}
        for w, stages in self.holders.items():
            c, name = self.split(stages[0]).constraints, leaf[w.leaf]
            placements = c.storage if kind == "storage" else {**c.storage, **c.state}
            ranks = dict.fromkeys(rank_of[s] for s in stages)
            out[w] = self._placement(list(ranks), self._spec(stages[0], placements, name, w.rows is not None))
        return out

    @cached_property
    def stored(self) -> dict[StageWeight, ArrayPlacement]:
        return self._placements("storage")

    @cached_property
    def updated_as(self) -> dict[StageWeight, ArrayPlacement]:
        """Where gradients and an optimizer's state are stored."""
        return self._placements("state")

    @cached_property
    def readers(self) -> list[list[int]]:
        """The stages that read each leaf of the batch. A leaf that none reads belongs to the first stage."""
        many = range(len(self.plan.traced.input_paths))
        return [[k for k, s in enumerate(self.plan.stages) if i in s.batch] or [0] for i in many]

    @cached_property
    def arrives(self) -> list[ArrayPlacement]:
        """Where the leaves of the batch arrive."""
        plan, n = self.plan, len(self.plan.traced.param_paths)
        leaf, out = plan.splits[0].leaf_names(), []
        for i, stages in enumerate(self.readers):
            ranks = dict.fromkeys(plan.schedule.rank_of[s] for s in stages)
            spec = self._spec(stages[0], self.split(stages[0]).constraints.storage, leaf[n + i], False)
            out.append(self._placement(list(ranks), spec))
        return out

    @cached_property
    def parts_of(self) -> list[list[StageWeight]]:
        """The parts of each leaf of the parameters."""
        out: list[list[StageWeight]] = [[] for _ in self.plan.traced.param_paths]
        for w in self.holders:
            out[w.leaf].append(w)
        return out

    def placed(self, args: Sequence[Tree]) -> list[Tree]:
        """(params, *batch), or params alone, where the plan stores them."""
        import jax

        traced = self.plan.traced
        n = len(traced.param_paths)
        tree: PyTreeDef
        leaves, tree = jax.tree.flatten(tuple(args), is_leaf=is_cut)
        check_arguments(tree, traced.in_tree, first=True)
        shapes = [a.shape for a in traced.jaxpr.in_avals[:n]] + self.split(0).input_shapes(True)
        paths = (*traced.param_paths, *traced.input_paths)
        out = []
        for i, x in enumerate(leaves):
            self._check(x, shapes[i], traced.jaxpr.in_avals[i].dtype, paths[i])
            out.append(self.put(i, x, self.stored) if i < n else self.arrives[i - n].put(x))
        return list(jax.tree.unflatten(tree, out))

    def put(self, leaf: int, x: Tree, placements: Mapping[StageWeight, ArrayPlacement]) -> Array | StackCut:
        ws = self.parts_of[leaf]
        if ws[0].rows is None and not is_cut(x):
            return placements[ws[0]].put(x)
        rows = [w.rows or (0, x.parts[0].shape[0]) for w in ws]
        parts = rows_of(x, rows, self.plan.traced.param_paths[leaf])
        return StackCut(tuple(placements[w].put(part) for w, part in zip(ws, parts, strict=True)))

    def _check(self, x: Tree, shape: tuple[int, ...], dtype: np.dtype, path: str) -> None:
        parts = x.parts if is_cut(x) else (x,)
        got = [shape_and_dtype(part) for part in parts]
        there = (sum(s[0] for s, _ in got), *got[0][0][1:]) if is_cut(x) else got[0][0]
        for what, is_, was in (("shape", there, shape), ("dtype", got[0][1], dtype)):
            if is_ != was:
                raise PaseError(
                    f"its {what} is {is_}, but the plan was compiled for {was}",
                    where=f"'{path}'",
                    fix=f"pass an array of this {what}, or compile again",
                )

    def tree(self, of: Callable[[StageWeight], Tree]) -> Tree:
        """The tree of the trained parameters, with a value for each part."""

        def whole(i: int) -> Tree:
            found = [of(w) for w in self.parts_of[i]]
            return found[0] if self.parts_of[i][0].rows is None else StackCut(tuple(found))

        return self.leaves(whole)

    def leaves(self, of: Callable[[int], Tree]) -> Tree:
        """The tree of the trained parameters, with a value for each leaf."""
        import jax

        traced = self.plan.traced
        found = [of(i) if i in self._trained else None for i in range(len(traced.param_paths))]
        return jax.tree.unflatten(traced.in_tree.children()[0], found)

    @cached_property
    def _trained(self) -> frozenset[int]:
        avals = self.plan.traced.jaxpr.in_avals
        return frozenset(i for i in range(len(self.plan.traced.param_paths)) if trained(avals[i]) is not None)

    def shape_of(self, leaf: int) -> ShapeDtypeStruct:
        """The shape of a whole leaf."""
        return self.shape(StageWeight(leaf))

    def shape(self, w: StageWeight) -> ShapeDtypeStruct:
        import jax

        a = self.plan.traced.jaxpr.in_avals[w.leaf]
        shape = a.shape if w.rows is None else (w.rows[1] - w.rows[0], *a.shape[1:])
        return jax.ShapeDtypeStruct(shape, a.dtype)

    @cached_property
    def trained_parts(self) -> tuple[StageWeight, ...]:
        """The parts of all trained leaves, in the order of the tree."""
        return tuple(w for i in sorted(self._trained) for w in self.parts_of[i])
