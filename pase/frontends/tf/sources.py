"""A TensorFlow model as a graph with names for its inputs and variables (``TfSource``), and how sizes are bound."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pase.errors import PaseError
from pase.frontends.registry import DimSizes, type_names
from pase.frontends.tf.graph import TfGraph

__all__ = [
    "KERAS_SUFFIX",
    "InputSpec",
    "TfSource",
    "Variable",
    "bound",
    "distinct",
    "dtype_of",
    "is_graph_def",
    "is_keras",
    "reads",
    "shape_of",
    "short",
]

KERAS_SUFFIX = ".keras"
_KERAS = re.compile(r"(keras|tf_keras)\..*\.(Layer|Model)$")
_FUNCTION = re.compile(
    r"tensorflow\..*\.(Function|GenericFunction|PolymorphicFunction|ConcreteFunction|AtomicFunction)$"
)
_DIM = re.compile(r"^[\w./:-]{1,100}$", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """An input: its name in the user's model, its shape (None for an unknown size), and its dtype."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable of the model. trainable: whether it has a gradient."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True


@dataclass(frozen=True, kw_only=True)
class TfSource:
    """A model as a graph. inputs and captured are keyed by the references of their placeholders."""

    name: str
    graph: TfGraph
    inputs: Mapping[str, InputSpec]
    captured: Mapping[str, Variable | InputSpec] = field(default_factory=dict)
    """Variables and arrays that the function closes over. An array is an InputSpec and becomes a constant."""
    variables: Mapping[str, Variable] = field(default_factory=dict)
    """Variables that are nodes of the graph, by the names of the nodes."""
    weights: frozenset[str] = frozenset()
    """Constants that were variables before the graph was frozen."""
    lines: Mapping[str, str] = field(default_factory=dict)
    """Node -> the user's line."""


def is_keras(model: object) -> bool:
    """Whether the model is a layer or model of Keras."""
    return any(_KERAS.match(n) for n in type_names(model))


def _is_function(model: object) -> bool:
    return any(_FUNCTION.match(n) for n in type_names(model))


def reads(model: object) -> bool:
    """Whether the model is a Keras model, a tf.function, a ConcreteFunction, a GraphDef, or a file of one of them.

    Files are the folder of a SavedModel, .pb files and .keras files.
    """
    if isinstance(model, (str, Path)):
        path = Path(model)
        return path.suffix in (".pb", KERAS_SUFFIX) or os.path.isfile(path / "saved_model.pb")
    if isinstance(model, type):
        return False
    return is_keras(model) or _is_function(model) or is_graph_def(model)


def is_graph_def(model: object) -> bool:
    return any(n.endswith("graph_pb2.GraphDef") for n in type_names(model))


# -- dims --


def _dim_names(spec_name: str, i: int) -> tuple[str, ...]:
    """The names by which an unknown dim may be bound: INPUT.DIM, and "batch" for the first dim."""
    return (f"{spec_name}.{i}", "batch") if i == 0 else (f"{spec_name}.{i}",)


def bound(specs: Iterable[InputSpec], dims: DimSizes, model: str) -> list[InputSpec]:
    """The specs with sizes for all dims.

    Raises PaseError for a dim that is not bound, and for a name in ``dims`` that is no dim of the model.
    """
    out: list[InputSpec] = []
    used: set[str] = set()
    known: dict[str, None] = {}
    missing: list[PaseError] = []
    for spec in specs:
        shape: list[int | None] = []
        for i, s in enumerate(spec.shape):
            names = _dim_names(spec.name, i)
            given = [n for n in names if n in dims]
            if s is None:
                known.update(dict.fromkeys(reversed(names)))
                used.update(given)
                if given:
                    s = dims[given[0]]
                else:
                    short = "batch" if i == 0 else names[0]
                    missing.append(
                        PaseError(
                            f"dim {i} of its shape {spec.shape} is not known",
                            where=f"input '{spec.name}' of '{model}'",
                            fix=f"bind it with dims={{'{short}': 64}} or --dim {short}=64",
                        )
                    )
            elif s < 1:
                raise PaseError(
                    f"its shape is {spec.shape}, but a dim of {s} elements cannot be parallelized",
                    where=f"input '{spec.name}' of '{model}'",
                )
            shape.append(s)
        out.append(InputSpec(name=spec.name, shape=tuple(shape), dtype=spec.dtype))
    for key, value in dims.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PaseError(f"{value!r} is not a positive whole number", where=f"dim {key}")
        if key not in used:
            raise PaseError(
                f"the model has no dim '{key[:100]}' to bind; it has {', '.join(known) or 'none'}",
                where=model,
            )
    if missing:
        raise missing[0]
    return out


def shape_of(shape: Any, what: str) -> tuple[int | None, ...]:
    """The sizes of a shape, with None for an unknown size. PaseError if the rank is unknown. what: names the tensor."""
    sizes = shape.as_list() if getattr(shape, "rank", 0) is not None and hasattr(shape, "as_list") else shape
    if sizes is None or getattr(shape, "rank", 0) is None:
        raise PaseError(
            "it has no static rank", where=what, fix="give it a shape, tf.TensorSpec(shape, dtype)"
        )
    return tuple(None if s is None else int(s) for s in sizes)


def distinct(names: Sequence[str]) -> list[str]:
    """The names, made unique: repeated names get ~2, ~3, … in order."""
    seen: Counter[str] = Counter()
    out = []
    for n in names:
        seen[n] += 1
        out.append(n if seen[n] == 1 else f"{n}~{seen[n]}")
    return out


def dtype_of(dtype: object) -> str:
    """The name of a dtype of TensorFlow, Keras or numpy."""
    text = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype)
    return text.removesuffix("_ref")


def short(e: BaseException) -> str:
    """The message of an exception in one line of at most 500 characters."""
    return " ".join(str(e).split())[:500]
