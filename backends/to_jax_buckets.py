"""A bucket plan run in JAX: explicit collectives, bucket by bucket, in one order on every device.

Two manual regions in one jitted step. In the first, manual over the data axes alone (the other mesh axes stay with
XLA and whatever shardings the parameters have), each device takes the gradient of its share of the batch and keeps it
unreduced. In the second, manual over all axes, the local shards are cut and joined as the plan says and reduced
bucket by bucket; each link is a chain (a bucket's buffer is tied to the result of the one before), so that
XLA may neither reorder nor combine them: all ranks issue one order, and cannot deadlock.

Delayed and merged updates: a generation's gradients are summed locally, reduced when its messages are due, divided
by batches times devices, and applied once; between updates the optimizer is not called at all.

What a plan may hold here: all-reduced gradients of parameters that are whole over the data axes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pase.errors import PaseError
from pase.schedule.plan import BucketPlan, Message, check_plan
from pase.schedule.types import Problem

__all__ = ["BucketRunner", "RunState", "gradient_problem"]

_NAME = re.compile(r"^(?P<path>.*?)(\[(?P<repeat>\d+)\])?(\.grad\.all_reduce)?$")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Between iterations. generations: (number, unreduced gradient sum, reduced buffers by message)."""

    params: Any
    opt_state: Any
    iteration: int = 0
    generations: tuple[tuple[int, Any, Mapping[int, Any]], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Where:
    """A tensor of the problem: all of a parameter, or one slice of its first dim (a layer of a scanned stack)."""

    leaf: int
    repeat: int | None


def gradient_problem(
    params: Any, links: Any, *, forward_s: float, backward_s: float, name: str = "model"
) -> Problem:
    """A plain problem for a parameter tree: gradients made in reverse order, compute spread by bytes.

    For plans of models that were not compiled by pase; a layout or a profile knows better.
    """
    import jax

    from pase.schedule.pipedream import Layer, problem_from_layers

    leaves = jax.tree_util.tree_leaves_with_path(params)
    total = sum(x.size for _, x in leaves)
    layers = [
        Layer(
            name=_path(path),
            forward_s=forward_s * x.size / total,
            backward_s=backward_s * x.size / total,
            parameters=((_path(path), x.size * x.dtype.itemsize),),
        )
        for path, x in leaves
    ]
    return problem_from_layers(layers, tuple(links), name=name)


def _path(path: Any) -> str:
    import jax

    return jax.tree_util.keystr(path, simple=True, separator=".")


@dataclass(frozen=True, kw_only=True)
class BucketRunner:
    """Trains by a bucket plan.

    loss_fn: loss(params, *batch) -> scalar, the mean over the batch's first dim. mesh: jax.sharding.Mesh.
    data_axes: the mesh axes over which the batch is split. specs: PartitionSpec per parameter (a tree), None = all
    whole; none may use a data axis.
    """

    loss_fn: Callable[..., Any]
    problem: Problem
    plan: BucketPlan
    optimizer: Any
    mesh: Any
    data_axes: tuple[str, ...]
    specs: Any = None
    _steps: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_plan(self.problem, self.plan)
        for t in self.problem.tensors:
            if t.kind != "all_reduce" or t.lag != 1 or t.follows:
                raise PaseError(
                    f"tensor '{t.name}' of '{self.problem.name}' is a {t.kind}: this runner executes all-reduced "
                    f"gradients of parameters that are whole over the data axes {', '.join(self.data_axes)}"
                )
        missing = [a for a in self.data_axes if a not in self.mesh.shape]
        if missing or not self.data_axes:
            raise PaseError(f"data axes {self.data_axes} are not in the mesh {dict(self.mesh.shape)}")

    @cached_property
    def ways(self) -> int:
        """Devices that share a gradient."""
        n = 1
        for a in self.data_axes:
            n *= self.mesh.shape[a]
        return n

    def init(self, params: Any) -> RunState:
        return RunState(params=params, opt_state=self.optimizer.init(params))

    def step(self, state: RunState, *batch: Any) -> tuple[RunState, Any]:
        """One iteration: (next state, loss of this batch under the parameters it was computed with)."""
        plan, it = self.plan, state.iteration
        period, position = divmod(it, plan.period)
        first = plan.updates[0].first
        if first:
            raise PaseError("a plan that runs counts its iterations from its first update's first batch, 0")
        active = tuple(g for g, _, _ in state.generations)
        base = period * len(plan.updates)
        structure = tuple((g - base, tuple(sorted(bufs))) for g, _, bufs in state.generations)
        key = (position, structure)
        if key not in self._steps:
            self._steps[key] = self._compile(it, active, [set(b) for _, _, b in state.generations])
        fn, after = self._steps[key]
        given = tuple((acc, dict(bufs)) for _, acc, bufs in state.generations)
        params, opt_state, kept, loss = fn(state.params, state.opt_state, given, *batch)
        generations = tuple((g + base, acc, bufs) for g, (acc, bufs) in zip(after, kept, strict=True))
        return (
            RunState(params=params, opt_state=opt_state, iteration=it + 1, generations=generations),
            loss,
        )

    def _generation(self, g: int) -> tuple[int, int, int, int]:
        """(update, first, last, at) of a generation, iterations counted from the start of the run."""
        period, u = divmod(g, len(self.plan.updates))
        update, o = self.plan.updates[u], period * self.plan.period
        return u, update.first + o, update.last + o, update.at + o

    def _compile(self, it: int, active: tuple[int, ...], sent: list[set[int]]) -> tuple[Any, tuple[int, ...]]:
        """The jitted step of iteration `it`, and the generations it leaves open, relative to the period's first."""
        import jax
        import jax.numpy as jnp
        import optax

        plan = self.plan
        base = it // plan.period * len(plan.updates)
        mine = next(
            g
            for g in range(base, base + len(plan.updates))
            if self._generation(g)[1] <= it <= self._generation(g)[2]
        )
        order = active if mine in active else (*active, mine)
        due = {g: self._due(g, it) for g in order}
        closing = [g for g in order if self._generation(g)[3] == it]
        already = dict(zip(active, sent, strict=True))
        for g in closing:
            u = self._generation(g)[0]
            owed = (
                {i for i, m in enumerate(plan.messages) if m.update == u}
                - already.get(g, set())
                - set(due[g])
            )
            if owed:
                raise PaseError(
                    f"plan '{plan.policy}' applies an update before its messages {sorted(owed)} are sent"
                )

        def run(params: Any, opt_state: Any, given: Any, *batch: Any) -> Any:
            open_ = {g: [acc, dict(bufs)] for g, (acc, bufs) in zip(active, given, strict=True)}
            loss, grads = self._gradients(params, batch)
            if mine in open_:
                open_[mine][0] = jax.tree.map(jnp.add, open_[mine][0], grads)
            else:
                open_[mine] = [grads, {}]
            for g in order:
                if due[g]:
                    open_[g][1].update(self._reduce(open_[g][0], due[g]))
            for g in closing:
                _, first, last, _ = self._generation(g)
                mean = self._assemble(
                    params, open_[g][1], self._generation(g)[0], (last - first + 1) * self.ways
                )
                updates, opt_state = self.optimizer.update(mean, opt_state, params)
                params = optax.apply_updates(params, updates)
            kept = tuple((open_[g][0], open_[g][1]) for g in order if g not in closing)
            return params, opt_state, kept, loss

        # Relative to the next period when this iteration ends one, as `step` adds that one's base.
        left = tuple(g - base for g in order if g not in closing)
        return jax.jit(run), left

    def _due(self, g: int, it: int) -> list[int]:
        """Messages of the generation that are sent in this iteration, in plan order."""
        u, _, last, _ = self._generation(g)
        return [i for i, m in enumerate(self.plan.messages) if m.update == u and last + m.iteration == it]

    def _gradients(self, params: Any, batch: tuple[Any, ...]) -> tuple[Any, Any]:
        """(mean loss, gradients of each data shard: leaves [ways, …] split over the data axes)."""
        import jax
        from jax.sharding import PartitionSpec as P

        def local(params: Any, *batch: Any) -> Any:
            loss, grads = jax.value_and_grad(self.loss_fn)(params, *batch)
            return jax.lax.pmean(loss, self.data_axes), jax.tree.map(lambda g: g[None], grads)

        split = P(self.data_axes)
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(P(), *(split for _ in batch)),
            out_specs=(P(), split),
            axis_names=set(self.data_axes),
            check_vma=False,
        )(params, *batch)  # type: ignore[no-any-return]

    def _leaf_specs(self, leaves: list[Any]) -> list[Any]:
        import jax
        from jax.sharding import PartitionSpec as P

        if self.specs is None:
            return [P() for _ in leaves]
        return jax.tree.leaves(self.specs, is_leaf=lambda s: isinstance(s, P))  # type: ignore[no-any-return]

    def _table(self, tree: Any) -> list[_Where]:
        """Where each tensor of the problem lies in the parameter tree."""
        import jax

        paths = {_path(p): i for i, (p, _) in enumerate(jax.tree_util.tree_leaves_with_path(tree))}
        out = []
        for t in self.problem.tensors:
            m = _NAME.match(t.name)
            assert m is not None
            exact = paths.get(t.name)
            leaf = exact if exact is not None else paths.get(m["path"])
            if leaf is None:
                raise PaseError(
                    f"tensor '{t.name}' of '{self.problem.name}' is no parameter; there are {', '.join(paths)}"
                )
            out.append(
                _Where(
                    leaf=leaf, repeat=None if exact is not None or m["repeat"] is None else int(m["repeat"])
                )
            )
        covered = {w.leaf for w in out}
        if len(covered) < len(paths):
            lost = [p for p, i in paths.items() if i not in covered]
            raise PaseError(f"problem '{self.problem.name}' leaves out parameters {', '.join(lost)}")
        return out

    def _reduce(self, grads: Any, due: list[int]) -> dict[int, Any]:
        """The reduced buffer (a sum) of each message, in order, chained link by link."""
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P

        leaves = jax.tree.leaves(grads)
        where, specs = self._table(grads), self._leaf_specs(leaves)
        others = tuple(a for a in self.mesh.axis_names if a not in self.data_axes)

        def local(*shards: Any) -> tuple[Any, ...]:
            last: dict[int, int] = {}  # link -> the message before on it
            out: list[Any] = []
            for i in due:
                message = self.plan.messages[i]
                parts = [
                    self._cut(shards[where[p.tensor].leaf][0], where[p.tensor], p) for p in message.pieces
                ]
                buffer = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
                if message.link in last:
                    buffer = buffer + _zero_after(out[last[message.link]], buffer.dtype)
                out.append(jax.lax.psum(buffer, self.data_axes))
                last[message.link] = len(out) - 1
            return tuple(out)

        buffers = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(P(self.data_axes, *s) for s in specs),
            out_specs=tuple(P(others) if others else P() for _ in due),
            check_vma=False,
        )(*leaves)
        return dict(zip(due, buffers, strict=True))

    def _range(self, where: _Where, piece: Any, elements: int) -> tuple[int, int]:
        """Elements [from, to) of the local shard that the piece stands for."""
        nbytes = self.problem.tensors[piece.tensor].nbytes
        return (
            round(piece.offset * elements / nbytes),
            round((piece.offset + piece.nbytes) * elements / nbytes),
        )

    def _cut(self, shard: Any, where: _Where, piece: Any) -> Any:
        flat = (shard if where.repeat is None else shard[where.repeat]).reshape(-1)
        a, b = self._range(where, piece, flat.shape[0])
        return flat[a:b]

    def _assemble(self, params: Any, buffers: Mapping[int, Any], update: int, count: int) -> Any:
        """The mean gradient as a tree, from the update's reduced buffers."""
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec as P

        leaves, tree = jax.tree.flatten(params)
        where, specs = self._table(params), self._leaf_specs(leaves)
        others = tuple(a for a in self.mesh.axis_names if a not in self.data_axes)
        messages: list[tuple[int, Message]] = [
            (i, m) for i, m in enumerate(self.plan.messages) if m.update == update
        ]

        def local(shapes: Any, *flat: Any) -> tuple[Any, ...]:
            parts: dict[tuple[int, int | None], list[tuple[int, Any]]] = {}
            for (_, m), buffer in zip(messages, flat, strict=True):
                at = 0
                for p in m.pieces:
                    w = where[p.tensor]
                    shape = shapes[w.leaf].shape
                    n = 1
                    for s in shape if w.repeat is None else shape[1:]:
                        n *= s
                    a, b = self._range(w, p, n)
                    parts.setdefault((w.leaf, w.repeat), []).append((a, buffer[at : at + b - a]))
                    at += b - a
            out = []
            for i, leaf in enumerate(shapes):
                rows = []
                for r in range(leaf.shape[0]) if (i, None) not in parts else (None,):
                    cut = sorted(parts[i, r], key=lambda x: x[0])
                    rows.append(jnp.concatenate([c for _, c in cut]))
                whole = rows[0] if (i, None) in parts else jnp.stack(rows)
                out.append((whole / count).reshape(leaf.shape).astype(leaf.dtype))
            return tuple(out)

        made = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(tuple(specs), *(P(others) if others else P() for _ in messages)),
            out_specs=tuple(specs),
            check_vma=False,
        )(tuple(leaves), *(buffers[i] for i, _ in messages))
        return jax.tree.unflatten(tree, made)


def _zero_after(x: Any, dtype: Any) -> Any:
    """A zero of that dtype that can only be had once x is there: the least of 0 and one bit of x, also where x is
    not a number. The compiler does not know that a bit is never negative.
    """
    import jax
    import jax.numpy as jnp

    bits = jax.lax.bitcast_convert_type(x[0], jnp.dtype(f"uint{x.dtype.itemsize * 8}"))
    return jnp.minimum((bits & 1).astype(jnp.int32), 0).astype(dtype)
