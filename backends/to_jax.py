"""A plan as JAX shardings: the user's function with the plan's constraints in it, and a train step.

The function is not rewritten by hand: its jaxpr is walked again, equation by equation, exactly as the
frontend walked it, and ``with_sharding_constraint`` is applied where ``constraints`` says so. Calls with a
derivative rule of their own are kept whole; loops and rematerialised regions are rebuilt around their
constrained bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pase.backends.jax_equations import boundary, evaluate
from pase.errors import PaseError
from pase.frontends.from_jax import INLINED, KEPT_WHOLE, Traced, inner_jaxpr
from pase.ir.blocks import Block
from pase.machine import Mesh
from pase.plan.constraints import Constraints, Placement, raw_name

__all__ = ["JaxPlan"]


@dataclass(frozen=True, kw_only=True)
class JaxPlan:
    """What ``plan.jax`` gives."""

    traced: Traced
    """The model on one micro-batch."""
    logical_mesh: Mesh
    constraints: Constraints
    accumulate: int = 1
    """Micro-batches of a step: gradients are summed over them, and the loss is taken to be a mean over the batch."""
    blocks: tuple[Block, ...] = ()
    """Equations that backward computes again."""

    def mesh(self, devices: Sequence[Any] | None = None) -> Any:
        """A jax.sharding.Mesh with the plan's axis names over ``devices`` (default: all of jax.devices())."""
        import jax
        import numpy as np

        m = self.logical_mesh
        if devices is None:
            devices = jax.devices()
        if len(devices) < m.devices:
            raise PaseError(
                f"the plan is for {m.devices} devices and JAX sees {len(devices)}: on a CPU, set "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={m.devices} before JAX starts, or compile for fewer"
            )
        grid = np.array(_as_linked(devices)[: m.devices], dtype=object).reshape(m.sizes)
        return jax.sharding.Mesh(grid, m.names)

    def sharding(self, placement: Placement, mesh: Any) -> Any:
        from jax.sharding import NamedSharding

        return NamedSharding(mesh, self.spec(placement))

    def spec(self, placement: Placement) -> Any:
        """PartitionSpec of a placement."""
        from jax.sharding import PartitionSpec

        return PartitionSpec(*[axes[0] if len(axes) == 1 else axes or None for axes in placement])

    def _leaf_names(self) -> list[str]:
        """Tensor names of the function's inputs, in the order of its leaves."""
        graph = self.traced.graph
        leaves = [n.ops[0].writes[0].tensor for n in graph.nodes if n.kind in ("parameter", "input")]
        return leaves[: len(self.traced.param_paths) + len(self.traced.input_paths)]

    @cached_property
    def copies(self) -> dict[str, str]:
        """ "EQUATION|TENSOR" -> the copy of the tensor that this equation reads."""
        out = {}
        for key in self.constraints.read:
            path, _, tensor = key.rpartition("|")
            if tensor != raw_name(tensor):
                out[f"{path}|{raw_name(tensor)}"] = tensor
        return out

    @cached_property
    def slices(self) -> frozenset[str]:
        """What loops slice off stacks. They are laid out where they are read, within a rematerialised region if there
        is one: laid out before it, they would be kept for backward, each beside the stack that it is a part of."""
        results = self.traced.results
        return frozenset(
            made[0]
            for key, made in results.items()
            if key.rpartition(":")[2].startswith("x") and not key.rpartition(":")[2].startswith("xs")
        )

    @cached_property
    def specs(self) -> tuple[Any, ...]:
        """(params, *batch) pytrees of PartitionSpec: how parameters are stored, how the batch arrives."""
        import jax

        storage = self.constraints.storage
        flat = [self.spec(storage.get(t, ())) for t in self._leaf_names()]
        return tuple(jax.tree.unflatten(self.traced.in_tree, flat))

    def in_shardings(self, mesh: Any | None = None) -> tuple[Any, ...]:
        """(params, *batch) pytrees of NamedSharding, ready for jax.jit(in_shardings=…) or jax.device_put."""
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = mesh if mesh is not None else self.mesh()
        return jax.tree.map(
            lambda s: NamedSharding(mesh, s), self.specs, is_leaf=lambda s: isinstance(s, PartitionSpec)
        )

    def gradient_shardings(self, mesh: Any | None = None) -> Any:
        """Pytree of NamedSharding like params: how gradients and optimizer state are kept; as the parameters are,
        or split further."""
        import jax

        mesh = mesh if mesh is not None else self.mesh()
        c = self.constraints
        names = self._leaf_names()[: len(self.traced.param_paths)]
        flat = [self.sharding(c.state.get(t, c.storage.get(t, ())), mesh) for t in names]
        return jax.tree.unflatten(jax.tree.structure(self._shapes()[0]), flat)

    def loss(self, mesh: Any | None = None) -> Callable[..., Any]:
        """The user's function, constrained: loss(params, *batch) -> scalar (or what the function returns, flat); of a
        step in micro-batches, on one of them."""
        import jax

        mesh = mesh if mesh is not None else self.mesh()
        closed = self.traced.jaxpr

        def constrained(*args: Any) -> Any:
            leaves, tree = jax.tree.flatten(args)
            if tree != self.traced.in_tree:
                raise PaseError(f"the plan was compiled for arguments {self.traced.in_tree}, got {tree}")
            paths = (*self.traced.param_paths, *self.traced.input_paths)
            for leaf, aval, path in zip(leaves, closed.in_avals, paths, strict=True):
                got = _shape_and_dtype(leaf)
                for what, is_, was in zip(("shape", "dtype"), got, (aval.shape, aval.dtype), strict=True):
                    if is_ != was:
                        raise PaseError(f"'{path}' has {what} {is_}; the plan was compiled for {was}")
            walk = _Walk(plan=self, mesh=mesh)
            leaves = [walk.defined(x, t) for x, t in zip(leaves, self._leaf_names(), strict=True)]
            outs = walk.run(closed.jaxpr, closed.consts, leaves, "", {})
            return outs[0] if len(outs) == 1 else (outs[0], tuple(outs[1:]))

        return constrained

    def value_and_grad(self, mesh: Any | None = None) -> Callable[..., Any]:
        """f(params, *batch) -> (loss, grads), gradients laid out as ``gradient_shardings`` says."""
        import jax

        mesh = mesh if mesh is not None else self.mesh()
        aux = len(self.traced.jaxpr.out_avals) > 1
        fn = jax.value_and_grad(self.loss(mesh), has_aux=aux)
        kept = self.gradient_shardings(mesh)

        def graded(params: Any, *batch: Any) -> Any:
            value, grads = fn(params, *batch)
            grads = jax.tree.map(jax.lax.with_sharding_constraint, grads, kept)
            return (value[0] if aux else value), grads

        return graded if self.accumulate == 1 else self._summed(graded, kept, mesh)

    def _summed(self, graded: Callable[..., Any], kept: Any, mesh: Any) -> Callable[..., Any]:
        """The mean of loss and gradients over the micro-batches, one at a time."""
        import jax
        import jax.numpy as jnp

        k = self.accumulate
        arrives = jax.tree.leaves(self.in_shardings(mesh)[1:])

        def summed(params: Any, *batch: Any) -> Any:
            leaves, tree = jax.tree.flatten(batch)
            split = [full != part for full, part in zip(*map(self._input_shapes, (True, False)), strict=True)]

            def parts(x: Any, sharding: Any) -> Any:
                # Every k-th example: each device then has all that it needs of each micro-batch.
                from jax.sharding import NamedSharding, PartitionSpec

                x = jnp.swapaxes(x.reshape(x.shape[0] // k, k, *x.shape[1:]), 0, 1)
                spec = PartitionSpec(None, *sharding.spec)
                return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

            stacked = [parts(x, s) for x, s, on in zip(leaves, arrives, split, strict=True) if on]

            def body(so_far: Any, mine: Any) -> Any:
                # Without the barrier, gathers of parameters move out of the loop, and stay gathered.
                here, mine = jax.lax.optimization_barrier((params, mine))
                turn = iter(mine)
                whole = [next(turn) if on else x for x, on in zip(leaves, split, strict=True)]
                value, grads = graded(here, *jax.tree.unflatten(tree, whole))
                total = jax.tree.map(jnp.add, so_far[1], grads)
                return (so_far[0] + value, jax.tree.map(jax.lax.with_sharding_constraint, total, kept)), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            zeros = jax.tree.map(jax.lax.with_sharding_constraint, zeros, kept)
            loss = jnp.zeros((), self.traced.jaxpr.out_avals[0].dtype)
            (loss, grads), _ = jax.lax.scan(body, (loss, zeros), stacked)
            return loss / k, jax.tree.map(lambda g: g / k, grads)

        return summed

    def _input_shapes(self, full: bool) -> list[tuple[int, ...]]:
        """Shapes of the batch's leaves: the whole batch's, or a micro-batch's."""
        from pase.frontends.jax_blocks import batch_size, splits

        shapes = [a.shape for a in self.traced.jaxpr.in_avals[len(self.traced.param_paths) :]]
        if not full or self.accumulate == 1:
            return shapes
        size = batch_size(self.traced)
        return [(s[0] * self.accumulate, *s[1:]) if splits(s, size) else s for s in shapes]

    def state_shardings(self, optimizer: Any, mesh: Any | None = None) -> Any:
        """Shardings of the optimizer's state: what mirrors a parameter is stored as its gradient is."""
        import jax
        import optax
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = mesh if mesh is not None else self.mesh()
        params = self._shapes()[0]
        state = jax.eval_shape(optimizer.init, params)
        whole = NamedSharding(mesh, PartitionSpec())

        def masked(leaf: Any) -> bool:
            return isinstance(leaf, optax.MaskedNode)  # optax leaves it where a transformation does not apply

        def like(leaf: Any, param: Any, sharding: Any) -> Any:
            return leaf if masked(leaf) else sharding if leaf.shape == param.shape else whole

        return optax.tree_map_params(
            optimizer, like, state, params, self.gradient_shardings(mesh),
            transform_non_params=lambda _: whole, is_leaf=masked,
        )  # fmt: skip

    def _shapes(self) -> tuple[Any, ...]:
        import jax

        given = self.traced.jaxpr.in_avals
        shapes = [*(a.shape for a in given[: len(self.traced.param_paths)]), *self._input_shapes(True)]
        avals = [jax.ShapeDtypeStruct(s, a.dtype) for s, a in zip(shapes, given, strict=True)]
        return tuple(jax.tree.unflatten(self.traced.in_tree, avals))

    def train_step(
        self, optimizer: Any, mesh: Any | None = None, *, donate: bool = True
    ) -> Callable[..., Any]:
        """A jitted step(params, opt_state, *batch) -> (params, opt_state, loss) for any optax optimizer.

        Inputs are moved to the plan's layouts as jit does; params and opt_state are donated. Works with more
        than one process: every process calls it with global arrays (``device_put`` of this plan makes them).
        """
        import jax
        import optax
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = mesh if mesh is not None else self.mesh()
        params_sharding, *batch_shardings = self.in_shardings(mesh)
        state_sharding = self.state_shardings(optimizer, mesh)
        updated_as = self.gradient_shardings(mesh)
        graded = self.value_and_grad(mesh)

        def step(params: Any, opt_state: Any, *batch: Any) -> Any:
            loss, grads = graded(params, *batch)
            # Each device updates the part whose state it has; out_shardings then gather the parameters.
            mine = jax.tree.map(jax.lax.with_sharding_constraint, params, updated_as)
            updates, opt_state = optimizer.update(grads, opt_state, mine)
            updated = optax.apply_updates(mine, updates)
            updated = jax.tree.map(jax.lax.with_sharding_constraint, updated, updated_as)
            return updated, opt_state, loss

        return jax.jit(
            step,
            in_shardings=(params_sharding, state_sharding, *batch_shardings),
            out_shardings=(params_sharding, state_sharding, NamedSharding(mesh, PartitionSpec())),
            donate_argnums=(0, 1) if donate else (),
        )

    def lower_train_step(self, optimizer: Any, mesh: Any | None = None) -> Any:
        """The train step lowered on shapes alone; ``.compile()`` it to see what XLA makes of the plan."""
        import jax

        mesh = mesh if mesh is not None else self.mesh()
        shapes = self._shapes()
        shardings = self.in_shardings(mesh)

        def struct(shape: Any, sharding: Any) -> Any:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

        state = jax.tree.map(
            struct, jax.eval_shape(optimizer.init, shapes[0]), self.state_shardings(optimizer, mesh)
        )
        params, *batch = (jax.tree.map(struct, s, h) for s, h in zip(shapes, shardings, strict=True))
        step: Any = self.train_step(optimizer, mesh)  # what jax.jit makes: it can be lowered
        return step.lower(params, state, *batch)

    def device_put(self, params: Any, *batch: Any, mesh: Any | None = None) -> tuple[Any, ...]:
        """Parameters and batch laid out as the plan stores them, as global arrays (each process has all values)."""
        import jax
        import numpy as np

        shardings = self.in_shardings(mesh)

        def put(leaf: Any, sharding: Any) -> Any:
            if jax.process_count() == 1:
                # The step donates its arguments: none may share memory with what the caller holds.
                mine = jax.numpy.array(leaf, copy=True) if isinstance(leaf, jax.Array) else leaf
                return jax.device_put(mine, sharding)
            host = np.asarray(leaf)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return tuple(jax.tree.map(put, x, s) for x, s in zip((params, *batch), shardings, strict=True))


Copies = dict[str, Any]
"""Copy -> its value."""


@dataclass(frozen=True, kw_only=True)
class _Walk:
    """One walk over the jaxpr, with constraints applied; run under a JAX trace."""

    plan: JaxPlan
    mesh: Any

    def _through(self, value: Any, placements: Sequence[Placement]) -> Any:
        import jax

        for placement in placements:
            value = jax.lax.with_sharding_constraint(value, self.plan.sharding(placement, self.mesh))
        return value

    def defined(self, value: Any, tensor: str | None) -> Any:
        through = self.plan.constraints.define.get(tensor or "", ())
        straight = self.plan.constraints.gradient.get(tensor or "")
        return self._through(value, through) if straight is None else self._gathered(value, through, straight)

    def _read(self, value: Any, path: str, tensor: str | None, copies: Copies) -> Any:
        """The value as the equation reads it: of the copy that it shares with others, if it does."""
        if tensor in self.plan.slices:
            value = self.defined(value, tensor)
        key = f"{path}|{tensor}"
        copy = self.plan.copies.get(key)
        if copy is not None:
            if copy not in copies:
                copies[copy] = self.defined(value, copy)
            value, key = copies[copy], f"{path}|{copy}"
        through = self.plan.constraints.read.get(key, ())
        straight = self.plan.constraints.gradient.get(key)
        return self._through(value, through) if straight is None else self._gathered(value, through, straight)

    def _gathered(self, value: Any, through: Sequence[Placement], straight: Placement) -> Any:
        """Led through the layouts; its gradient goes at once into the layout that it is kept in, not back the way."""
        import jax

        @jax.custom_vjp
        def gathered(x: Any) -> Any:
            return self._through(x, through)

        gathered.defvjp(lambda x: (gathered(x), None), lambda _, g: (self._through(g, (straight,)),))
        return gathered(value)

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], prefix: str, copies: Copies
    ) -> list[Any]:
        """copies: those made so far in this loop's or rematerialised region's body."""
        import jax
        from jax.extend.core import Literal

        traced = self.plan.traced
        info = traced.jaxpr.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def value(var: Any) -> Any:
            return var.val if isinstance(var, Literal) else env[var]

        def one(i: int, copies: Copies) -> None:
            eqn, path = jaxpr.eqns[i], f"{prefix}{i}"
            names = traced.operands[path]
            name = eqn.primitive.name
            ins = [value(v) for v in eqn.invars]
            if name in INLINED and name not in KEPT_WHOLE:
                outs = self._call(eqn, ins, f"{path}.", copies)
            elif name == "scan":
                outs = self._scan(eqn, ins, path, copies)
            else:
                ins = [self._read(x, path, t, copies) for x, t in zip(ins, names, strict=True)]
                outs = evaluate(eqn, ins, info)
                outs = [self.defined(x, t) for x, t in zip(outs, traced.results[path], strict=True)]
            env.update(zip(eqn.outvars, outs, strict=True))

        i = 0
        while i < len(jaxpr.eqns):
            block = next((b for b in self.plan.blocks if b.prefix == prefix and b.start == i), None)
            if block is None:
                one(i, copies)
                i += 1
                continue
            reads, makes = boundary(jaxpr, block)

            def body(*args: Any, block: Block = block, reads: Any = reads, makes: Any = makes) -> list[Any]:
                outside = dict(env)
                env.update(zip(reads, args, strict=True))
                inside: Copies = {}
                for j in range(block.start, block.stop):
                    one(j, inside)
                out = [env[v] for v in makes]
                env.clear()
                env.update(outside)
                return out

            alone = (
                block.stop - block.start == len(jaxpr.eqns) and prefix != ""
            )  # a loop's body: nothing to merge with
            made = jax.checkpoint(body, prevent_cse=not alone)(*[env[v] for v in reads])
            env.update(zip(makes, made, strict=True))
            i = block.stop
        return [value(v) for v in jaxpr.outvars]

    def _call(self, eqn: Any, ins: Sequence[Any], prefix: str, copies: Copies) -> Sequence[Any]:
        import jax

        jaxpr, consts = inner_jaxpr(eqn)
        if eqn.primitive.name not in ("remat", "remat2", "checkpoint"):
            return self.run(jaxpr, consts, ins, prefix, copies)

        def body(*args: Any) -> list[Any]:
            return self.run(jaxpr, consts, args, prefix, {})

        p = eqn.params
        return jax.checkpoint(body, prevent_cse=p["prevent_cse"], policy=p["policy"])(*ins)

    def _scan(self, eqn: Any, ins: Sequence[Any], path: str, copies: Copies) -> Sequence[Any]:
        import jax

        p, results = eqn.params, self.plan.traced.results
        nc, nk = p["num_consts"], p["num_carry"]
        closed = p["jaxpr"]

        def settled(
            kind: str, values: Sequence[Any], names: Sequence[str | None], copies: Copies
        ) -> list[Any]:
            """Values brought into the layouts of the loop's tensors of this kind (const, xs, carry, y)."""
            out = []
            for k, (x, name) in enumerate(zip(values, names, strict=True)):
                key = f"{path}:{kind}{k}"
                x = self._read(x, key, name, copies)
                out.append(self.defined(x, results[key][0]) if key in results else x)
            return out

        names, outs = self.plan.traced.operands[path], results[f"{path}:outs"]
        consts = settled("const", ins[:nc], names[:nc], copies)
        init = settled("carry", ins[nc : nc + nk], names[nc : nc + nk], copies)
        xs = settled("xs", ins[nc + nk :], names[nc + nk :], copies)

        def body(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            inside: Copies = {}
            carry = settled("carry", carry, [None] * nk, inside)
            made = self.run(closed.jaxpr, closed.consts, [*consts, *carry, *x], f"{path}.", inside)
            carried = settled("carry", made[:nk], outs[:nk], inside)
            return carried, settled("y", made[nk:], outs[nk:], inside)

        carry, ys = jax.lax.scan(body, init, xs, length=p["length"], reverse=p["reverse"], unroll=p["unroll"])
        return [self.defined(x, t) for x, t in zip([*carry, *ys], results[path], strict=True)]


def _as_linked(devices: Sequence[Any]) -> list[Any]:
    """TPU chips in the order of machine files: along the longest dim of the slice first; others as they come."""
    if not all(hasattr(d, "coords") for d in devices):
        return list(devices)
    extent = [len(set(along)) for along in zip(*(d.coords for d in devices), strict=True)]
    outer_first = sorted(range(len(extent)), key=lambda i: (extent[i], i))

    def place(d: Any) -> tuple[int, ...]:
        return (getattr(d, "slice_index", 0) or 0, *(d.coords[i] for i in outer_first), d.core_on_chip)

    return sorted(devices, key=place)


def _shape_and_dtype(leaf: Any) -> tuple[Any, Any]:
    """As JAX will see it: 64-bit numbers become 32-bit ones unless it is told otherwise."""
    import jax

    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)
    return jax.numpy.shape(leaf), jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
