"""The frontends: which of them reads a model, and what each returns.

A frontend is a module ``frontends/<name>/frontend.py``, which is found automatically. It registers one ``Frontend`` in
``FRONTENDS``, and imports its framework only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pase.errors import PaseError
from pase.pytree import Tree
from pase.registry import Registry

if TYPE_CHECKING:
    from pase.ir import FixedLayout, Graph, Place
    from pase.ir.two_batches import FullGraph

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
    "distinct_paths",
    "frontend_of",
    "lowers_bodies",
    "trace",
    "type_names",
]

Unknown = Literal["error", "replicate"]
DimSizes = Mapping[str, int]
C = TypeVar("C", bound=Callable[..., object])
Chances = Mapping[str, Sequence[float]]
"""Conditional (cond0, cond1, … in program order) -> the probability of each of its branches."""


class UnknownOp(PaseError):
    """There is no rule for an op. The error names the op and the user's line."""

    @classmethod
    def in_frontend(cls, what: str, *, where: str, rules: str) -> UnknownOp:
        """The error for an op that has no rule in a frontend. rules: the files in which it would have one."""
        fix = (
            "pass unknown='replicate' (--unknown replicate): the op is then not split, and only its memory traffic is "
            f"priced; or add a rule to {rules} (CONTRIBUTING.md)"
        )
        return cls(what, where=where, fix=fix)


