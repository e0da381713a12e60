"""Equinox modules as they are: leaves that are not arrays are static."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.programs.catalog import PROGRAMS, LibraryProgram, integers, normal, program


def _program(model: Any, x: Any, *, keyed: bool = False) -> LibraryProgram:
    import jax
    import jax.numpy as jnp

    def loss(model: Any, x: Any) -> Any:
        if keyed:
            keys = jax.random.split(jax.random.key(0), x.shape[0])
            return jnp.mean(jax.vmap(lambda x, k: model(x, key=k))(x, keys) ** 2)
        return jnp.mean(jax.vmap(model)(x) ** 2)

    return loss, model, x


def _key() -> Any:
    import jax

    return jax.random.key(0)


@program
def mlp() -> LibraryProgram:
    import equinox as eqx

    return _program(eqx.nn.MLP(24, 8, 64, 2, key=_key()), normal(32, 24))


@program
def conv_net() -> LibraryProgram:
    import equinox as eqx
    import jax

    a, b = jax.random.split(_key())
    net = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 16, 3, padding=1, key=a),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(16, 8, 3, key=b),
        ]
    )
    return _program(net, normal(8, 3, 16, 16))


@program
def transposed_conv() -> LibraryProgram:
    import equinox as eqx

    return _program(eqx.nn.ConvTranspose2d(8, 4, 4, stride=2, key=_key()), normal(8, 8, 8, 8))


@program
def attention_with_dropout() -> LibraryProgram:
    import equinox as eqx

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        dropout: eqx.nn.Dropout

        def __call__(self, x: Any, key: Any) -> Any:
            return self.dropout(self.attention(x, x, x), key=key)

    return _program(
        Block(eqx.nn.MultiheadAttention(4, 32, key=_key()), eqx.nn.Dropout(0.1)),
        normal(8, 12, 32),
        keyed=True,
    )


@program
def gru() -> LibraryProgram:
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    class Net(eqx.Module):
        cell: eqx.nn.GRUCell

        def __call__(self, x: Any) -> Any:
            return jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(32), x)[0]

    return _program(Net(eqx.nn.GRUCell(24, 32, key=_key())), normal(16, 12, 24))


@program
def batch_norm() -> LibraryProgram:
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    net, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(24, "batch", mode="batch")
    linear = eqx.nn.Linear(24, 24, key=_key())

    def loss(model: Any, state: Any, x: Any) -> Any:
        linear, norm = model
        y, new = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            jax.vmap(linear)(x), state
        )
        return jnp.mean(jnp.square(y - x)), new

    return loss, (linear, net), state, normal(32, 24)


@program
def embedding() -> LibraryProgram:
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    def loss(model: Any, tokens: Any) -> Any:
        return jnp.mean(jax.vmap(jax.vmap(model))(tokens) ** 2)

    return loss, eqx.nn.Embedding(64, 32, key=_key()), integers(64, 16, 12)


@program
def spectral_norm() -> LibraryProgram:
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    linear = eqx.nn.Linear(24, 32, key=_key())
    net, state = eqx.nn.make_with_state(eqx.nn.SpectralNorm)(linear, "weight", key=_key())

    def loss(model: Any, state: Any, x: Any) -> Any:
        y, new = jax.vmap(model, in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean(y**2), new

    return loss, net, state, normal(16, 24)


_LAYERS: Mapping[str, tuple[tuple[int, ...], Callable[[Any, Any], Any]]] = {
    "conv1d": ((8, 4, 16), lambda nn, k: nn.Conv1d(4, 8, 3, dilation=2, key=k)),
    "conv3d_grouped": ((8, 4, 6, 6, 6), lambda nn, k: nn.Conv3d(4, 8, 3, groups=2, key=k)),
    "conv_transpose1d": ((8, 4, 12), lambda nn, k: nn.ConvTranspose1d(4, 8, 3, stride=2, key=k)),
    "adaptive_pool": (
        (8, 4, 12, 12),
        lambda nn, k: nn.Sequential([nn.Conv2d(4, 8, 3, key=k), nn.AdaptiveAvgPool2d(4)]),
    ),
    "group_norm": ((8, 8, 6, 6), lambda nn, k: nn.GroupNorm(4, 8)),
    "layer_norm": ((32, 24), lambda nn, k: nn.Sequential([nn.Linear(24, 24, key=k), nn.LayerNorm(24)])),
    "weight_norm": ((32, 24), lambda nn, k: nn.WeightNorm(nn.Linear(24, 16, key=k))),
}
PROGRAMS.update(
    {
        f"equinox.{k}": lambda make=make, shape=shape: _of_layer(make, shape)
        for k, (shape, make) in _LAYERS.items()
    }
)


def _of_layer(make: Callable[[Any, Any], Any], shape: tuple[int, ...]) -> LibraryProgram:
    import equinox as eqx

    return _program(make(eqx.nn, _key()), normal(*shape))


@program
def rotary_attention() -> LibraryProgram:
    import equinox as eqx
    import jax

    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        rope: eqx.nn.RotaryPositionalEmbedding

        def __call__(self, x: Any) -> Any:
            def turned(q: Any, k: Any, v: Any) -> Any:
                turn = jax.vmap(self.rope, in_axes=1, out_axes=1)
                return turn(q), turn(k), v

            return self.attention(x, x, x, process_heads=turned)

    block = Block(eqx.nn.MultiheadAttention(4, 32, key=_key()), eqx.nn.RotaryPositionalEmbedding(8))
    return _program(block, normal(8, 12, 32))


@program
def lstm() -> LibraryProgram:
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    class Net(eqx.Module):
        cell: eqx.nn.LSTMCell

        def __call__(self, x: Any) -> Any:
            start = (jnp.zeros(24), jnp.zeros(24))
            return jax.lax.scan(lambda h, x: (self.cell(x, h), None), start, x)[0][0]

    return _program(Net(eqx.nn.LSTMCell(16, 24, key=_key())), normal(16, 12, 16))
