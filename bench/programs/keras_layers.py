"""Every family of Keras layers, one by one: convolutions, recurrent layers, attention, norms, pooling, reshaping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.programs.catalog import PROGRAMS, LibraryProgram, integers, normal
from bench.programs.keras_ import trained

MakeLayer = Callable[[Any], Any]
"""Name -> the shape of the input, and a function that makes a layer of ``keras.layers``."""

_ROW, _SEQUENCE, _IMAGE, _VOLUME = (8, 24), (8, 12, 16), (8, 12, 12, 8), (8, 6, 6, 6, 4)
_LAYERS: Mapping[str, tuple[tuple[int, ...], MakeLayer]] = {
    "conv1d_causal": (_SEQUENCE, lambda k: k.Conv1D(16, 3, padding="causal", activation="relu")),
    "conv2d_dilated": (_IMAGE, lambda k: k.Conv2D(16, 3, dilation_rate=2, padding="same")),
    "conv2d_grouped": (_IMAGE, lambda k: k.Conv2D(16, 3, groups=4, padding="same")),
    "conv3d": (_VOLUME, lambda k: k.Conv3D(8, 3, activation="gelu")),
    "conv1d_transpose": (_SEQUENCE, lambda k: k.Conv1DTranspose(8, 4, strides=2, padding="same")),
    "conv2d_transpose": (_IMAGE, lambda k: k.Conv2DTranspose(8, 3, strides=2)),
    "conv3d_transpose": (_VOLUME, lambda k: k.Conv3DTranspose(8, 2, strides=2)),
    "depthwise_conv1d": (_SEQUENCE, lambda k: k.DepthwiseConv1D(3, depth_multiplier=2)),
    "depthwise_conv2d": (_IMAGE, lambda k: k.DepthwiseConv2D(3, strides=2, padding="same")),
    "separable_conv1d": (_SEQUENCE, lambda k: k.SeparableConv1D(16, 3)),
    "separable_conv2d": (_IMAGE, lambda k: k.SeparableConv2D(16, 3, padding="same")),
    "simple_rnn": (_SEQUENCE, lambda k: k.SimpleRNN(32, return_sequences=True)),
    "gru": (_SEQUENCE, lambda k: k.GRU(32, go_backwards=True)),
    "bidirectional_lstm": (_SEQUENCE, lambda k: k.Bidirectional(k.LSTM(16, return_sequences=True))),
    "stacked_cells": (_SEQUENCE, lambda k: k.RNN([k.LSTMCell(16), k.GRUCell(24)])),
    "lstm_with_dropout": (_SEQUENCE, lambda k: k.LSTM(16, dropout=0.2, recurrent_dropout=0.2)),
    "lstm_unrolled": ((8, 4, 16), lambda k: k.LSTM(16, unroll=True)),
    "conv_lstm1d": ((8, 4, 12, 4), lambda k: k.ConvLSTM1D(8, 3, padding="same")),
    "conv_lstm2d": ((8, 3, 8, 8, 4), lambda k: k.ConvLSTM2D(8, 3, return_sequences=True)),
    "time_distributed": ((8, 4, 8, 8, 4), lambda k: k.TimeDistributed(k.Conv2D(8, 3))),
    "batch_normalization": (_IMAGE, lambda k: k.BatchNormalization()),
    "group_normalization": (_IMAGE, lambda k: k.GroupNormalization(groups=4)),
    "layer_normalization": (_SEQUENCE, lambda k: k.LayerNormalization()),
    "rms_normalization": (_SEQUENCE, lambda k: k.RMSNormalization()),
    "spectral_normalization": (_ROW, lambda k: k.SpectralNormalization(k.Dense(32))),
    "max_pooling1d": (_SEQUENCE, lambda k: k.MaxPooling1D(2)),
    "max_pooling2d": (_IMAGE, lambda k: k.MaxPooling2D(3, strides=2, padding="same")),
    "average_pooling3d": (_VOLUME, lambda k: k.AveragePooling3D(2)),
    "adaptive_average_pooling2d": (_IMAGE, lambda k: k.AdaptiveAveragePooling2D(5)),
    "adaptive_max_pooling1d": (_SEQUENCE, lambda k: k.AdaptiveMaxPooling1D(5)),
    "global_max_pooling2d": (_IMAGE, lambda k: k.GlobalMaxPooling2D()),
    "up_sampling1d": (_SEQUENCE, lambda k: k.UpSampling1D(2)),
    "up_sampling2d_bilinear": (_IMAGE, lambda k: k.UpSampling2D(2, interpolation="bilinear")),
    "up_sampling3d": (_VOLUME, lambda k: k.UpSampling3D(2)),
    "resizing": (_IMAGE, lambda k: k.Resizing(8, 9, interpolation="bicubic")),
    "cropping2d": (_IMAGE, lambda k: k.Cropping2D(2)),
    "zero_padding3d": (_VOLUME, lambda k: k.ZeroPadding3D(1)),
    "permute": (_SEQUENCE, lambda k: k.Permute((2, 1))),
    "repeat_vector": (_ROW, lambda k: k.RepeatVector(5)),
    "einsum_dense": (_SEQUENCE, lambda k: k.EinsumDense("abc,cde->abde", (None, 4, 8), bias_axes="de")),
    "prelu": (_IMAGE, lambda k: k.PReLU(shared_axes=[1, 2])),
    "dropout": (_ROW, lambda k: k.Dropout(0.3)),
    "spatial_dropout2d": (_IMAGE, lambda k: k.SpatialDropout2D(0.3)),
    "gaussian_noise": (_ROW, lambda k: k.GaussianNoise(0.3)),
    "alpha_dropout": (_ROW, lambda k: k.AlphaDropout(0.3)),
    "stft_spectrogram": ((8, 256, 1), lambda k: k.STFTSpectrogram(frame_length=64, frame_step=32)),
}


def _alone(shape: tuple[int, ...], make: MakeLayer) -> Callable[[], LibraryProgram]:
    """Returns a program of the layer alone, or after a dense layer if it has no weights."""

    def made() -> LibraryProgram:
        import keras

        x, layer = normal(*shape), make(keras.layers)
        model = keras.Sequential([layer])
        model(x)
        if not model.trainable_variables:
            model = keras.Sequential([keras.layers.Dense(shape[-1]), make(keras.layers)])
        return trained(model, x)

    return made


_OF_SEVERAL: Mapping[str, Callable[[Any, Any, Any], Any]] = {
    "attention": lambda k, x, y: k.Attention(use_scale=True)([x, y]),
    "additive_attention": lambda k, x, y: k.AdditiveAttention()([x, y]),
    "causal_attention": lambda k, x, y: k.MultiHeadAttention(4, 8)(x, x, use_causal_mask=True),
    "cross_attention": lambda k, x, y: k.MultiHeadAttention(4, 8, attention_axes=(1,))(x, y),
    "grouped_query_attention": lambda k, x, y: k.GroupQueryAttention(8, 4, 2)(x, y),
    "dot": lambda k, x, y: k.Dot(axes=(2, 2), normalize=True)([k.Dense(8)(x), k.Dense(8)(y)]),
    "merges": lambda k, x, y: k.Maximum()([k.Concatenate()([k.Dense(8)(x), y]), k.Dense(24)(x)]),
}


def _of_two(make: Callable[[Any, Any, Any], Any]) -> Callable[[], LibraryProgram]:
    def made() -> LibraryProgram:
        import keras

        x, y = keras.Input((12, 16)), keras.Input((12, 16))
        return trained(
            keras.Model([x, y], make(keras.layers, x, y)), normal(8, 12, 16), normal(8, 12, 16, seed=1)
        )

    return made


_OF_TOKENS: Mapping[str, MakeLayer] = {
    "masked_lstm": lambda k: [k.Embedding(32, 16, mask_zero=True), k.LSTM(16)],
    "reversible_embedding": lambda k: [k.ReversibleEmbedding(32, 16), k.Dense(8)],
    "category_encoding": lambda k: [k.CategoryEncoding(32, output_mode="multi_hot"), k.Dense(16)],
}


def _of_tokens(make: MakeLayer) -> Callable[[], LibraryProgram]:
    def made() -> LibraryProgram:
        import keras

        return trained(keras.Sequential(make(keras.layers)), integers(32, 8, 12))

    return made


PROGRAMS.update({f"keras_layers.{name}": _alone(*of) for name, of in _LAYERS.items()})
PROGRAMS.update({f"keras_layers.{name}": _of_two(make) for name, make in _OF_SEVERAL.items()})
PROGRAMS.update({f"keras_layers.{name}": _of_tokens(make) for name, make in _OF_TOKENS.items()})
