"""An optimizer's state is stored like the gradients, which may be split further than the parameters."""

import jax
import numpy as np
import optax

from bench.cases.plans import case_of
from pase.backends.audit.xla import worst_difference
from pase.backends.jax.make import one_program_plan
from pase.compiler.meshes.baselines import complete
from pase.compiler.meshes.plans import plan_of
from pase.machine import mesh_from
from pase.tables.layouts import configs, state_index
from tests.backends.jax.steps.trained import PARAMS, X, loss_fn


def test_state_is_split_where_parameters_are_whole():
    """ZeRO-2: every device has all parameters and an eighth of each moment. Three steps equal the unsharded ones."""
    case, optimizer = case_of(loss_fn, PARAMS, X), optax.adamw(1e-2, eps=1e-3)
    p = case.problem
    space = {n.name: configs(n, mesh_from("8", 8)) for n in p.graph.nodes}
    state = {n.name: state_index(n) for n in p.graph.nodes}
    split = {name: np.array(i, np.int8) for name, i in state.items() if i}
    assert all((space[name] == c).all(axis=1).any() for name, c in split.items())
    mesh = mesh_from("8", 8)
    jp = one_program_plan(plan_of(p, complete(p, split, mesh), mesh, "model", case.traced))
    mesh, params, moments = jp.mesh(), PARAMS, optimizer.init(PARAMS)
    placed, x = jp.device_put(PARAMS, X, mesh=mesh)
    placed_moments = jax.jit(optimizer.init, out_shardings=jp.state_shardings(optimizer, mesh))(placed)
    step = jp.train_step(optimizer, mesh)
    for _ in range(3):
        grads = jax.grad(loss_fn)(params, X)
        updates, moments = optimizer.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        placed, placed_moments, _ = step(placed, placed_moments, x)
    assert worst_difference(params, placed) < 1e-5
    assert worst_difference(moments, placed_moments) < 1e-5
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed))
    for leaf in jax.tree.leaves(placed_moments):
        assert leaf.ndim == 0 or leaf.addressable_shards[0].data.size * 8 == leaf.size
    _, grads = jax.jit(jp.value_and_grad(mesh))(placed, x)
    assert all(g.addressable_shards[0].data.size * 8 == g.size for g in jax.tree.leaves(grads))
