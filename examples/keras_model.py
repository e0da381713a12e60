"""Plan a Keras model for 32 devices, see what FSDP and data parallelism would cost, and write its shardings by name.

python examples/keras_model.py [-o shardings.json]

Nothing is run and no weight is read: shapes are enough. The model may also be a file: pase compile model.keras.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import keras

import pase
from pase.backends.registry import emit


def language_model(words: int = 8192, width: int = 1024, tokens: int = 256) -> keras.Model:
    """Embedding, one layer of attention, a feed-forward layer, and the words' logits."""
    inputs = keras.Input((tokens,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(words, width)(inputs)
    x = x + keras.layers.MultiHeadAttention(8, width // 8)(x, x, use_causal_mask=True)
    x = x + keras.layers.Dense(width)(keras.layers.Dense(4 * width, activation="gelu")(x))
    model = keras.Model(inputs, keras.layers.Dense(words)(x), name="lm")
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", default="shardings.json", type=Path)
    out = parser.parse_args().o

    plan = pase.compile(language_model(), devices=32, dims={"batch": 256})
    print(plan)
    print()
    for name, cost in sorted(plan.baselines.items(), key=lambda item: item[1])[:5]:
        print(f"{name.replace('_', ' '):<24} {cost / plan.cost:.2f} times this plan's step")
    print(emit(plan, "names", out))
    kernels = {n: s for n, s in json.loads(out.read_text())["parameters"].items() if n.endswith("kernel")}
    print(f"{len(kernels)} kernels; {next(iter(kernels))}: {next(iter(kernels.values()))}")


if __name__ == "__main__":
    main()