class NotInParts(PaseError):
    """A model cannot run on micro-batches: its code contains the batch size, its examples meet, or its frontend traces
    it only once."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model as a frontend read it. ``graph`` is raw: one node per op; ``graph.facts.frontend`` names the
    frontend."""

    graph: Graph
    param_paths: tuple[str, ...]
    """The trainable parameters by the user's names, in the model's order."""
    input_paths: tuple[str, ...]
    padding: Mapping[int, int] = field(default_factory=dict)
    """Extent -> the extent to which every dim of that extent is padded."""
    unpadded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """If dims are padded: path of a parameter or an input -> its shape without padding."""
    contents: Mapping[str, object] = field(default_factory=dict, repr=False, compare=False)
    """Constant -> its number or array, as far as they are known."""
    mode: str = "train"
    """What a step does with the model: "train", or one of the modes of programs that are not trained."""
    carried: Mapping[int, int] = field(default_factory=dict)
    """Input leaf, parameters first -> the output leaf that is its next value."""
    written: Traced | None = field(default=None, repr=False, compare=False)
    """For a program with padded dims: the program as the user wrote it."""
    attributes: Mapping[Place, object] = field(default_factory=dict, repr=False, compare=False)
    """Place of an op -> what the program says about the op, for ops that the graph does not determine."""

    @property
    def frontend(self) -> str:
        return self.graph.facts.frontend

    @cached_property
    def full(self) -> FullGraph:
        """The raw graph with all that the program says, for the comparison of two batches."""
        from pase.ir.two_batches import FullGraph

        return FullGraph(graph=self.graph, contents=self.contents, attributes=self.attributes)

    @cached_property
    def fixed(self) -> Mapping[str, FixedLayout]:
        """Tensor -> the layout that the user fixed. Raises PaseError if no plan could keep all these layouts."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Frontend:
    """How the models of one framework are read.

    reads: whether the model is of this kind. It is called often and must be fast: it decides by suffix, or by the name
        of the object's type or of its module (``type_names``), and never imports the framework.
    trace: lowers the model; called as ``trace(model, *args, name=, unknown=, dims=)``. args: what the user passed after
        the model (example arguments, for JAX). dims: integers for symbolic sizes by name; a name that the model does
        not have is an error (``check_dims``).
    coverage: loop nest -> the framework's ops, for ``pase ops``; ``by_nest`` derives it from the rules.
    programs: whether it also reads programs that are not trained; ``trace`` then takes ``mode``, ``carry`` and
        ``chances``.
    modules: whether a model is a module that need not return its loss; ``trace`` then takes ``loss``.
    fused_attention: a sentence that says how a program requests a fused kernel of attention.
    narrow_result: a sentence that says how a product gets a result in its operands' dtype.
    fewer_bits: a sentence that says how products of float32 get the device's default precision.
    """

    reads: Callable[[object], bool]
    trace: Callable[..., Traced]
    coverage: Callable[[], dict[str, list[str]]]
    programs: bool = False
    modules: bool = False
    fused_attention: str = ""
    narrow_result: str = ""
    fewer_bits: str = ""


FRONTENDS: Registry[Frontend] = Registry("frontend", package="pase.frontends", each="frontend")
"""The frontends in the order in which they are tried. One that reads any callable has a higher rank than the others."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """How an op with bodies (a loop or a branch) is lowered. listed: the heading under which ``pase ops`` shows it."""

    lower: Callable[..., Any]
    listed: str


def lowers_bodies(controls: Registry[Control], *ops: str, listed: str) -> Callable[[C], C]:
    """Decorator for the function that lowers these ops, which contain bodies."""

    def add(lower: C) -> C:
        controls.register(*ops)(Control(lower=lower, listed=listed))
        return lower

    return add


def frontend_of(model: object) -> Frontend | None:
    """The frontend that reads this model, or None."""
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
    """Reads a model with the frontend that reads its kind.

    unknown: what to do with an op that has no rule: "error", or "replicate" (the op is then not split).
    dims: integers for symbolic sizes.
    mode, carry, chances: what the program is for; see ``CompileOptions``. Only JAX programs may use these.
    loss: the loss of a PyTorch module that does not return it; see ``CompileOptions``.
    """
    frontend = frontend_of(model)
    if frontend is None:
        kinds = ", ".join(FRONTENDS)
        raise PaseError(
            f"no frontend reads a {type(model).__module__}.{type(model).__name__}",
            fix=f"pass a model for {kinds}",
        )
    if loss is not None and not frontend.modules:
        raise PaseError(
            f"it is for PyTorch modules, not for a {type(model).__name__}",
            where="loss",
            fix="let the model return its loss",
        )
    if mode == "train" and not carry and not chances:
        given = {} if loss is None else {"loss": loss}
        return frontend.trace(model, *args, name=name, unknown=unknown, dims=dims, **given)
    if not frontend.programs:
        raise PaseError(
            f"mode='{mode}', carry and chances are for JAX functions, not for "
            f"{repr(model) if isinstance(model, str) else f'a {type(model).__name__}'}",
            fix="leave these options out",
        )
    return frontend.trace(
        model, *args, name=name, unknown=unknown, dims=dims, mode=mode, carry=carry, chances=chances
    )


def distinct_paths(inputs: Sequence[str], stored: Collection[str]) -> tuple[str, ...]:
    """The paths of the batch, each behind ``batch.`` if one of them is also the path of something stored: a plan, a
    layout file and a constraint know parameters and inputs by path.

    >>> distinct_paths(["0", "1"], ["w"]), distinct_paths(["0", "1"], ["0"])
    (('0', '1'), ('batch.0', 'batch.1'))
    """
    found = tuple(inputs)
    while not set(found).isdisjoint(stored):
        found = tuple(f"batch.{path}" for path in found)
    return found


def check_dims(dims: DimSizes | None, known: Iterable[str], model: str) -> dict[str, int]:
    """Returns the bindings. Raises PaseError unless they are positive whole numbers for sizes that the model has."""
    known = sorted(set(known))
    for key, value in (dims or {}).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PaseError(
                f"a size cannot be {value!r}", where=f"dim {key}", fix="give a positive whole number"
            )
        if key not in known:
            raise PaseError(
                f"there is no symbolic size '{key}'",
                where=f"model '{model}'",
                fix=f"name one that it has: {', '.join(known) or 'none'}",
            )
    return dict(dims or {})


def type_names(model: object) -> set[str]:
    """``module.Class`` of the object's type and of all its base classes. It imports nothing."""
    return {f"{t.__module__}.{t.__qualname__}" for t in type(model).__mro__}


def coverage() -> dict[str, dict[str, list[str]]]:
    """Frontend -> loop nest -> the framework's ops that become it."""
    return {name: frontend.coverage() for name, frontend in FRONTENDS.items()}


def by_nest(
    rules: Mapping[str, Callable[..., object]], controls: Mapping[str, Control] | None = None
) -> dict[str, list[str]]:
    """Loop nest -> ops, derived from the functions that the rules' code calls. rules: op -> rule."""
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
    """The nest builders that a function may call, directly or through functions of its package.

    known: name -> None for a builder, else a function that calls builders.
    """
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
        elif isinstance(target, Registry):  # TABLE[name](b, x) may call any entry of the table
            out |= {nest for member in target.values() for nest in _calls(member, known, seen)}
    return out
