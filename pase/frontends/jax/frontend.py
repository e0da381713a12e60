"""JAX callables to graphs, through their jaxpr. Only shapes are needed; nothing is run.

The rules for single primitives are in ``rules``, loops and branches in ``control``; this file has the
traversal and calls. Every equation gets a stable path (its index in each enclosing jaxpr). ``backends/jax/gspmd`` uses
it to find the equation again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends import registry
from pase.frontends.jax import attention as jax_attention
from pase.frontends.jax import versions
from pase.frontends.jax.arguments import arguments, fixed_layouts, shape_of, shardings
from pase.frontends.jax.contexts import traced_in_context
from pase.frontends.jax.control import CONTROL, AtRunTime, by_body
from pase.frontends.jax.derivatives import has_custom_rule, lower_with_rule
from pase.frontends.jax.dropped import say_dropped
from pase.frontends.jax.generation import Generation, programs_of
from pase.frontends.jax.modules import ModuleFunction, has_modules, opened
from pase.frontends.jax.program import Carry, Mode, check_order, name_of, program_of
from pase.frontends.jax.rules import Elementwise
from pase.frontends.jax.rules_outside import RULES
from pase.frontends.jax.types import Aval, ClosedJaxpr, Eqn, Jaxpr, Var
from pase.frontends.jax.unchanged import advancing
from pase.frontends.registry import Chances, DimSizes, Unknown, UnknownOp, check_dims
from pase.ir import FixedLayout, Graph, Place, Tensor
from pase.ops import GraphBuilder, nests
from pase.ops.attention import attention
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Sharding
    from jax.tree_util import PyTreeDef

__all__ = [
    "INLINED",
    "KEPT_WHOLE",
    "TracedJax",
    "UnknownOp",
    "coverage",
    "from_jax",
    "inlined",
    "inner_jaxpr",
    "reads",
    "trace",
]

INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_lin": "jaxpr",
    "composite": "jaxpr",
}
"""Primitives that call a jaxpr once, and the parameter that holds it."""


KEPT_WHOLE = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"})
"""Calls with a derivative rule of their own, which a backend must not inline."""


@dataclass(frozen=True, kw_only=True)
class TracedJax(registry.Traced):
    """A callable's jaxpr with the names of its inputs."""

    jaxpr: ClosedJaxpr
    """jax ClosedJaxpr; its inputs are the leaves of params, then of the batch."""
    in_tree: PyTreeDef
    """Treedef of (params, *batch)."""
    operands: Mapping[Place, tuple[str | None, ...]]
    """Equation -> tensor name of each input (None: a literal)."""
    results: Mapping[Place, tuple[str, ...]]
    """Equation -> tensor name of each output; and of each part of a loop or a branch. Equations inside of calls that
    are kept whole have places here, too."""
    fn: Callable[..., Tree] | None = field(default=None, repr=False, compare=False)
    """What was traced, to trace it on a part of the batch."""
    unknown: Unknown = "error"
    mode: Mode = "train"
    carry: Carry = field(default_factory=dict)
    """Batch argument -> where the function returns its next value, as the user said."""
    trip_counts: DimSizes = field(default_factory=dict)
    """How often while loops turn, as the user said."""
    chances: Chances = field(default_factory=dict)
    """How likely branches are, as the user said."""
    carried: Mapping[int, int] = field(default_factory=dict)
    """Input leaf -> the output leaf that is its next value."""
    programs: tuple[str, ...] = ()
    """Of a ``Generation``: what the paths of prefill's equations begin with, and of decode's."""
    kept: Tree = field(default=None, repr=False, compare=False)
    """The arguments' static leaves, in their place; None elsewhere."""
    out_tree: PyTreeDef | None = None
    """Treedef of what the jaxpr returns: of a loss, of (loss, aux)."""
    kept_out: Tree = field(default=None, repr=False, compare=False)
    """The static leaves of what the function returns."""
    written: TracedJax | None = field(default=None, repr=False, compare=False)
    """Of a program with padded dims: the program as the user wrote it."""
    modules: ModuleFunction | None = field(default=None, repr=False, compare=False)
    """Of a function of Flax NNX modules: how its arguments become those of the program."""
    shardings: tuple[Sharding | None, ...] = field(default=(), repr=False, compare=False)
    """Of each input leaf, as the user has it; empty where the program was traced on shapes alone."""

    @cached_property
    def fixed(self) -> Mapping[str, FixedLayout]:
        paths, ranks = (*self.param_paths, *self.input_paths), [a.ndim for a in self.jaxpr.in_avals]
        names = [n.ops[0].writes[0].tensor for n in self.graph.nodes if n.kind in ("parameter", "input")]
        found = fixed_layouts(paths, ranks, self.shardings) if any(self.shardings) else []
        return {name: x for name, x in zip(names, found, strict=False) if x is not None}

    @cached_property
    def held(self) -> frozenset[int]:
        """The input leaves that are no part of a batch: what calls hand to the next, and the Variables of modules."""
        variables = 0 if self.modules is None else self.in_tree.children()[-1].num_leaves
        count = len(self.param_paths) + len(self.input_paths)
        return frozenset({*self.carried, *range(count - variables, count)})

    @property
    def has_aux(self) -> bool:
        """Does the loss function return more than the loss? (What it returns may have no arrays: ``{}``.)"""
        import jax

        if self.mode != "train" or self.out_tree is None:
            return False
        _, aux = self.out_tree.children()
        nothing: Tree = jax.tree.structure(None)
        return aux != nothing


