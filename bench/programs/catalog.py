"""Registers the programs. A program is a function without arguments: (loss_fn, params, *batch), with small arrays."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

LibraryProgram = tuple[Any, ...]
PROGRAMS: dict[str, Callable[[], LibraryProgram]] = {}
PACKAGES = {
    "haiku": ("haiku",),
    "linen": ("flax.linen",),
    "nnx": ("flax.nnx",),
    "equinox": ("equinox",),
    "keras": ("keras",),
    "keras_layers": ("keras",),
    "hub": ("keras", "keras_hub"),
    "science": ("equinox", "flax.nnx"),
    "losses": (),
    "plain": (),
    "decoders": ("transformers",),
    "equimo": ("equinox", "equimo"),
    "language": ("flax.nnx",),
    "learning": (),
    "probability": ("distrax",),
}
"""Module -> packages that most of its programs need; they are imported once for all of them."""


def program(make: Callable[[], LibraryProgram]) -> Callable[[], LibraryProgram]:
    """Registers a program under the names of its module and function, such as haiku.mlp."""
    library = make.__module__.rpartition(".")[2].removesuffix("_")
    PROGRAMS[f"{library}.{make.__name__}"] = make
    return make


def load() -> dict[str, Callable[[], LibraryProgram]]:
    """Returns all programs. A library is imported when one of its programs is made."""
    for file in Path(__file__).parent.glob("*.py"):
        if file.stem.removesuffix("_") in PACKAGES:
            importlib.import_module(f"bench.programs.{file.stem}")
    return PROGRAMS


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Any:
    """Returns normally distributed numbers of this shape."""
    import jax

    return scale * jax.random.normal(jax.random.key(seed), shape)


def integers(high: int, *shape: int, seed: int = 0) -> Any:
    """Returns integers from 0 to high - 1."""
    import jax

    return jax.random.randint(jax.random.key(seed), shape, 0, high)
