"""A compiled step reuses the memory of its arguments, and leaves the caller's own arrays alone."""

import jax
import optax

from tests.backends.jax.steps.trained import PARAMS, X, data_parallel_plan


def test_step_donates():
    """A step reuses the memory of its parameters and state, but not that of the caller's own arrays."""
    plan, optimizer = data_parallel_plan(), optax.adam(1e-3)
    jp = plan.jax
    params, x = jp.device_put(PARAMS, X)
    state = jax.jit(optimizer.init, out_shardings=jp.state_shardings(optimizer))(params)
    jp.train_step(optimizer)(params, state, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((PARAMS, X, x)))
    sizes = jp.lower_train_step(optimizer).compile().memory_analysis()
    stored = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(jp.device_put(PARAMS, X)[0])
    )
    assert sizes.alias_size_in_bytes >= 3 * stored
    kept, x = jp.device_put(PARAMS, X)
    state = jax.jit(optimizer.init, out_shardings=jp.state_shardings(optimizer))(kept)
    jp.train_step(optimizer, donate=False)(kept, state, x)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((kept, state)))
