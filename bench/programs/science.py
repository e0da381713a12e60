"""Probabilities, graphs, symmetries, molecules and differential equations."""

from __future__ import annotations

from typing import Any

from bench.programs.catalog import LibraryProgram, integers, normal, program


def _key() -> Any:
    import jax

    return jax.random.key(0)


@program
def distrax_flow() -> LibraryProgram:
    import distrax
    import jax.numpy as jnp

    def loss(p: Any, x: Any) -> Any:
        base = distrax.MultivariateNormalDiag(jnp.zeros(8), jnp.ones(8))
        flow = distrax.Block(distrax.ScalarAffine(p["shift"], log_scale=p["log_scale"]), 1)
        return -distrax.Transformed(base, flow).log_prob(x).mean()

    return loss, {"shift": normal(8), "log_scale": normal(8, seed=1, scale=0.1)}, normal(64, 8)


@program
def distrax_mixture() -> LibraryProgram:
    import distrax

    def loss(p: Any, x: Any) -> Any:
        parts = distrax.Normal(p["loc"], 1.0)
        return -distrax.MixtureSameFamily(distrax.Categorical(logits=p["logits"]), parts).log_prob(x).mean()

    return loss, {"loc": normal(8), "logits": normal(8, seed=1)}, normal(256)


@program
def numpyro_regression() -> LibraryProgram:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([16]).to_event(1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    guide, x, y = AutoNormal(model), normal(64, 16), normal(64, seed=1)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), Trace_ELBO())
    params = svi.get_params(svi.init(_key(), x, y))
    return lambda p, x, y: Trace_ELBO().loss(_key(), p, model, guide, x, y), params, x, y


@program
def jraph_network() -> LibraryProgram:
    import jax
    import jax.numpy as jnp
    import jraph

    senders, receivers = integers(32, 96), integers(32, 96, seed=1)

    def loss(p: Any, nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:
        graph = jraph.GraphsTuple(
            nodes=nodes,
            edges=edges,
            senders=senders,
            receivers=receivers,
            globals=None,
            n_node=jnp.array([32]),
            n_edge=jnp.array([96]),
        )
        net = jraph.GraphNetwork(
            update_edge_fn=lambda e, s, r, g: jax.nn.relu(jnp.concatenate([e, s, r], -1) @ p["edge"]),
            update_node_fn=lambda n, s, r, g: jnp.concatenate([n, s, r], -1) @ p["node"],
        )
        return jnp.mean(net(graph).nodes ** 2)

    params = {"edge": normal(40, 16, scale=0.1), "node": normal(48, 16, seed=1, scale=0.1)}
    return loss, params, normal(32, 16), normal(96, 8, seed=2), senders, receivers


@program
def jraph_gcn() -> LibraryProgram:
    import jax.numpy as jnp
    import jraph

    def loss(p: Any, nodes: Any, senders: Any, receivers: Any) -> Any:
        graph = jraph.GraphsTuple(
            nodes=nodes,
            edges=None,
            senders=senders,
            receivers=receivers,
            globals=None,
            n_node=jnp.array([32]),
            n_edge=jnp.array([96]),
        )
        layer = jraph.GraphConvolution(lambda n: n @ p, symmetric_normalization=True, add_self_edges=True)
        return jnp.mean(layer(graph).nodes ** 2)

    return loss, normal(16, 32, scale=0.2), normal(32, 16), integers(32, 96), integers(32, 96, seed=1)


@program
def e3nn_tensor_product() -> LibraryProgram:
    import e3nn_jax as e3nn
    import jax.numpy as jnp

    def features(x: Any) -> Any:
        return e3nn.IrrepsArray("8x0e + 8x1o", x)

    def loss(p: Any, x: Any) -> Any:
        direction = features(x).filter("1o").mul_to_axis()[:, 0]
        y = e3nn.tensor_product(features(x @ p), e3nn.spherical_harmonics("1o", direction, True))
        return jnp.mean(y.array**2)

    return loss, normal(32, 32, scale=0.2), normal(16, 32)


@program
def jax_md_energy() -> LibraryProgram:
    import jax
    import jax.numpy as jnp
    from jax_md import energy, space

    displacement, _ = space.periodic(4.0)

    def loss(p: Any, positions: Any) -> Any:
        f = energy.soft_sphere_pair(displacement, sigma=p["sigma"], epsilon=p["epsilon"])
        return jnp.mean(jax.vmap(f)(positions))

    positions = 4.0 * jax.random.uniform(_key(), (16, 24, 3))
    return loss, {"sigma": jnp.float32(1.0), "epsilon": jnp.float32(1.0)}, positions


@program
def diffrax_ode() -> LibraryProgram:
    import diffrax
    import jax
    import jax.numpy as jnp

    def loss(p: Any, x: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, a: jnp.tanh(y @ p["w"]))

        def solve(y: Any) -> Any:
            return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 0.1, y, max_steps=32).ys[0]

        return jnp.mean(jax.vmap(solve)(x) ** 2)

    return loss, {"w": normal(16, 16, scale=0.3)}, normal(32, 16)


