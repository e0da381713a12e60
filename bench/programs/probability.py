"""Probability: distributions, bijectors and flows (Distrax, TensorFlow Probability, FlowJAX), inference (NumPyro)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.programs.catalog import PROGRAMS, LibraryProgram, integers, normal, program


def _key() -> Any:
    import jax

    return jax.random.key(0)


_FLOWS: Mapping[str, Mapping[str, Any]] = {
    "coupling_flow": {},
    "masked_autoregressive_flow": {"nn_width": 16},
    "block_neural_autoregressive_flow": {"nn_block_dim": 4},
    "planar_flow": {"width_size": 16, "depth": 1},
    "triangular_spline_flow": {"knots": 4},
}


def _flow(name: str, settings: Mapping[str, Any]) -> Callable[[], LibraryProgram]:
    def made() -> LibraryProgram:
        import equinox as eqx
        import jax
        from flowjax import flows
        from flowjax.distributions import Normal
        from paramax import NonTrainable, unwrap

        count = {} if name.startswith("block") else {"flow_layers": 2}
        invert = {} if name == "coupling_flow" else {"invert": name != "planar_flow"}
        flow = getattr(flows, name)(
            _key(),
            base_dist=Normal(jax.numpy.zeros(6)),
            **count,
            **invert,
            **settings,
            **({"cond_dim": 3} if name == "planar_flow" else {}),
        )
        params, static = eqx.partition(
            flow, eqx.is_inexact_array, is_leaf=lambda x: isinstance(x, NonTrainable)
        )
        condition = (normal(32, 3, seed=2),) if name == "planar_flow" else ()

        def loss(p: Any, x: Any, *given: Any) -> Any:
            made = unwrap(eqx.combine(p, static))
            if name == "planar_flow":  # it has no inverse, so its own samples are used
                return (made.sample(jax.random.key(1), (), *given) ** 2).mean()
            return -made.log_prob(x, *given).mean()

        return loss, params, normal(32, 6), *condition

    return made


PROGRAMS.update({f"probability.{name}": _flow(name, settings) for name, settings in _FLOWS.items()})


def _distrax(
    make: Callable[[Any, Any], Any], shapes: Mapping[str, tuple[int, ...]]
) -> Callable[[], LibraryProgram]:
    """Returns a program: maximum likelihood of a bijector over a normal distribution."""

    def made() -> LibraryProgram:
        import distrax
        import jax.numpy as jnp

        def loss(p: Any, x: Any) -> Any:
            base = distrax.MultivariateNormalDiag(jnp.zeros(8), jnp.ones(8))
            return -distrax.Transformed(base, make(distrax, p)).log_prob(x).mean()

        params = {k: normal(*s, seed=i, scale=0.2) for i, (k, s) in enumerate(shapes.items())}
        return loss, params, normal(32, 8, seed=9, scale=0.3)

    return made


def _spline(d: Any, p: Any) -> Any:
    import jax.numpy as jnp

    def conditioned(masked: Any) -> Any:
        return jnp.reshape(jnp.tanh(masked @ p["w"]) @ p["v"], (*masked.shape, 13))

    def spline(numbers: Any) -> Any:
        return d.RationalQuadraticSpline(numbers, range_min=-3.0, range_max=3.0)

    return d.MaskedCoupling(mask=jnp.arange(8) % 2 == 0, bijector=spline, conditioner=conditioned)


def _split(d: Any, p: Any) -> Any:
    import jax.numpy as jnp

    def conditioned(x: Any) -> Any:
        return jnp.tanh(x @ p["w"]) @ p["v"]

    def affine(numbers: Any) -> Any:
        return d.Block(d.ScalarAffine(shift=numbers[..., :4], log_scale=numbers[..., 4:]), 1)

    return d.SplitCoupling(split_index=4, event_ndims=1, conditioner=conditioned, bijector=affine)


def _lower_upper(d: Any, p: Any) -> Any:
    import jax.numpy as jnp

    return d.LowerUpperTriangularAffine(p["matrix"] + 2 * jnp.eye(8), p["bias"])


PROGRAMS["probability.spline_coupling"] = _distrax(_spline, {"w": (8, 16), "v": (16, 8 * 13)})
PROGRAMS["probability.split_coupling"] = _distrax(_split, {"w": (4, 16), "v": (16, 8)})
PROGRAMS["probability.lower_upper_affine"] = _distrax(_lower_upper, {"matrix": (8, 8), "bias": (8,)})


def _likelihood(
    make: Callable[[Any, Any], Any], shapes: Mapping[str, tuple[int, ...]], data: Callable[[], Any]
) -> Callable[[], LibraryProgram]:
    """Returns a program: maximum likelihood of a distribution of TensorFlow Probability on JAX."""

    def made() -> LibraryProgram:
        from tensorflow_probability.substrates import jax as tfp

        params = {k: normal(*s, seed=i, scale=0.2) for i, (k, s) in enumerate(shapes.items())}
        return lambda p, x: -make(tfp, p).log_prob(x).mean(), params, data()

    return made


_DISTRIBUTIONS: Mapping[
    str, tuple[Callable[[Any, Any], Any], Mapping[str, tuple[int, ...]], Callable[[], Any]]
] = {
    "student_t": (
        lambda t, p: t.distributions.StudentT(3.0 + p["df"] ** 2, p["loc"], 1 + p["scale"] ** 2),
        {"df": (8,), "loc": (8,), "scale": (8,)},
        lambda: normal(64, 8),
    ),
    "negative_binomial": (
        lambda t, p: t.distributions.NegativeBinomial(3.0 + p["count"] ** 2, logits=p["logits"]),
        {"count": (8,), "logits": (8,)},
        lambda: integers(9, 64, 8).astype("float32"),
    ),
    "full_gaussian": (
        lambda t, p: t.distributions.MultivariateNormalTriL(
            p["loc"], t.bijectors.FillScaleTriL()(p["scale"])
        ),
        {"loc": (6,), "scale": (21,)},
        lambda: normal(64, 6),
    ),
    "hidden_markov": (
        lambda t, p: t.distributions.HiddenMarkovModel(
            t.distributions.Categorical(logits=p["first"]),
            t.distributions.Categorical(logits=p["next"]),
            t.distributions.Normal(p["loc"], 1.0),
            num_steps=10,
        ),
        {"first": (4,), "next": (4, 4), "loc": (4,)},
        lambda: normal(32, 10),
    ),
    "gaussian_mixture": (
        lambda t, p: t.distributions.MixtureSameFamily(
            t.distributions.Categorical(logits=p["logits"]),
            t.distributions.MultivariateNormalDiag(p["loc"], 1 + p["scale"] ** 2),
        ),
        {"logits": (5,), "loc": (5, 8), "scale": (5, 8)},
        lambda: normal(64, 8),
    ),
    "real_nvp": (
        lambda t, p: t.distributions.TransformedDistribution(
            t.distributions.MultivariateNormalDiag(p["loc"], 1 + p["scale"] ** 2),
            t.bijectors.RealNVP(num_masked=4, shift_and_log_scale_fn=lambda x, n: (x @ p["w"], x @ p["v"])),
        ),
        {"loc": (8,), "scale": (8,), "w": (4, 4), "v": (4, 4)},
        lambda: normal(64, 8),
    ),
}
PROGRAMS.update({f"probability.{name}": _likelihood(*of) for name, of in _DISTRIBUTIONS.items()})


def _numpyro(make: Callable[[Any, Any], None], guide: str) -> Callable[[], LibraryProgram]:
    """Returns a program: the evidence lower bound of a model under one of NumPyro's guides."""

    def made() -> LibraryProgram:
        import numpyro
        from numpyro.infer import SVI, Trace_ELBO, autoguide

        by, x, y = getattr(autoguide, guide)(make), normal(64, 8), normal(64, seed=1)
        svi = SVI(make, by, numpyro.optim.Adam(1e-2), Trace_ELBO())
        params = svi.get_params(svi.init(_key(), x, y))
        return lambda p, x, y: Trace_ELBO().loss(_key(), p, make, by, x, y), params, x, y

    return made


