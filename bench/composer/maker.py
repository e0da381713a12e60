"""Builds patterns in JAX: random choices, parameters, leaves of the batch, and weights with a transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from bench.composer.spec import ProgramPart
from pase.pytree import Tree

__all__ = [
    "LAYERS",
    "LOSSES",
    "TRANSFORMS",
    "Apply",
    "Env",
    "Maker",
    "PartMaker",
    "Pattern",
    "divisors",
    "layer",
    "loss",
    "registered_pattern",
    "transform",
]

T = TypeVar("T")
Holds = Literal["state", "modules"]

Apply = Callable[[Tree, Any, "Env"], Any]
"""f(the part's parameters, x [batch, sequence, width], env) -> x of the same shape; for a loss: -> a number."""
Get = Callable[[Tree], Any]
"""f(the part's parameters) -> a weight."""


def divisors(n: int) -> tuple[int, ...]:
    """Returns the divisors of n from 2 to 4, or n itself."""
    return tuple(k for k in (2, 3, 4) if n % k == 0) or (n,)


@dataclass(kw_only=True)
class Env:
    """What all parts of a program see during a call. shared: parameters that several parts read.

    state: what the last call passed on; parts write the next values into it. modules: modules of Flax NNX, by name.
    terms: terms that parts add to the loss. metrics: what the program returns in addition to its loss.
    """

    batch: dict[str, Any]
    shared: dict[str, Any]
    params: Tree = None
    state: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Any] = field(default_factory=dict)
    terms: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class PartMaker:
    """Builds one part. shape: batch, sequence, width of its input and output.

    epsilon: the machine epsilon of the narrowest type in which the part computes. shared: parameters that several parts
    read. words: the transforms of its weights.
    """

    part: ProgramPart
    name: str
    shape: tuple[int, int, int]
    batch: dict[str, Any]
    shared: dict[str, Any]
    words: list[str] = field(default_factory=list)
    epsilon: float = 2.0**-52
    rng: np.random.Generator = field(init=False)
    values: np.random.Generator = field(init=False)
    transforms: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        # Three streams, so that a plain part has the same choices and values as the one with transforms.
        self.rng, self.values, self.transforms = (
            np.random.default_rng([self.part.seed, i]) for i in range(3)
        )

    def choose(self, *options: T) -> T:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def input(self, word: str, array: Any) -> str:
        """Adds an array to the batch; returns its name."""
        name = f"{self.name}_{word}"
        self.batch[name] = array
        return name


@dataclass(kw_only=True)
class Maker(PartMaker):
    """Builds one part of a JAX program."""

    params: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return self.values.normal(size=shape) * scale

    def param(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> str:
        """Adds a parameter of normally distributed numbers; returns its name."""
        return self.leaf(self.normal(*shape, scale=scale) + shift)

    def leaf(self, tree: Tree) -> str:
        """Adds an entry to the part's parameters."""
        name = f"{'abcdefghijklmnopqrstuvwxyz'[len(self.params) % 26]}{len(self.params)}"
        self.params[name] = tree
        return name

    def held(self, word: str, tree: Tree) -> str:
        """Adds an entry to the state that one call passes to the next; returns its name."""
        name = f"{self.name}_{word}"
        self.state[name] = tree
        return name

    def module(self, make: Callable[[], Any]) -> str:
        """Adds a module of Flax NNX to the model; make: makes a new one. Returns its name."""
        name = f"{self.name}_{len(self.modules)}"
        self.modules[name] = make
        return name

    def key(self) -> str:
        """Adds a random key to the batch; returns its name."""
        return self.input("key", np.array(self.values.integers(0, 1 << 31, 2), np.uint32))

    def common(self, name: str, *shape: int, scale: float = 1.0) -> str:
        """Returns a parameter that all parts with this name share."""
        if name not in self.shared:
            self.shared[name] = np.random.default_rng([len(name), *shape]).normal(size=shape) * scale
        return name

    def weight(self, *shape: int, scale: float | None = None) -> Get:
        """Returns a weight: a parameter, or a function of parameters. The default scale keeps the size of a product."""
        scale = float(np.prod(shape[:-1]) ** -0.5) if scale is None and len(shape) > 1 else (scale or 1.0)
        if self.part.plain or self.transforms.random() < 0.55:
            name = self.param(*shape, scale=scale)
            return lambda p: p[name]
        fitting = [n for n, t in TRANSFORMS.items() if t.fits(shape)]
        word = str(self.transforms.choice(fitting))
        self.words.append(f"weight:{word}")
        made = TRANSFORMS[word].make(self, shape)
        return lambda p: made(p) * scale

    def vector(self, n: int, shift: float = 0.0) -> Get:
        """Returns a bias or a gain."""
        made = self.weight(n, scale=0.3)
        return lambda p: made(p) + shift


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A pattern. make: returns the pattern's function, and adds parameters and leaves of the batch to the maker.

    odds: its frequency relative to 1. whole: it mixes examples, so that the mean over micro-batches is another number.
    loops: it has a loop over layers, which may be cut into stages. holds: the kind of state that it keeps between
    calls; a program has one kind. fits: the shapes to which a transform applies.
    """

    make: Callable[..., Any]
    odds: float = 1.0
    whole: bool = False
    loops: bool = False
    holds: Holds | None = None
    fits: Callable[[Sequence[int]], bool] = lambda shape: True


LAYERS: dict[str, Pattern] = {}
LOSSES: dict[str, Pattern] = {}
TRANSFORMS: dict[str, Pattern] = {}
M = TypeVar("M", bound=Callable[..., Any])


def registered_pattern(into: dict[str, Pattern], **what: Any) -> Callable[[M], M]:
    """Registers a pattern under its function's name. what: its fields."""

    def add(make: M) -> M:
        assert make.__name__ not in into, make.__name__
        into[make.__name__] = Pattern(make=make, **what)
        return make

    return add


def layer(
    odds: float = 1.0, *, whole: bool = False, loops: bool = False, holds: Holds | None = None
) -> Callable[[M], M]:
    """Registers a layer, which makes f(params, x, env) -> x."""
    return registered_pattern(LAYERS, odds=odds, whole=whole, loops=loops, holds=holds)


def loss(odds: float = 1.0, *, whole: bool = False) -> Callable[[M], M]:
    """Registers a loss, which makes f(params, x, env) -> a number."""
    return registered_pattern(LOSSES, odds=odds, whole=whole)


def transform(fits: Callable[[Sequence[int]], bool] = lambda shape: True) -> Callable[[M], M]:
    """Registers a transform of weights, which makes f(params) -> an array of a given shape."""
    return registered_pattern(TRANSFORMS, fits=fits)
