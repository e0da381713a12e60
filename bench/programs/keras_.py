"""Keras and Keras Hub on JAX, through ``stateless_call``."""

from __future__ import annotations

from typing import Any

from bench.programs.catalog import LibraryProgram, integers, normal, program


def trained(model: Any, *inputs: Any) -> LibraryProgram:
    """Returns a program: the mean square of all outputs of the model in training."""
    import jax
    import jax.numpy as jnp

    given = inputs[0] if len(inputs) == 1 else list(inputs)
    model(given)
    trained = [v.value for v in model.trainable_variables]
    rest = [v.value for v in model.non_trainable_variables]

    def loss(p: Any, rest: Any, *inputs: Any) -> Any:
        y, rest = model.stateless_call(
            p, rest, inputs[0] if len(inputs) == 1 else list(inputs), training=True
        )
        return sum(jnp.mean(jnp.square(t)) for t in jax.tree.leaves(y)), rest

    return loss, trained, rest, *inputs


@program
def mlp() -> LibraryProgram:
    import keras

    return trained(keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(8)]), normal(32, 16))


@program
def mobilenet_v2() -> LibraryProgram:
    import keras

    made = keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3), classes=10, alpha=0.35)
    return trained(made, normal(8, 32, 32, 3))


@program
def efficientnet() -> LibraryProgram:
    import keras

    return trained(
        keras.applications.EfficientNetB0(weights=None, input_shape=(32, 32, 3), classes=10),
        normal(8, 32, 32, 3),
    )


@program
def convnext() -> LibraryProgram:
    import keras

    return trained(
        keras.applications.ConvNeXtTiny(weights=None, input_shape=(32, 32, 3), classes=10),
        normal(8, 32, 32, 3),
    )


@program
def lstm() -> LibraryProgram:
    import keras

    return trained(
        keras.Sequential(
            [
                keras.layers.Embedding(64, 16),
                keras.layers.LSTM(32, return_sequences=True),
                keras.layers.GRU(16),
            ]
        ),
        integers(64, 16, 12),
    )


@program
def attention() -> LibraryProgram:
    import keras

    q = keras.Input((12, 32))
    made = keras.layers.MultiHeadAttention(4, 8)(q, q)
    return trained(keras.Model(q, keras.layers.LayerNormalization()(made + q)), normal(8, 12, 32))