def reads(model: object) -> bool:
    """Any callable."""
    return callable(model)


def coverage() -> dict[str, list[str]]:
    """loop nest -> primitives, for ``pase ops``."""
    return registry.by_nest(RULES, CONTROL) | {"call, inlined": sorted(INLINED)}


def inlined(eqn: Eqn) -> bool:
    """Is the equation a call whose body is inlined in the graph? (A backend walks into it, too.)"""
    name = eqn.primitive.name
    return name in INLINED and name not in KEPT_WHOLE and jax_attention.call_of(eqn) is None


def inner_jaxpr(eqn: Eqn) -> tuple[Jaxpr, Sequence[Array]]:
    """The jaxpr that a call equation calls: (jaxpr, consts)."""
    return versions.opened(eqn.params[INLINED[eqn.primitive.name]])


def _paths(tree: Tree, alone: str = "params") -> tuple[str, ...]:
    """``blocks.0.w`` for each leaf; ``alone`` for a pytree that is a single leaf."""
    import jax

    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return tuple(jax.tree_util.keystr(keys, simple=True, separator=".") or alone for keys, _ in found)


@traced_in_context
def trace(
    fn: Callable[..., Tree],
    params: Tree = None,
    *batch: Tree,
    name: str | None = None,
    unknown: Unknown = "error",
    dims: DimSizes | None = None,
    mode: Mode = "train",
    carry: Carry | None = None,
    chances: Chances | None = None,
) -> TracedJax:
    """Trace ``fn(params, *batch)`` on shapes.

    params, batch: pytrees of arrays or jax.ShapeDtypeStruct, Equinox and Flax NNX modules too; symbolic dims of
    jax.export.symbolic_shape stay symbolic in the graph, unless ``dims`` binds them.
    unknown: what to do at a primitive without a rule: "error", or "replicate" (it may not be split).
    mode: see ``Mode``. carry: batch argument -> where the function returns its next value. chances: conditional ->
    how likely each branch is.
    """
    if params is None:
        raise PaseError(
            "give the loss function's example arguments after it: pase.compile(loss_fn, params, batch, devices=…)"
        )
    import jax

    versions.check()
    called = name or name_of(fn)
    fn, args, mode, carry = _pure(fn, (params, *batch), mode, carry)
    as_shapes, trip_counts, symbols = arguments(args, dims, called)
    program = program_of(fn, args, as_shapes, mode, carry)
    if isinstance(fn, ModuleFunction):
        fn, program = advancing(fn, program, args, as_shapes, mode, carry, INLINED)
    closed = program.jaxpr
    stored = 2 if mode == "step" else 1
    param_paths = _paths(as_shapes[:stored] if stored > 1 else as_shapes[0])
    input_paths = _paths(as_shapes[stored:])
    if twice := [path for path, n in Counter(param_paths).items() if n > 1]:
        raise PaseError(f"two parameters have the path '{twice[0]}': give the pytree's keys distinct names")
    b = GraphBuilder(name=called, frozen=mode != "train")
    programs = programs_of(fn, closed)
    lower = _JaxLowering(
        b=b,
        unknown=unknown,
        told=AtRunTime(trip_counts=trip_counts, chances=chances or {}),
        programs=programs,
    )
    lower.leaves(closed.jaxpr, param_paths, input_paths)
    lower.eqns(closed.jaxpr.eqns, "")
    check_dims(trip_counts, {*symbols, *lower.told.loops}, b.name)
    lower.told.check_chances(b.name)
    say_dropped(b, program.dropped)
    returned = [lower.read(v) for v in closed.jaxpr.outvars]
    outs = [t for t in (returned[:1] if mode == "train" else returned) if t is not None]
    if mode == "train" and not (outs and b.tensors[outs[0].name].needs_grad):
        raise PaseError(_no_gradient(called, bool(lower.told.loops)))
    lower.thread(closed.jaxpr, program.carried, returned)
    for t in dict.fromkeys(t for t in outs if t.role == "activation"):
        b.output(t)
    return TracedJax(
        graph=b.finish(outs, frontend="jax"),
        jaxpr=closed,
        param_paths=param_paths,
        input_paths=input_paths,
        in_tree=jax.tree.structure(as_shapes),
        operands=lower.operands,
        results=lower.results,
        fn=fn,
        unknown=unknown,
        programs=tuple(programs),
        mode=mode,
        carry=dict(carry or {}),
        trip_counts=trip_counts,
        chances=dict(chances or {}),
        carried=program.carried,
        kept=program.kept,
        out_tree=program.out_tree,
        kept_out=program.kept_out,
        modules=fn if isinstance(fn, ModuleFunction) else None,
        shardings=shardings(args),
    )


