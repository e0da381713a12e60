"""The parts of a Plan that a bucket runner needs: its data axes, and the loss of one shard of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from pase.backends.jax_plans import jax_plan
from pase.backends.to_jax_buckets_moves import Placement, placement_of
from pase.errors import PaseError
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax.sharding import Mesh as JaxMesh

    from pase.plan.types import PlanData

__all__ = ["batch_specs", "data_axes_of", "inputs_split", "local_loss"]


def inputs_split(plan: PlanData) -> dict[str, Placement]:
    """Input -> how the batch is split: as it arrives, or, over axes on which it arrives whole, as its readers take
    their parts (which sends nothing). An axis on which readers disagree is left out.
    """
    names = {t.path: t.name for t in jax_plan(plan).traced.graph.tensors.values() if t.role == "input"}
    out = {}
    for path, t in plan.inputs.items():
        routes = [r for reading, r in plan.read.items() if reading.tensor == names[path]]
        routes += [r for name, r in plan.define.items() if name == names[path]]
        reads = [r.layouts[-1] for r in routes if r.layouts]
        now = {a for axes in t.storage for a in axes}
        dims = [list(axes) for axes in t.storage]
        for a in plan.mesh.names:
            where = {next((d for d, axes in enumerate(r) if a in axes), -1) for r in reads}
            if a not in now and len(where) == 1 and -1 not in where:
                dims[where.pop()].append(a)
        out[path] = tuple(tuple(d) for d in dims)
    return out


def batch_specs(plan: PlanData, axes: tuple[str, ...]) -> tuple[Tree, ...]:
    """PartitionSpecs of the batch arguments, of these axes alone."""
    import jax
    from jax.sharding import PartitionSpec as P

    jp, split = jax_plan(plan), inputs_split(plan)
    n = len(jp.traced.param_paths)
    flat = [P() for _ in range(n)]
    for path in jp.traced.input_paths:
        flat.append(P(*(tuple(a for a in dim if a in axes) or None for dim in split[path])))
    return tuple(jax.tree.unflatten(jp.traced.in_tree, flat))[1:]


def data_axes_of(plan: PlanData) -> tuple[str, ...]:
    """The axes along which devices do the same work on different samples. They split some input, and only parameters,
    their gradients and the loss are sent along them.

    Raises PaseError if there is none; the message says what is sent along each axis.
    """
    size = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    inputs = {a for split in inputs_split(plan).values() for axes in split for a in axes}
    weights = {n.name for n in plan.nodes if n.op == "parameter"}
    scalars = [c for c in plan.collectives if c.source not in weights and c.nbytes <= 8]
    out, why = [], []
    for a in size:
        crossing = [c for c in plan.collectives if a in c.axes and c.source not in weights]
        if size[a] == 1:
            continue
        if a not in inputs:
            why.append(f"'{a}' splits no input")
        elif [c for c in crossing if c not in scalars] or len(crossing) > 1:
            c = next((c for c in crossing if c not in scalars), crossing[-1])
            why.append(f"over '{a}' node '{c.node}' needs {c.kind} of {c.tensor}, which is not a parameter")
        else:
            out.append(a)
    if not out:
        raise PaseError(
            f"the plan for '{plan.model}' has no data axis to run buckets over: {'; '.join(why) or 'one device'}. "
            f"Use plan.jax.train_step"
        )
    return tuple(out)


def local_loss(plan: PlanData, loss_fn: Callable[..., Tree], axes: tuple[str, ...]) -> Callable[..., Tree]:
    """The loss of one shard of the batch, constrained over the other axes as the plan says. Call it where the data axes
    are manual.

    If there are other axes, the function is traced again at the shard's shapes. Raises PaseError if that gives a
    different program.
    """
    import jax
    from jax.sharding import PartitionSpec as P

    from pase.frontends.from_jax import trace

    jp = jax_plan(plan)
    size = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jp.traced.jaxpr.in_avals]
    params, *batch = jax.tree.unflatten(jp.traced.in_tree, shapes)
    specs = batch_specs(plan, axes)

    def shard(x: Tree, spec: Tree) -> Tree:
        ways = [math.prod(size[a] for a in dim) for dim in placement_of(spec)]
        ways += [1] * (len(x.shape) - len(ways))
        return jax.ShapeDtypeStruct(tuple(n // w for n, w in zip(x.shape, ways, strict=True)), x.dtype)

    local = [
        jax.tree.map(shard, b, s, is_leaf=lambda x: isinstance(x, (P, jax.ShapeDtypeStruct)))
        for b, s in zip(batch, specs, strict=True)
    ]
    aux = len(jp.traced.jaxpr.out_avals) > 1
    if all(n == 1 or a in axes for a, n in size.items()):
        return (lambda *args: loss_fn(*args)[0]) if aux else loss_fn
    traced = trace(loss_fn, params, *local, name=plan.model, unknown="replicate")
    if traced.operands != jp.traced.operands or traced.results != jp.traced.results:
        raise PaseError(
            f"'{plan.model}' is a different program on a shard's batch ({_batch(local)}) than on the "
            "whole batch, so the plan's constraints do not fit it. A larger batch, or fewer data shards, may help"
        )
    c = jp.constraints

    def cut(p: Placement) -> Placement:
        return tuple(tuple(a for a in dim if a not in axes) for dim in p)

    inside = replace(
        jp,
        traced=traced,
        constraints=replace(
            c,
            storage={k: cut(v) for k, v in c.storage.items()},
            define={k: v.mapped(cut) for k, v in c.define.items()},
            read={k: v.mapped(cut) for k, v in c.read.items()},
        ),
    )

    def loss(params: Tree, *batch: Tree) -> Tree:
        here = cast("JaxMesh", jax.sharding.get_abstract_mesh())  # only the axes' names and sizes are used
        made = inside.loss(here, lowering="annotated")(params, *batch)
        return made[0] if aux else made

    return loss


def _batch(local: Tree) -> str:
    import jax

    return ", ".join(str(x.shape) for x in jax.tree.leaves(local)[:4])
