"""The zoo's models as data: to add one, add an entry (and a builder, if its architecture is new)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ENTRIES", "Entry", "Setting"]

Setting = int | str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of the zoo.

    ``builder`` is ``module:function`` within this package; it takes ``settings`` and ``architecture`` as
    keywords. ``settings`` are the user's to change; ``architecture`` is what makes the model this one.
    ``reduced`` overrides both for the small size. ``source`` names the paper and the place of the parameter
    count; ``beyond_published`` the top-level parameters that this count leaves out.
    """

    name: str
    description: str
    source: str
    builder: str
    published_parameters: int
    beyond_published: tuple[str, ...] = ()
    settings: Mapping[str, Setting]
    architecture: Mapping[str, Any]
    reduced: Mapping[str, Any]
    minimum: Mapping[str, int] = field(default_factory=dict)


def _gpt2(name: str, layers: int, d: int, heads: int, parameters: int) -> Entry:
    return Entry(
        name=name,
        description=f"GPT-2, {layers} × {d}, {heads} heads; output tied to the embedding, no dropout",
        source="Radford et al. 2019, table 2; parameter count of the released checkpoint",
        builder="transformers:gpt",
        published_parameters=parameters,
        settings=dict(batch=128, seq=1024, layers=layers, vocab=50257, dtype="bfloat16", scan=1, remat=1),
        architecture=dict(d=d, heads=heads, context=1024),
        reduced=dict(batch=8, seq=16, layers=2, vocab=256, d=64, heads=8, context=16),
    )


_ALL = (
    Entry(
        name="mlp",
        description="Multilayer perceptron with ReLU, for teaching",
        source="no paper; the count follows from the sizes: 1025·4096 + 2·4097·4096 + 4097·1024",
        builder="mlp:mlp",
        published_parameters=1025 * 4096 + 2 * 4097 * 4096 + 4097 * 1024,
        settings=dict(batch=256, layers=3, features=1024, hidden=4096, classes=1024, dtype="float32"),
        architecture={},
        reduced=dict(batch=8, layers=2, features=32, hidden=64, classes=16),
    ),
    Entry(
        name="alexnet",
        description="AlexNet in one column (no groups), 227²; dropout and local response norm left out",
        source="Krizhevsky et al. 2012; ungrouped count as in learnopencv.com's parameter-counting article",
        builder="cnn:alexnet",
        published_parameters=62_378_344,
        settings=dict(batch=128, image=227, classes=1000, dtype="float32"),
        architecture=dict(channels=(96, 256, 384, 384, 256), hidden=4096),
        reduced=dict(batch=8, image=67, classes=16, channels=(16, 32, 32, 32, 32), hidden=64),
        minimum=dict(image=67),
    ),
    _gpt2("gpt2", 12, 768, 12, 124_439_808),
)

ENTRIES: Mapping[str, Entry] = {found.name: found for found in _ALL}
