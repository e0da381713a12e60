"""The frontends: which of them reads a model, and what each hands on. A new one is one line of ``MODULES``.

A frontend is a module ``frontends/from_<name>.py`` with three functions, and imports its framework inside of
functions only:

- ``reads(model) -> bool``: is the model of this kind? Asked often, so cheap: by suffix, by the name of the
  object's type or of its module (``type_names``), never by importing the framework;
- ``trace(model, *args, name, unknown, dims) -> Traced``: lower it. ``args`` is what the user gave after the
  model (example arguments, for JAX). ``dims`` binds symbolic sizes by name; a name that the model does not have
  is an error (``check_dims``);
- ``coverage() -> {loop nest: [the framework's ops]}`` for ``pase ops``; ``by_nest`` derives it from the rules.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

from pase.errors import PaseError

if TYPE_CHECKING:
    from pase.ir import Graph

__all__ = [
    "MODULES",
    "Dims",
    "Traced",
    "Unknown",
    "UnknownOp",
    "by_nest",
    "check_dims",
    "coverage",
    "frontend_of",
    "trace",
    "type_names",
]

Unknown = Literal["error", "replicate"]
Dims = Mapping[str, int]

MODULES: dict[str, str] = {
    "onnx": "pase.frontends.from_onnx",
    "tensorflow": "pase.frontends.from_tf",
    "jax": "pase.frontends.from_jax",  # any callable: asked last
}
"""name -> module, in the order in which they are asked. One whose file is not there is left out."""


class UnknownOp(PaseError):
    """An op for which no rule exists; the message names it and the user's line."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model read by a frontend. ``graph`` is raw: one node an op; ``graph.meta["frontend"]`` names the frontend."""

    graph: Graph
    param_paths: tuple[str, ...]
    """The trainable parameters by the user's names, in the model's order."""
    input_paths: tuple[str, ...]

    @property
    def frontend(self) -> str:
        return self.graph.meta["frontend"]


def _modules() -> Iterable[tuple[str, ModuleType]]:
    for name, module in MODULES.items():
        try:
            yield name, importlib.import_module(module)
        except ModuleNotFoundError as e:
            if e.name != module:
                raise


def frontend_of(model: Any) -> ModuleType | None:
    """The frontend that reads this model; None where none does."""
    return next((module for _, module in _modules() if module.reads(model)), None)


def trace(
    model: Any, *args: Any, name: str | None = None, unknown: Unknown = "error", dims: Dims | None = None
) -> Traced:
    """Read a model by whichever frontend reads it.

    unknown: at an op without a rule: "error", or "replicate" (it may not be split).
    dims: integers for symbolic sizes.
    """
    module = frontend_of(model)
    if module is None:
        kinds = ", ".join(n for n, _ in _modules())
        raise PaseError(
            f"no frontend reads a {type(model).__module__}.{type(model).__name__}; there are frontends for {kinds}"
        )
    traced: Traced = module.trace(model, *args, name=name, unknown=unknown, dims=dims)
    return traced


def check_dims(dims: Dims | None, known: Iterable[str], model: str) -> dict[str, int]:
    """The bindings, checked: positive whole numbers, for sizes that the model has."""
    known = sorted(set(known))
    for key, value in (dims or {}).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PaseError(f"dim {key}={value!r}: a size is a positive whole number")
        if key not in known:
            raise PaseError(
                f"model '{model}' has no symbolic size '{key}'; it has: {', '.join(known) or 'none'}"
            )
    return dict(dims or {})


def type_names(model: Any) -> set[str]:
    """``module.Class`` of the object's type and of all that it derives from, nothing imported."""
    return {f"{t.__module__}.{t.__qualname__}" for t in type(model).__mro__}


def coverage() -> dict[str, dict[str, list[str]]]:
    """frontend -> loop nest -> the framework's ops that become it."""
    return {name: module.coverage() for name, module in _modules()}


def by_nest(rules: Mapping[str, Callable[..., Any]]) -> dict[str, list[str]]:
    """loop nest -> ops, read off what the rules' code calls: op -> rule in, nothing kept by hand."""
    from pase.ops import composites, indexed, loops, nests

    known: dict[str, Any] = dict.fromkeys((*nests.__all__, *indexed.__all__))
    known |= {n: getattr(m, n) for m in (composites, loops) for n in m.__all__}
    out: dict[str, list[str]] = {}
    found: dict[Any, set[str]] = {}
    for op, rule in rules.items():
        for nest in found.setdefault(rule, _calls(rule, known, set())) or {"no work"}:
            out.setdefault(nest, []).append(op)
    return {k: sorted(out[k]) for k in sorted(out)}


def _calls(rule: Any, known: Mapping[str, Any], seen: set[Any]) -> set[str]:
    """The nest builders that a function may call, by itself or through functions of its package. known: name -> None
    for a builder, else the function that calls some."""
    rule = getattr(rule, "func", rule)  # functools.partial
    if not isinstance(rule, FunctionType) or rule in seen:
        return set()
    seen.add(rule)
    names: set[str] = set()
    stack: list[CodeType] = [rule.__code__]
    while stack:
        code = stack.pop()
        names.update(code.co_names)
        stack += [c for c in code.co_consts if isinstance(c, CodeType)]
    out: set[str] = set()
    for n in names:
        target = rule.__globals__.get(n)
        if n in known and not isinstance(target, FunctionType):
            out |= {n} if known[n] is None else _calls(known[n], known, seen)  # nests.NAME
        elif isinstance(target, FunctionType) and target.__module__.startswith(
            ("pase.frontends", "pase.ops")
        ):
            out |= _calls(target, known, seen)
    return out
