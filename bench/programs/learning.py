"""Losses of reinforcement learning (RLax), ranking (Rax) and transport (OTT) on the output of a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.programs.catalog import PROGRAMS, LibraryProgram, integers, normal, program

_STATES, _ACTIONS = 32, 8


def _probabilities(*shape: int, seed: int = 0) -> Any:
    import jax

    return jax.nn.softmax(normal(*shape, seed=seed))


def _uniform(*shape: int, seed: int = 0) -> Any:
    import jax

    return jax.random.uniform(jax.random.key(seed), shape)


Loss = Callable[[Any, Any, Mapping[str, Any]], Any]
"""Losses of rlax, from the layer's output [states, actions] and other observations."""

_LOSSES: Mapping[str, Loss] = {
    "q_learning": lambda r, y, s: r.q_learning(y, s["action"], s["reward"], s["discount"], s["next"]),
    "double_q_learning": lambda r, y, s: r.double_q_learning(
        y, s["action"], s["reward"], s["discount"], s["next"], s["next"] + 1
    ),
    "expected_sarsa": lambda r, y, s: r.expected_sarsa(
        y, s["action"], s["reward"], s["discount"], s["next"], s["chances"]
    ),
    "categorical_q_learning": lambda r, y, s: r.categorical_q_learning(
        s["atoms"],
        y[:, None] * s["next"][None, :],
        s["action"],
        s["reward"],
        s["discount"],
        s["atoms"],
        y[:, None] + s["next"][None, :],
    ),
    "quantile_q_learning": lambda r, y, s: r.quantile_q_learning(
        y[:, None] * s["next"][None, :],
        s["quantiles"],
        s["action"],
        s["reward"],
        s["discount"],
        y[:, None] + s["next"][None, :],
        y[:, None] + s["next"][None, :],
        huber_param=1.0,
    ),
}


def _per_state(make: Loss) -> Callable[[], LibraryProgram]:
    """Returns a program: a loss of one transition, over a batch of transitions."""

    def made() -> LibraryProgram:
        import jax
        import jax.numpy as jnp
        import rlax

        seen = {
            "action": integers(_ACTIONS, _STATES),
            "reward": normal(_STATES, seed=1),
            "discount": jnp.full((_STATES,), 0.9),
            "next": normal(_STATES, _ACTIONS, seed=2),
            "chances": _probabilities(_STATES, _ACTIONS, seed=3),
            "atoms": jnp.tile(jnp.linspace(-2.0, 2.0, _ACTIONS), (_STATES, 1)),
            "quantiles": jnp.tile((jnp.arange(_ACTIONS) + 0.5) / _ACTIONS, (_STATES, 1)),
        }

        def loss(p: Any, x: Any, seen: Any) -> Any:
            return jnp.mean(jax.vmap(lambda y, s: make(rlax, y, s))(x @ p, seen) ** 2)

        return loss, normal(24, _ACTIONS, scale=0.2), normal(_STATES, 24), seen

    return made


_OF_TIME: Mapping[str, Loss] = {
    "vtrace": lambda r, y, s: r.vtrace(y[:-1], y[1:], s["reward"], s["discount"], s["ratio"]),
    "td_lambda": lambda r, y, s: r.td_lambda(y[:-1], s["reward"], s["discount"], y[1:], 0.9),
    "generalized_advantage": lambda r, y, s: r.truncated_generalized_advantage_estimation(
        s["reward"], s["discount"], 0.95, y
    ),
    "policy_gradient": lambda r, y, s: r.clipped_surrogate_pg_loss(s["ratio"] * y[1:], s["reward"], 0.2),
}


def _of_time(make: Loss) -> Callable[[], LibraryProgram]:
    """Returns a program: a loss of a sequence of 12 values, over a batch of sequences."""

    def made() -> LibraryProgram:
        import jax
        import jax.numpy as jnp
        import rlax

        shape = (_STATES, 12)
        seen = {"reward": normal(*shape), "discount": jnp.full(shape, 0.9), "ratio": 1 + _uniform(*shape)}

        def loss(p: Any, x: Any, seen: Any) -> Any:
            return jnp.mean(jax.vmap(lambda y, s: make(rlax, y, s))((x @ p)[..., 0], seen) ** 2)

        return loss, normal(24, 1, scale=0.2), normal(_STATES, 13, 24), seen

    return made


