"""flax.linen: layers with state, scans, recurrent cells, and its own attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.programs.catalog import PROGRAMS, LibraryProgram, integers, normal, program


def _program(module: Any, *inputs: Any) -> LibraryProgram:
    """Returns a program: the mean square of the module's output. Collections other than params are its state."""
    import jax
    import jax.numpy as jnp

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = dict(jax.jit(module.init)(keys, *inputs))
    params = variables.pop("params")

    def loss(p: Any, state: Any, *inputs: Any) -> Any:
        y, new = module.apply(
            {"params": p, **state}, *inputs, mutable=list(variables), rngs={"dropout": jax.random.key(2)}
        )
        return jnp.mean(jnp.square(jnp.asarray(y, jnp.float32))), new

    return loss, params, variables, *inputs


@program
def batch_norm_cnn() -> LibraryProgram:
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for width in (16, 32):
                x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(width, (3, 3), strides=2)(x)))
            return nn.Dense(10)(x.mean((1, 2)))

    return _program(Net(), normal(16, 16, 16, 3))


@program
def spectral_norm() -> LibraryProgram:
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.SpectralNorm(nn.Dense(32))(x, update_stats=True)

    return _program(Net(), normal(16, 24))


@program
def lstm() -> LibraryProgram:
    import flax.linen as nn

    return _program(nn.RNN(nn.OptimizedLSTMCell(32)), normal(16, 12, 24))


@program
def bidirectional() -> LibraryProgram:
    import flax.linen as nn

    return _program(nn.Bidirectional(nn.RNN(nn.GRUCell(16)), nn.RNN(nn.GRUCell(16))), normal(16, 12, 24))


@program
def conv_lstm() -> LibraryProgram:
    import flax.linen as nn

    return _program(nn.RNN(nn.ConvLSTMCell(8, (3, 3))), normal(8, 4, 8, 8, 4))


@program
def dropout_mlp() -> LibraryProgram:
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(8)(nn.Dropout(0.5, deterministic=False)(nn.gelu(nn.Dense(64)(x))))

    return _program(Net(), normal(32, 16))


@program
def scanned_transformer() -> LibraryProgram:
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            x = x + nn.SelfAttention(4)(nn.LayerNorm()(x))
            return x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x)))), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x = nn.Embed(64, 32)(tokens)
            blocks = nn.scan(
                nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return nn.Dense(64)(blocks()(x, None)[0])

    return _program(Net(), integers(64, 8, 16))


@program
def transposed_conv() -> LibraryProgram:
    import flax.linen as nn

    return _program(
        nn.Sequential([nn.ConvTranspose(16, (4, 4), strides=(2, 2)), nn.relu, nn.Conv(3, (3, 3))]),
        normal(8, 8, 8, 8),
    )


@program
def grouped_conv() -> LibraryProgram:
    import flax.linen as nn

    return _program(nn.Conv(32, (3, 3), feature_group_count=4), normal(8, 8, 8, 16))


@program
def weight_norm() -> LibraryProgram:
    import flax.linen as nn

    return _program(nn.WeightNorm(nn.Dense(32)), normal(16, 24))


@program
def einsum() -> LibraryProgram:
    import flax.linen as nn

    return _program(nn.Einsum((24, 4, 8), "abc,cde->abde"), normal(8, 12, 24))


def _cell(name: str, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda nn: nn.RNN(getattr(nn, name)(*args, **kwargs))


_SEQUENCE, _IMAGE = (8, 12, 16), (8, 12, 12, 8)
_MODULES: Mapping[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "simple_cell": (_SEQUENCE, _cell("SimpleCell", 16)),
    "minimal_gated_cell": (_SEQUENCE, _cell("MGUCell", 16)),
    "conv_local": ((8, 8, 8, 4), lambda nn: nn.ConvLocal(8, (3, 3))),
    "conv_circular": (_IMAGE, lambda nn: nn.Conv(16, (3, 3), padding="CIRCULAR")),
    "conv_masked_causal": (_SEQUENCE, lambda nn: nn.Conv(16, (3,), padding="CAUSAL", kernel_dilation=2)),
    "conv_batched": ((2, 4, 12, 12, 4), lambda nn: nn.Conv(8, (3, 3), strides=2)),
    "depthwise_conv": (_IMAGE, lambda nn: nn.Conv(16, (3, 3), feature_group_count=8)),
    "dense_general": (_SEQUENCE, lambda nn: nn.DenseGeneral((4, 8), axis=(-2, -1))),
    "group_norm": (_IMAGE, lambda nn: nn.Sequential([nn.Conv(16, (1, 1)), nn.GroupNorm(4), nn.PReLU()])),
    "instance_norm": (_IMAGE, lambda nn: nn.Sequential([nn.Conv(16, (1, 1)), nn.InstanceNorm()])),
    "rms_norm": (_SEQUENCE, lambda nn: nn.Sequential([nn.Dense(32), nn.RMSNorm(), nn.swish])),
    "attention": (
        _SEQUENCE,
        lambda nn: nn.MultiHeadDotProductAttention(4, qkv_features=32, normalize_qk=True),
    ),
}
PROGRAMS.update(
    {
        f"linen.{k}": lambda make=make, shape=shape: _of_module(make, shape)
        for k, (shape, make) in _MODULES.items()
    }
)


def _of_module(make: Callable[[Any], Any], shape: tuple[int, ...]) -> LibraryProgram:
    import flax.linen as nn

    return _program(make(nn), normal(*shape))


@program
def ensemble() -> LibraryProgram:
    """Four networks in parallel, by nn.vmap."""
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            many = nn.vmap(
                nn.Dense,
                in_axes=None,
                out_axes=0,
                axis_size=4,
                variable_axes={"params": 0},
                split_rngs={"params": True},
            )
            return many(16)(nn.relu(nn.Dense(32)(x)))

    return _program(Net(), normal(32, 24))


@program
def remat_scan() -> LibraryProgram:
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x + nn.Dense(16)(nn.tanh(nn.Dense(32)(x)))

    return _program(nn.remat_scan(Block, lengths=(2, 3))(), normal(32, 16))


@program
def tied_embedding() -> LibraryProgram:
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            embed = nn.Embed(64, 16)
            return embed.attend(nn.relu(nn.Dense(16)(embed(tokens))))

    return _program(Net(), integers(64, 8, 12))