def _pure(
    fn: Callable[..., Tree], args: tuple[Tree, ...], mode: Mode, carry: Carry | None
) -> tuple[Callable[..., Tree], tuple[Tree, ...], Mode, Carry | None]:
    """(function, its arguments, mode, carry) of arrays alone. A ``Generation`` has a cache; modules are taken apart."""
    if isinstance(fn, Generation):
        if has_modules(args):
            raise PaseError(
                "pase.Generation takes arrays, and an argument is a Flax NNX module: give nnx.state(model), and merge "
                "it in prefill and decode"
            )
        params, *batch = args
        mode, carry = "inference", {len(batch): (1, 0), len(batch) + 1: (1, 1)}
        args = (*args, *fn.state(params, tuple(batch)))
    check_order(fn, len(args))
    fn, carry, args = opened(fn, mode, carry, args)
    return fn, args, mode, carry


def _no_gradient(called: str, loops: bool) -> str:
    loop = "; JAX cannot differentiate a while loop in reverse: use lax.scan, or fori_loop with numbers for bounds"
    return (
        f"{called}'s loss does not depend on any parameter: params come first, fn(params, *batch), and at least one "
        f"must be floating-point and reach the loss{loop if loops else ''}"
    )


def from_jax(
    fn: Callable[..., Tree], params: Tree, *batch: Tree, name: str | None = None, unknown: Unknown = "error"
) -> Graph:
    """The raw graph of ``fn(params, *batch)``; see ``trace``."""
    return trace(fn, params, *batch, name=name, unknown=unknown).graph


def dtype_of(aval: Aval) -> str:
    return "key" if (text := str(aval.dtype)).startswith("key<") else text


