"""Keras and Keras Hub on JAX, through ``stateless_call``."""

from __future__ import annotations

from typing import Any

from bench.programs.catalog import LibraryProgram, integers, normal, program


def _program(model: Any, *inputs: Any) -> LibraryProgram:
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


def _decoder(made: Any) -> LibraryProgram:
    """A language model of Keras Hub with 64 tokens, on 8 sentences of 16."""
    import jax.numpy as jnp

    return _program(made, {"token_ids": integers(64, 8, 16), "padding_mask": jnp.ones((8, 16), "int32")})


@program
def mlp() -> LibraryProgram:
    import keras

    return _program(keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.Dense(8)]), normal(32, 16))


@program
def mobilenet_v2() -> LibraryProgram:
    import keras

    made = keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3), classes=10, alpha=0.35)
    return _program(made, normal(8, 32, 32, 3))


@program
def efficientnet() -> LibraryProgram:
    import keras

    return _program(
        keras.applications.EfficientNetB0(weights=None, input_shape=(32, 32, 3), classes=10),
        normal(8, 32, 32, 3),
    )


@program
def convnext() -> LibraryProgram:
    import keras

    return _program(
        keras.applications.ConvNeXtTiny(weights=None, input_shape=(32, 32, 3), classes=10),
        normal(8, 32, 32, 3),
    )


@program
def lstm() -> LibraryProgram:
    import keras

    return _program(
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
    return _program(keras.Model(q, keras.layers.LayerNormalization()(made + q)), normal(8, 12, 32))


@program
def hub_bert() -> LibraryProgram:
    import jax.numpy as jnp
    import keras_hub

    made = keras_hub.models.BertBackbone(
        vocabulary_size=64,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=16,
    )
    inputs = {
        "token_ids": integers(64, 8, 16),
        "padding_mask": jnp.ones((8, 16), "int32"),
        "segment_ids": jnp.zeros((8, 16), "int32"),
    }
    return _program(made, inputs)


@program
def hub_gemma() -> LibraryProgram:
    import keras_hub

    made = keras_hub.models.GemmaBackbone(
        vocabulary_size=64,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=32,
        intermediate_dim=128,
        head_dim=8,
    )
    return _decoder(made)


@program
def hub_llama() -> LibraryProgram:
    import keras_hub

    made = keras_hub.models.Llama3Backbone(
        vocabulary_size=64,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
    )
    return _decoder(made)


@program
def hub_mixtral() -> LibraryProgram:
    import keras_hub

    made = keras_hub.models.MixtralBackbone(
        vocabulary_size=64,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        num_experts=4,
    )
    return _decoder(made)