def _hierarchical(x: Any, y: Any) -> None:
    import numpyro
    import numpyro.distributions as dist

    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    with numpyro.plate("features", x.shape[1]):
        w = numpyro.sample("w", dist.Normal(0.0, scale))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, x @ w, 1.0), obs=y)


def _classes(x: Any, y: Any) -> None:
    import numpyro
    import numpyro.distributions as dist

    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=(y > 0).astype("int32"))


PROGRAMS["probability.hierarchical"] = _numpyro(_hierarchical, "AutoMultivariateNormal")
PROGRAMS["probability.low_rank_guide"] = _numpyro(_classes, "AutoLowRankMultivariateNormal")
PROGRAMS["probability.laplace_guide"] = _numpyro(_classes, "AutoDiagonalNormal")


@program
def deep_kernel() -> LibraryProgram:
    """A Gaussian process of TinyGP on the output of a layer."""
    import jax.numpy as jnp
    import tinygp

    def loss(p: Any, x: Any, y: Any) -> Any:
        kernel = tinygp.transforms.Transform(lambda x: jnp.tanh(x @ p["w"]), tinygp.kernels.ExpSquared())
        return -tinygp.GaussianProcess(kernel, x, diag=jnp.exp(p["noise"])).log_probability(y)

    return loss, {"w": normal(8, 4, scale=0.4), "noise": jnp.float32(0.0)}, normal(48, 8), normal(48, seed=1)


@program
def quasiseparable() -> LibraryProgram:
    """TinyGP's kernel in one dimension, solved by a scan."""
    import jax.numpy as jnp
    import tinygp

    def loss(p: Any, t: Any, y: Any) -> Any:
        kernel = tinygp.kernels.quasisep.Matern32(scale=jnp.exp(p["length"]), sigma=jnp.exp(p["scale"]))
        return -tinygp.GaussianProcess(kernel, t, diag=0.1, assume_sorted=True).log_probability(y)

    return (
        loss,
        {"length": jnp.float32(0.0), "scale": jnp.float32(0.0)},
        jnp.linspace(0.0, 6.0, 64),
        normal(64, seed=1),
    )