@program
def diffrax_adaptive() -> LibraryProgram:
    import diffrax
    import jax.numpy as jnp

    def loss(p: Any, x: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, a: jnp.tanh(y @ p["w"]))
        steps = diffrax.PIDController(rtol=1e-3, atol=1e-4)
        made = diffrax.diffeqsolve(
            term,
            diffrax.Dopri5(),
            0.0,
            1.0,
            0.1,
            x,
            stepsize_controller=steps,
            max_steps=64,
            adjoint=diffrax.RecursiveCheckpointAdjoint(),
        )
        return jnp.mean(made.ys[0] ** 2)

    return loss, {"w": normal(16, 16, scale=0.3)}, normal(32, 16)


@program
def penzai_mlp() -> LibraryProgram:
    import jax.numpy as jnp
    from penzai import pz
    from penzai.models.simple_mlp import MLP

    model = MLP.from_config(name="mlp", init_base_rng=_key(), feature_sizes=[24, 64, 8])
    unbound, params = pz.unbind_params(model)
    frozen = {p.label: p.value for p in params}

    def loss(p: Any, x: Any) -> Any:
        bound = pz.bind_variables(unbound, [pz.ParameterValue(label=k, value=v) for k, v in p.items()])
        y = bound(pz.nx.wrap(x).tag("batch", "features"))
        return jnp.mean(y.untag("batch", "features").unwrap() ** 2)

    return loss, frozen, normal(32, 24)


@program
def tinygp_likelihood() -> LibraryProgram:
    import jax.numpy as jnp
    import tinygp

    def loss(p: Any, x: Any, y: Any) -> Any:
        kernel = jnp.exp(p["scale"]) * tinygp.kernels.Matern32(jnp.exp(p["length"]))
        return -tinygp.GaussianProcess(kernel, x, diag=0.1).log_probability(y)

    return loss, {"scale": jnp.float32(0.0), "length": jnp.float32(0.0)}, normal(64), normal(64, seed=1)


@program
def jaxopt_implicit() -> LibraryProgram:
    import jax.numpy as jnp
    import jaxopt

    def loss(p: Any, x: Any, y: Any) -> Any:
        # The data are arguments, because a custom rule that closes over tracers fails inside jax.jit.
        def ridge(w: Any, l2: Any, x: Any, y: Any) -> Any:
            return jnp.mean((x @ w - y) ** 2) + jnp.exp(l2) * jnp.sum(w**2)

        w = jaxopt.GradientDescent(ridge, maxiter=20, implicit_diff=True).run(jnp.zeros(8), p, x, y).params
        return jnp.mean((x @ w - y) ** 2)

    return loss, jnp.float32(0.0), normal(64, 8), normal(64, seed=1)
