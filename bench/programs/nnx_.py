"""flax.nnx modules as they are: their leaves include counters, keys and statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.programs.catalog import PROGRAMS, LibraryProgram, normal, program


def _program(make: Callable[[Any], Any], *inputs: Any) -> LibraryProgram:
    """Returns a program with the module's whole state as parameters, as nnx.split returns it."""
    import jax.numpy as jnp
    from flax import nnx

    graphdef, state = nnx.split(make(nnx.Rngs(0)))

    def loss(state: Any, *inputs: Any) -> Any:
        model = nnx.merge(graphdef, state, copy=True)
        return jnp.mean(model(*inputs) ** 2)

    return loss, state, *inputs


@program
def mlp_with_dropout() -> LibraryProgram:
    from flax import nnx

    return _program(
        lambda r: nnx.Sequential(
            nnx.Linear(24, 64, rngs=r), nnx.relu, nnx.Dropout(0.3, rngs=r), nnx.Linear(64, 8, rngs=r)
        ),
        normal(16, 24),
    )


@program
def batch_norm() -> LibraryProgram:
    from flax import nnx

    return _program(
        lambda r: nnx.Sequential(nnx.Linear(24, 32, rngs=r), nnx.BatchNorm(32, rngs=r), nnx.relu),
        normal(16, 24),
    )


@program
def attention() -> LibraryProgram:
    from flax import nnx

    return _program(lambda r: nnx.MultiHeadAttention(4, 32, decode=False, rngs=r), normal(8, 12, 32))


@program
def lora() -> LibraryProgram:
    from flax import nnx

    return _program(lambda r: nnx.LoRALinear(24, 32, lora_rank=4, rngs=r), normal(16, 24))


@program
def rnn() -> LibraryProgram:
    from flax import nnx

    return _program(lambda r: nnx.RNN(nnx.LSTMCell(24, 32, rngs=r)), normal(8, 12, 24))


_SEQUENCE, _IMAGE = (8, 12, 16), (8, 12, 12, 8)
_MODULES: Mapping[str, tuple[tuple[int, ...], Callable[[Any, Any], Any]]] = {
    "conv": (_IMAGE, lambda nnx, r: nnx.Conv(8, 16, (3, 3), strides=2, feature_group_count=2, rngs=r)),
    "conv_transpose": (_IMAGE, lambda nnx, r: nnx.ConvTranspose(8, 4, (3, 3), strides=(2, 2), rngs=r)),
    "einsum": (_SEQUENCE, lambda nnx, r: nnx.Einsum("abc,cde->abde", (16, 4, 8), (4, 8), rngs=r)),
    "linear_general": (_SEQUENCE, lambda nnx, r: nnx.LinearGeneral((12, 16), (4, 8), axis=(-2, -1), rngs=r)),
    "group_norm": (_IMAGE, lambda nnx, r: nnx.GroupNorm(8, num_groups=4, rngs=r)),
    "layer_norm": (_SEQUENCE, lambda nnx, r: nnx.LayerNorm(16, rngs=r)),
    "rms_norm": (_SEQUENCE, lambda nnx, r: nnx.RMSNorm(16, rngs=r)),
    "gru": (_SEQUENCE, lambda nnx, r: nnx.RNN(nnx.GRUCell(16, 24, rngs=r))),
    "bidirectional": (
        _SEQUENCE,
        lambda nnx, r: nnx.Bidirectional(
            nnx.RNN(nnx.SimpleCell(16, 16, rngs=r)), nnx.RNN(nnx.SimpleCell(16, 16, rngs=r))
        ),
    ),
    "prelu": (_SEQUENCE, lambda nnx, r: nnx.Sequential(nnx.Linear(16, 32, rngs=r), nnx.PReLU())),
}


def _of_module(make: Callable[[Any, Any], Any], shape: tuple[int, ...]) -> LibraryProgram:
    from flax import nnx

    return _program(lambda r: make(nnx, r), normal(*shape))


PROGRAMS.update(
    {
        f"nnx.{k}": lambda make=make, shape=shape: _of_module(make, shape)
        for k, (shape, make) in _MODULES.items()
    }
)


@program
def scanned_blocks() -> LibraryProgram:
    """Layers stacked by nnx.vmap, run by nnx.scan."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def layers(rngs: Any) -> Any:
                return nnx.Linear(16, 16, rngs=rngs)

            self.layers = layers(rngs)

        def __call__(self, x: Any) -> Any:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x: Any, layer: Any) -> Any:
                return nnx.tanh(layer(x)) + x

            return forward(x, self.layers)

    return _program(Net, normal(32, 16))
