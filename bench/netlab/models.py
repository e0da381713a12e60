"""The models of the laboratory: zoo models in sizes at which the network, not the two cores, limits the step."""

from __future__ import annotations

from typing import Any

from pase.zoo.registry import ZooModel, _build, entry

__all__ = ["BATCHES", "LOOPED", "RANKS", "SIZES", "model"]

SIZES: dict[str, dict[str, Any]] = {
    "mlp": dict(layers=2, features=256, hidden=1024, classes=128),
    "alexnet": dict(image=67, classes=128, channels=(16, 32, 48, 48, 32), hidden=1024),
    "rnnlm": dict(seq=8, vocab=2048, d=256, hidden=256),
    "transformer": dict(seq=16, layers=1, vocab=2048, d=128, ff=512, scan=0, remat=0),
    "gpt2": dict(seq=32, layers=2, vocab=2048, d=192, context=32, scan=0, remat=0),
    "mixtral_8x7b": dict(seq=16, layers=1, vocab=1024, d=128, ff=256, scan=0, remat=0),
}
LOOPED: dict[str, dict[str, Any]] = {
    "gpt2_loop": dict(seq=32, layers=8, vocab=256, d=192, context=32, scan=1, remat=0),
}
"""The same models with a loop over their layers, which one program runs in stages. Eight layers have 14 MB; the
activations at a cut have a twentieth of that."""
RANKS = (2, 4)
"""The numbers of stages in which a model of ``LOOPED`` also runs."""
BATCHES: dict[str, tuple[int, int]] = {
    "mlp": (1024, 8192),
    "alexnet": (32, 256),
    "rnnlm": (64, 768),
    "transformer": (64, 512),
    "gpt2": (32, 160),
    "mixtral_8x7b": (64, 768),
    "gpt2_loop": (32, 96),
}
"""Small: splitting pays at most on the faster links. Large: splitting compute pays on the slower links as well."""


def model(name: str, batch: int) -> ZooModel:
    """Returns the model in the laboratory's size."""
    found = entry(name.removesuffix("_loop"))
    sizes = {**found.reduced, **(SIZES | LOOPED)[name], "batch": batch, "dtype": "float32"}
    settings = {k: sizes.get(k, v) for k, v in found.settings.items()}
    return _build(found, settings, {k: sizes.get(k, v) for k, v in found.architecture.items()})
