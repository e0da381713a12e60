"""Makes a model from a name and settings: ``get("gpt2?batch=128&seq=1024")``."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pase.errors import PaseError, did_you_mean, install_line
from pase.pytree import Tree
from pase.zoo.catalog import ENTRIES, Entry, Setting

__all__ = ["ZooModel", "entry", "get", "names", "reduced"]

_WORDS = {
    "dtype": ("bfloat16", "float16", "float32"),
    "attention": ("plain", "fused"),
    "task": ("train", "prefill", "decode", "generate"),
}
"""Settings whose values are words -> the possible words."""
_FLAGS = ("remat", "scan")
_LARGEST = 2**31 - 1
_MOST = {"layers": 2_000}
"""Largest values of settings. Layers may be written out one by one; more than this take minutes to trace."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ZooModel:
    """A model ready to be traced.

    ``loss_fn(params, batch)`` returns a scalar. For the tasks "prefill" and "decode" it returns (next token, cache);
    for "decode" it also takes the ``cache``. In task "generate", ``decode`` runs after it, ``tokens`` times.
    ``params``, ``batch`` and ``cache`` are pytrees of ``jax.ShapeDtypeStruct``. ``published_parameters`` is the number
    that ``source`` states for the default settings. ``beyond_published`` names the top-level entries of ``params`` that
    this number leaves out, such as a training head.
    """

    name: str
    description: str
    source: str
    loss_fn: Callable[[Tree, Tree], Tree] = field(repr=False)
    params: Tree = field(repr=False)
    batch: Tree = field(repr=False)
    published_parameters: int
    beyond_published: tuple[str, ...] = ()
    settings: Mapping[str, Setting]
    cache: Tree = field(default=None, repr=False)
    decode: Callable[..., Tree] | None = field(default=None, repr=False)
    _arrays: Callable[[int], tuple[Tree, ...]] = field(repr=False)

    @property
    def parameters(self) -> int:
        """The number of all parameters at these settings."""
        import jax

        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.params))

    @property
    def task(self) -> str:
        """The task that the model is built for: "train", "prefill", "decode" or "generate"."""
        return str(self.settings.get("task", "train"))

    @property
    def inputs(self) -> tuple[Tree, ...]:
        """The arguments of ``loss_fn`` after the parameters."""
        return (self.batch,) if self.cache is None else (self.batch, self.cache)

    def init(self, seed: int = 0) -> tuple[Tree, ...]:
        """Arrays for ``(params, *inputs)``: weights normal by fan-in, norm scales of 1, tokens and labels in range.

        The same seed gives the same arrays. It is meant for reduced sizes, because a published size needs its full
        memory.
        """
        return self._arrays(seed)


def names() -> tuple[str, ...]:
    """All model names, in the order of the catalogue.

    >>> "gpt2" in names()
    True
    """
    return tuple(ENTRIES)


def entry(name: str) -> Entry:
    """The catalogue's entry of a model. It does not build the model and needs no JAX."""
    if name in ENTRIES:
        return ENTRIES[name]
    raise PaseError(
        f"there is no model '{name}'{did_you_mean(name, ENTRIES)}",
        where="zoo",
        fix=f"choose one of {', '.join(ENTRIES)}",
    )


def get(model: str, **settings: Setting) -> ZooModel:
    """The model at its published size, with settings in the name, as keywords, or both.

    >>> get("gpt2?batch=8", seq=256).batch["tokens"].shape
    (8, 256)
    """
    found, given = _parse(model, settings)
    return _build(found, {**found.settings, **given}, found.architecture)


def reduced(model: str, **settings: Setting) -> ZooModel:
    """The model in float32 and so small that a training step takes seconds on a CPU.

    It has every kind of layer of the published model. Only widths, depths and the batch are smaller.

    >>> reduced("gpt2").settings["layers"]
    2
    """
    found, given = _parse(model, settings)
    small = found.reduced
    sizes = {name: small.get(name, default) for name, default in found.settings.items()} | {
        "dtype": "float32"
    }
    architecture = {name: small.get(name, default) for name, default in found.architecture.items()}
    return _build(found, {**sizes, **given}, architecture)


def _build(found: Entry, settings: dict[str, Setting], architecture: Mapping[str, object]) -> ZooModel:
    module, function = found.builder.split(":")
    try:
        built = getattr(importlib.import_module(f"pase.zoo.{module}"), function)(**settings, **architecture)
        from pase.zoo import layers
    except ModuleNotFoundError as error:
        if error.name != "jax":
            raise
        raise PaseError(
            "the models are JAX functions, but JAX is not installed", where="zoo", fix=install_line("jax")
        ) from error
    return ZooModel(
        name=found.name,
        description=found.description,
        source=found.source,
        loss_fn=built.loss_fn,
        params=layers.shapes(built.params, built.stored),
        batch=layers.shapes(built.batch),
        cache=None if built.cache is None else layers.shapes(built.cache, built.stored),
        decode=built.decode,
        published_parameters=found.published_parameters,
        beyond_published=found.beyond_published,
        settings=MappingProxyType(settings),
        _arrays=lambda seed: layers.arrays((built.params, *built.inputs), seed, built.stored),
    )


def _parse(model: str, keywords: Mapping[str, Setting]) -> tuple[Entry, dict[str, Setting]]:
    """Split ``name?key=value&key=value``, and check every setting against the entry."""
    name, _, query = model.removeprefix("zoo:").partition("?")
    found = entry(name)
    given: dict[str, Setting] = {}
    for pair in query.split("&") if query else ():
        key, equals, text = pair.partition("=")
        if not equals:
            raise PaseError(
                f"'{pair}' is not a setting", where=f"'{model}'", fix=f"write {name}?key=value&key=value"
            )
        if key in given:
            raise PaseError(f"the setting '{key}' occurs twice", where=f"'{model}'", fix="give it once")
        given[key] = text
    for key in given.keys() & keywords.keys():
        raise PaseError(
            f"the setting '{key}' is given both in the name and as a keyword",
            where=f"'{model}'",
            fix="give it once",
        )
    return found, {key: _value(found, key, raw) for key, raw in {**given, **keywords}.items()}


def _value(found: Entry, key: str, raw: Setting) -> Setting:
    """The checked value of one setting: an integer of at least 1, 0 or 1 for a flag, or one of a few words."""
    if key not in found.settings:
        have = ", ".join(f"{name}={default}" for name, default in found.settings.items())
        raise PaseError(
            f"the model has no setting '{key}'{did_you_mean(key, found.settings)}",
            where=f"zoo:{found.name}",
            fix=f"choose one of {have}",
        )
    where = f"zoo:{found.name}: {key}={raw}"
    if key in _WORDS:
        if raw not in _WORDS[key]:
            raise PaseError(
                "the value is unknown", where=where, fix=f"choose one of {', '.join(_WORDS[key])}"
            )
        return raw
    try:
        value = int(raw) if isinstance(raw, str | bool) else raw.__index__()
    except (AttributeError, ValueError):
        raise PaseError("the value is not an integer", where=where, fix="give an integer") from None
    if key in _FLAGS:
        low, high = 0, 1
    else:
        low, high = found.minimum.get(key, 1), _MOST.get(key, _LARGEST)
    if not low <= value <= high:
        raise PaseError("the value is out of range", where=where, fix=f"choose one from {low} to {high}")
    return value
