"""dm-haiku: its networks and its recurrent cores, with and without state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.programs.catalog import PROGRAMS, LibraryProgram, integers, normal, program


def _stateless(net: Callable[..., Any], x: Any) -> LibraryProgram:
    import haiku as hk
    import jax
    import jax.numpy as jnp

    f = hk.without_apply_rng(hk.transform(net))
    params = f.init(jax.random.key(0), x)
    return lambda p, x: jnp.mean(f.apply(p, x) ** 2), params, x


def _stateful(net: Callable[..., Any], x: Any) -> LibraryProgram:
    import haiku as hk
    import jax
    import jax.numpy as jnp

    f = hk.without_apply_rng(hk.transform_with_state(net))
    params, state = f.init(jax.random.key(0), x)

    def loss(p: Any, x: Any, state: Any) -> Any:
        y, new = f.apply(p, state, x)
        return jnp.mean((y - 1.0) ** 2), new

    return loss, params, x, state


@program
def mlp() -> LibraryProgram:
    import haiku as hk

    return _stateless(lambda x: hk.nets.MLP([64, 32, 16])(x), normal(32, 24))


@program
def resnet18() -> LibraryProgram:
    import haiku as hk

    return _stateful(lambda x: hk.nets.ResNet18(10)(x, is_training=True), normal(8, 32, 32, 3))


@program
def mobilenet() -> LibraryProgram:
    import haiku as hk

    return _stateful(lambda x: hk.nets.MobileNetV1(num_classes=10)(x, is_training=True), normal(8, 32, 32, 3))


@program
def lstm() -> LibraryProgram:
    import haiku as hk

    def net(x: Any) -> Any:
        core = hk.LSTM(32)
        return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]

    return _stateless(net, normal(12, 16, 24))


@program
def gru_static() -> LibraryProgram:
    import haiku as hk

    def net(x: Any) -> Any:
        core = hk.GRU(32)
        return hk.static_unroll(core, x, core.initial_state(x.shape[1]))[0]

    return _stateless(net, normal(6, 16, 24))


@program
def attention() -> LibraryProgram:
    import haiku as hk

    def net(x: Any) -> Any:
        made = hk.MultiHeadAttention(4, 8, w_init=hk.initializers.VarianceScaling(1.0))(x, x, x)
        return hk.LayerNorm(-1, True, True)(made + x)

    return _stateless(net, normal(8, 16, 32))


@program
def vqvae() -> LibraryProgram:
    import haiku as hk

    def net(x: Any, is_training: bool = True) -> Any:
        h = hk.Conv2D(16, 4, stride=2)(x)
        q = hk.nets.VectorQuantizerEMA(16, 32, 0.25, 0.99)(h, is_training)
        return hk.Conv2DTranspose(3, 4, stride=2)(q["quantize"])

    return _stateful(net, normal(8, 16, 16, 3))


@program
def embedding() -> LibraryProgram:
    import haiku as hk

    return _stateless(lambda t: hk.Linear(16)(hk.Embed(128, 32)(t)), integers(128, 16, 24))


@program
def separable_conv() -> LibraryProgram:
    import haiku as hk

    def net(x: Any) -> Any:
        h = hk.SeparableDepthwiseConv2D(channel_multiplier=2, kernel_shape=3)(x)
        return hk.avg_pool(hk.GroupNorm(4)(h), (1, 2, 2, 1), (1, 2, 2, 1), "SAME")

    return _stateless(net, normal(8, 16, 16, 16))


def _layer(name: str, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Returns a program: one of Haiku's modules between two linear layers."""

    def net(x: Any) -> Any:
        import haiku as hk

        return hk.Linear(8)(getattr(hk, name)(*args, **kwargs)(hk.Linear(x.shape[-1])(x)))

    return net


_IMAGE = (8, 12, 12, 8)
_LAYERS: Mapping[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "conv1d": ((8, 16, 8), _layer("Conv1D", 16, 3, rate=2)),
    "conv3d": ((8, 6, 6, 6, 4), _layer("Conv3D", 8, 3, stride=2)),
    "conv3d_transpose": ((8, 4, 4, 4, 4), _layer("Conv3DTranspose", 8, 2, stride=2)),
    "depthwise_conv": (_IMAGE, _layer("DepthwiseConv2D", 2, 3)),
    "group_norm": (_IMAGE, _layer("GroupNorm", 4)),
    "instance_norm": (_IMAGE, _layer("InstanceNorm", True, True)),
    "rms_norm": ((32, 24), _layer("RMSNorm", -1)),
    "max_pool": (_IMAGE, _layer("MaxPool", 2, 2, "SAME")),
}
PROGRAMS.update(
    {
        f"haiku.{k}": lambda net=net, shape=shape: _stateless(net, normal(*shape))
        for k, (shape, net) in _LAYERS.items()
    }
)


@program
def deep_rnn() -> LibraryProgram:
    import haiku as hk

    def net(x: Any) -> Any:
        core = hk.deep_rnn_with_skip_connections([hk.LSTM(16), hk.GRU(16)])
        return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]

    return _stateless(net, normal(6, 16, 16))


@program
def conv_lstm() -> LibraryProgram:
    import haiku as hk

    def net(x: Any) -> Any:
        core = hk.Conv2DLSTM((8, 8), 8, 3)
        return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]

    return _stateless(net, normal(4, 8, 8, 8, 4))


@program
def reset_core() -> LibraryProgram:
    """A recurrence that restarts when a flag is set, as in RL agents."""
    import haiku as hk

    def net(x: Any) -> Any:
        core = hk.ResetCore(hk.LSTM(16))
        start = x[..., 0] > 1.0
        return hk.dynamic_unroll(core, (x, start), core.initial_state(x.shape[1]))[0]

    return _stateless(net, normal(6, 16, 8))


@program
def layer_stack() -> LibraryProgram:
    import haiku as hk
    import jax

    def block(x: Any) -> Any:
        return x + hk.Linear(32)(jax.nn.gelu(hk.Linear(64)(hk.LayerNorm(-1, True, True)(x))))

    return _stateless(lambda x: hk.experimental.layer_stack(4)(hk.remat(block))(x), normal(16, 32))


@program
def spectral_norm() -> LibraryProgram:
    import haiku as hk

    def net(x: Any, is_training: bool = True) -> Any:
        w = hk.SpectralNorm(name="norm")(hk.get_parameter("w", (24, 16), init=hk.initializers.RandomNormal()))
        return x @ w

    return _stateful(net, normal(16, 24))
