"""The frontends: which of them reads a model, and what each returns.

A frontend is a module ``frontends/<name>/frontend.py``, found automatically. It registers one ``Frontend`` in
``FRONTENDS`` and imports its framework only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pase.errors import PaseError
from pase.pytree import Tree
from pase.registry import Registry

if TYPE_CHECKING:
    from pase.ir import FixedLayout, Graph

__all__ = [
    "FRONTENDS",
    "Chances",
    "Control",
    "DimSizes",
    "Frontend",
    "NotInParts",
    "Traced",
    "Unknown",
    "UnknownOp",
    "by_nest",
    "check_dims",
    "coverage",
    "frontend_of",
    "lowers_bodies",
    "trace",
    "type_names",
]

Unknown = Literal["error", "replicate"]
DimSizes = Mapping[str, int]
C = TypeVar("C", bound=Callable[..., object])
Chances = Mapping[str, Sequence[float]]
"""Conditional, cond0, … in the order of the program -> how likely each of its branches is."""


class UnknownOp(PaseError):
    """An op for which no rule exists; the message names it and the user's line."""


class NotInParts(PaseError):
    """A model that cannot run on micro-batches: its code contains the batch size, its examples meet, or its frontend
    traces it once."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model read by a frontend. ``graph`` is raw: one node an op; ``graph.meta["frontend"]`` names the frontend."""

    graph: Graph
    param_paths: tuple[str, ...]
    """The trainable parameters by the user's names, in the model's order."""
    input_paths: tuple[str, ...]
    padding: Mapping[int, int] = field(default_factory=dict)
    """Extent -> what every dim of that extent is padded to."""
    unpadded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Where dims are padded: path of a parameter or an input -> the shape that the user has."""

    @property
    def frontend(self) -> str:
        return self.graph.meta["frontend"]

    @cached_property
    def fixed(self) -> Mapping[str, FixedLayout]:
        """Tensor -> the layout in which the user keeps it already. Raises PaseError if no plan could keep them all."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Frontend:
    """How the models of one framework are read.

    reads: is the model of this kind? Asked often, so cheap: by suffix, by the name of the object's type or of its
        module (``type_names``), never by importing the framework.
    trace: lower it; called as ``trace(model, *args, name=, unknown=, dims=)``. args: what the user gave after the
        model (example arguments, for JAX). dims: integers for symbolic sizes by name; a name that the model does not
        have is an error (``check_dims``).
    coverage: loop nest -> the framework's ops, for ``pase ops``; ``by_nest`` derives it from the rules.
    programs: it reads programs that are not trained too: ``trace`` then takes ``mode``, ``carry`` and ``chances``.
    modules: a model is a module that need not return its loss: ``trace`` then takes ``loss``.
    """

    reads: Callable[[object], bool]
    trace: Callable[..., Traced]
    coverage: Callable[[], dict[str, list[str]]]
    programs: bool = False
    modules: bool = False


FRONTENDS: Registry[Frontend] = Registry("frontend", package="pase.frontends", each="frontend")
"""In the order in which they are asked: one that reads any callable has a higher rank than those that look closer."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """How an op with bodies, a loop or a branch, is lowered. listed: where ``pase ops`` shows it."""

    lower: Callable[..., Any]
    listed: str


def lowers_bodies(controls: Registry[Control], *ops: str, listed: str) -> Callable[[C], C]:
    """Decorator: the function lowers these ops, which hold bodies."""

    def add(lower: C) -> C:
        controls.register(*ops)(Control(lower=lower, listed=listed))
        return lower

    return add


def frontend_of(model: object) -> Frontend | None:
    """The frontend that reads this model; None where none does."""
    return next((f for f in FRONTENDS.values() if f.reads(model)), None)


def trace(
    model: object,
    *args: Tree,
    name: str | None = None,
    unknown: Unknown = "error",
    dims: DimSizes | None = None,
    mode: str = "train",
    carry: Mapping[int, Tree] | None = None,
    chances: Chances | None = None,
    loss: Callable[..., Tree] | None = None,
) -> Traced:
    """Read a model by whichever frontend reads it.

    mode, carry, chances: what the program is for, see ``CompileOptions``; programs with these are JAX's.

    loss: of a PyTorch module that does not return it, see ``CompileOptions``.

    unknown: at an op without a rule: "error", or "replicate" (it may not be split).
    dims: integers for symbolic sizes.
    """
    frontend = frontend_of(model)
    if frontend is None:
        kinds = ", ".join(FRONTENDS)
        raise PaseError(
            f"no frontend reads a {type(model).__module__}.{type(model).__name__}; there are frontends for {kinds}"
        )
    if loss is not None and not frontend.modules:
        raise PaseError(
            f"loss is for PyTorch modules, not for a {type(model).__name__}: let it return its loss"
        )
    if mode == "train" and not carry and not chances:
        given = {} if loss is None else {"loss": loss}
        return frontend.trace(model, *args, name=name, unknown=unknown, dims=dims, **given)
    if not frontend.programs:
        raise PaseError(
            f"mode='{mode}', carry and chances are for JAX functions, not for "
            f"{repr(model) if isinstance(model, str) else f'a {type(model).__name__}'}"
        )
    return frontend.trace(
        model, *args, name=name, unknown=unknown, dims=dims, mode=mode, carry=carry, chances=chances
    )


def check_dims(dims: DimSizes | None, known: Iterable[str], model: str) -> dict[str, int]:
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


def type_names(model: object) -> set[str]:
    """``module.Class`` of the object's type and of all that it derives from, nothing imported."""
    return {f"{t.__module__}.{t.__qualname__}" for t in type(model).__mro__}


def coverage() -> dict[str, dict[str, list[str]]]:
    """frontend -> loop nest -> the framework's ops that become it."""
    return {name: frontend.coverage() for name, frontend in FRONTENDS.items()}


def by_nest(
    rules: Mapping[str, Callable[..., object]], controls: Mapping[str, Control] | None = None
) -> dict[str, list[str]]:
    """loop nest -> ops, read off what the rules' code calls: op -> rule in, nothing kept by hand."""
    from pase.ops import composites, indexed, loops, nests, windows

    known: dict[str, Callable[..., object] | None] = dict.fromkeys(
        (*nests.__all__, *indexed.__all__, *windows.__all__)
    )
    known |= {n: getattr(m, n) for m in (composites, loops) for n in m.__all__}
    out: dict[str, list[str]] = {}
    found: dict[Callable[..., object], set[str]] = {}
    for op, rule in rules.items():
        for nest in found.setdefault(rule, _calls(rule, known, set())) or {"no work"}:
            out.setdefault(nest, []).append(op)
    for op, control in (controls or {}).items():
        out.setdefault(control.listed, []).append(op)
    return {k: sorted(out[k]) for k in sorted(out)}


def _calls(rule: object, known: Mapping[str, Callable[..., object] | None], seen: set[object]) -> set[str]:
    """The nest builders that a function may call, directly or through functions of its package. known: name -> None
    for a builder, else a function that calls builders."""
    rule = getattr(rule, "func", rule)  # functools.partial
    rule = rule if isinstance(rule, FunctionType) else type(rule).__call__
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
        elif isinstance(target, Registry):  # TABLE[name](b, x): any of its members
            out |= {nest for member in target.values() for nest in _calls(member, known, seen)}
    return out