@dataclass
class _JaxLowering:
    b: GraphBuilder
    unknown: Unknown
    env: dict[Var, Tensor | None] = field(default_factory=dict)
    """None: a number known from shapes alone, as good as a literal."""
    operands: dict[Place, tuple[str | None, ...]] = field(default_factory=dict)
    results: dict[Place, tuple[str, ...]] = field(default_factory=dict)
    inside: str = ""
    """Path of the enclosing custom-derivative call, which a backend keeps whole."""
    told: AtRunTime = field(default_factory=AtRunTime)
    """Turns of while loops and chances of branches, as far as they are known."""
    programs: Mapping[str, int] = field(default_factory=dict)
    """See ``programs_of``."""
    policy: Callable[..., object] | None = None
    """The enclosing rematerialised region's policy: which results are saved."""

    def inner(self) -> _JaxLowering:
        return replace(self, env={})

    def read(self, var: Var) -> Tensor | None:
        """The tensor of a variable; None for a literal, which is part of the op."""
        return None if versions.is_literal(var) else self.env[var]

    def write(self, variables: Sequence[Var], tensors: Sequence[Tensor]) -> None:
        self.env.update(zip(variables, tensors, strict=True))

    def leaves(self, jaxpr: Jaxpr, param_paths: Sequence[str], input_paths: Sequence[str]) -> None:
        """The program's arguments and constants."""
        kinds = [*[self.b.parameter] * len(param_paths), *[self.b.input] * len(input_paths)]
        for var, leaf, path in zip(jaxpr.invars, kinds, (*param_paths, *input_paths), strict=True):
            self.env[var] = leaf(path, shape_of(var.aval), dtype_of(var.aval))
        self.constants(jaxpr)

    def thread(self, jaxpr: Jaxpr, carried: Mapping[int, int], returned: Sequence[Tensor | None]) -> None:
        """The state that a call passes to the next. carried: argument -> result, both by position."""
        for into, of in carried.items():
            held = self.of(jaxpr.invars[into])
            if (value := returned[of]) is not None and not self.programs:
                self.b.thread(held, value)
            # Each program returns all of the state, and nothing else.
            for k, (path, times) in enumerate(self.programs.items()):
                if (value := returned[of - (1 - k) * len(carried)]) is not None:
                    with self.b.region("program", path, times=times):
                        self.b.thread(held, value)

    def eqns(self, eqns: Sequence[Eqn], prefix: str) -> None:
        for i, eqn in enumerate(eqns):
            # A cached inner jaxpr has lost its lines.
            self.b.source = versions.source_line(eqn) or self.b.source
            at = self.b.eqn = Place(self.inside or f"{prefix}{i}")
            if not self.inside:
                self.operands[at] = tuple(None if (t := self.read(v)) is None else t.name for v in eqn.invars)
            name = eqn.primitive.name
            self.b.saved = self.policy is not None and _saves(self.policy, eqn)
            if call := jax_attention.call_of(eqn):
                q, k, v, *extra = (self.of(x) for x in eqn.invars)
                out = attention(self.b, q, k, v, extra, causal=call.causal, order=call.order)
                self.write(eqn.outvars, [out])
            elif has_custom_rule(self, eqn):
                lower_with_rule(self, eqn, f"{prefix}{i}.")
            elif name in INLINED:
                self._call(eqn, f"{prefix}{i}.")
            elif name in CONTROL:
                CONTROL[name].lower(self, eqn, f"{prefix}{i}.")
            elif name == "dim_as_value" or self._known(eqn):
                self.env.update(dict.fromkeys(eqn.outvars))
            elif name in RULES:
                self._primitive(eqn)
            elif (body := versions.implementation(eqn)) is not None:
                by_body(self, eqn, body)
            elif self.unknown == "replicate":
                self.b.remark_unknown(name)
                self.replicate(eqn, 0.0)
            else:
                raise UnknownOp(
                    f"no lowering for JAX primitive '{name}' at {self.b.source or 'an unknown line'}.\n"
                    f"Add one to frontends/jax/rules.py, or pass unknown='replicate' (the op is then not split)."
                )
            made = (self.env[v] for v in eqn.outvars)
            self.results[Place(f"{prefix}{i}")] = tuple("" if t is None else t.name for t in made)
        self.b.saved = False

    def _known(self, eqn: Eqn) -> bool:
        """Arithmetic on symbolic sizes (a mean divides by b). For a b that is a number, JAX makes it a literal."""
        variables = [v for v in eqn.invars if not versions.is_literal(v)]
        return (
            bool(variables)
            and isinstance(RULES.get(eqn.primitive.name), Elementwise)
            and eqn.outvars[0].aval.shape == ()
            and all(self.env[v] is None for v in variables)
        )

    def _primitive(self, eqn: Eqn) -> None:
        try:
            self.write(eqn.outvars, RULES[eqn.primitive.name](self.b, eqn, [*map(self.read, eqn.invars)]))
        except UnknownOp:  # a kernel without a cost
            if self.unknown != "replicate":
                raise
            self.b.remark_unknown(eqn.primitive.name)
            self.replicate(eqn, 0.0)

    def _call(self, eqn: Eqn, prefix: str) -> None:
        jaxpr, _ = inner_jaxpr(eqn)
        inner = self.inner()
        inner.constants(jaxpr)
        self.bind(inner, jaxpr.invars, eqn.invars)
        if eqn.primitive.name in KEPT_WHOLE and not self.inside:
            inner.inside = self.b.eqn.path
        if eqn.primitive.name in ("remat", "remat2", "checkpoint"):
            inner.policy = eqn.params.get("policy")
            with self.b.region("remat", prefix, remat=not eqn.params.get("differentiated", False)):
                inner.eqns(jaxpr.eqns, prefix)
        elif (times := self.programs.get(prefix)) is not None:
            with self.b.region("program", prefix, times=times):
                inner.eqns(jaxpr.eqns, prefix)
        else:
            inner.eqns(jaxpr.eqns, prefix)
        self._return(inner, jaxpr.outvars, eqn.outvars)

    def constants(self, jaxpr: Jaxpr) -> None:
        """The jaxpr's own constants."""
        for var in jaxpr.constvars:
            self.env[var] = self.b.constant(shape_of(var.aval), dtype_of(var.aval))

    def bind(self, inner: _JaxLowering, names: Sequence[Var], values: Sequence[Var]) -> None:
        for var, value in zip(names, values, strict=True):
            inner.env[var] = self.of(value)

    def _return(self, inner: _JaxLowering, names: Sequence[Var], outs: Sequence[Var]) -> None:
        self.write(outs, [inner.of(name) for name in names])

    def alone(self, told: AtRunTime) -> _JaxLowering:
        """A lowering for a single body, to price it."""
        return _JaxLowering(b=GraphBuilder(name="body"), unknown=self.unknown, told=told)

    def of(self, var: Var) -> Tensor:
        """The tensor of a variable; a literal becomes a constant."""
        tensor = self.read(var)
        return tensor if tensor is not None else self.b.constant(shape_of(var.aval), dtype_of(var.aval))

    def replicate(self, eqn: Eqn, flops: float) -> None:
        inputs = [t for v in eqn.invars if (t := self.read(v)) is not None]
        outs = [(shape_of(v.aval), dtype_of(v.aval)) for v in eqn.outvars]
        self.write(eqn.outvars, nests.opaque(self.b, eqn.primitive.name, inputs, outs, flops=flops))


def _saves(policy: Callable[..., object], eqn: Eqn) -> bool:
    """Does a jax.checkpoint policy save this equation's results? (It is called as JAX calls it.)"""
    if eqn.primitive.name in INLINED or eqn.primitive.name in CONTROL:
        return False  # asked of the equations inside
    answer = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    return answer if isinstance(answer, bool) else type(answer).__name__ != "RecomputeType"


# Any callable is its: it is asked last.
registry.FRONTENDS.add(
    "jax", registry.Frontend(reads=reads, trace=trace, coverage=coverage, programs=True), rank=1
)