PROGRAMS.update({f"learning.{name}": _per_state(make) for name, make in _LOSSES.items()})
PROGRAMS.update({f"learning.{name}": _of_time(make) for name, make in _OF_TIME.items()})

_RANKINGS = (
    "softmax_loss",
    "unique_softmax_loss",
    "listmle_loss",
    "pairwise_hinge_loss",
    "pairwise_logistic_loss",
    "pairwise_qr_loss",
    "pointwise_sigmoid_loss",
)


def _ranking(name: str) -> Callable[[], LibraryProgram]:
    """Returns a program: a ranking loss of 32 lists of 16 documents with labels from 0 to 4."""

    def made() -> LibraryProgram:
        import rax

        labels = integers(5, 32, 16).astype("float32") / (4 if name == "pointwise_sigmoid_loss" else 1)
        return (
            lambda p, x, y: getattr(rax, name)((x @ p)[..., 0], y),
            normal(24, 1, scale=0.2),
            normal(32, 16, 24),
            labels,
        )

    return made


PROGRAMS.update({f"learning.{name}": _ranking(name) for name in _RANKINGS})


@program
def sinkhorn() -> LibraryProgram:
    from ott.geometry import pointcloud
    from ott.solvers import linear

    def loss(p: Any, x: Any, y: Any) -> Any:
        made = linear.solve(
            pointcloud.PointCloud(x @ p, y, epsilon=0.5), max_iterations=20, min_iterations=20
        )
        return made.reg_ot_cost

    return loss, normal(8, 4, scale=0.3), normal(32, 8), normal(32, 4, seed=1)


@program
def soft_sort() -> LibraryProgram:
    """OTT's soft sort, without starting from sorted values (its default): JAX cannot differentiate that loop, split or
    not. It has more entropy than by default; otherwise the implicit gradient's solver fails without LLVM's optimizer,
    also on one device."""
    from ott.initializers.linear.initializers import DefaultInitializer
    from ott.tools import soft_sort

    def loss(p: Any, x: Any) -> Any:
        how = {
            "epsilon": 0.1,
            "max_iterations": 10,
            "min_iterations": 10,
            "initializer": DefaultInitializer(),
        }
        return (soft_sort.sort(x @ p, axis=-1, **how) ** 2).mean()

    return loss, normal(8, 12, scale=0.3), normal(16, 8)


@program
def soft_dtw() -> LibraryProgram:
    import jax
    from ott.math import utils  # OTT's soft minimum

    def loss(p: Any, x: Any, y: Any) -> Any:
        return jax.vmap(lambda a, b: utils.softmin((a[:, None] - b[None]) ** 2, gamma=0.1))(x @ p, y).mean()

    return loss, normal(8, 12, scale=0.3), normal(16, 8), normal(16, 12, seed=1)


@program
def monte_carlo_tree_search() -> LibraryProgram:
    """DeepMind's MCTX computes targets for a policy."""
    import jax
    import jax.numpy as jnp
    import mctx

    def loss(p: Any, x: Any) -> Any:
        logits, value = (x @ p["policy"]), (x @ p["value"])[:, 0]
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=x)

        def step(p: Any, key: Any, action: Any, state: Any) -> Any:
            state = jnp.tanh(state + 0.1 * action[:, None])
            out = mctx.RecurrentFnOutput(
                reward=state[:, 0],
                discount=jnp.full(action.shape, 0.9),
                prior_logits=state @ p["policy"],
                value=(state @ p["value"])[:, 0],
            )
            return out, state

        found = mctx.gumbel_muzero_policy(p, jax.random.key(0), root, step, num_simulations=4)
        target = jax.lax.stop_gradient(found.action_weights)
        return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(logits), -1))

    return (
        loss,
        {"policy": normal(16, 4, scale=0.3), "value": normal(16, 1, seed=1, scale=0.3)},
        normal(32, 16),
    )
