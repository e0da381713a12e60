"""Turns JAX callables into graphs through their jaxpr. Only shapes are needed; nothing is run.

The rules for single primitives are in ``rules``; loops and branches are in ``control``. This file has the traversal and
the calls. Every equation gets a stable path (its index in each enclosing jaxpr), by which ``backends/jax/gspmd`` finds
the equation again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends import registry
from pase.frontends.jax import attention as jax_attention
from pase.frontends.jax import versions
from pase.frontends.jax.arguments import arguments, fixed_layouts, shape_of, shardings
from pase.frontends.jax.attention import is_differentiated
from pase.frontends.jax.contexts import traced_in_context
from pase.frontends.jax.control import CONTROL, AtRunTime, by_body
from pase.frontends.jax.derivatives import check_jvp_rule, has_custom_rule, lower_with_rule
from pase.frontends.jax.dropped import say_dropped
from pase.frontends.jax.generation import Generation, programs_of
from pase.frontends.jax.modules import ModuleFunction, has_modules, opened
from pase.frontends.jax.program import Carry, Mode, check_order, name_of, program_of
from pase.frontends.jax.rules import pointwise
from pase.frontends.jax.rules_outside import RULES
from pase.frontends.jax.types import Aval, ClosedJaxpr, Eqn, Jaxpr, Var
from pase.frontends.jax.unchanged import advancing
from pase.frontends.registry import Chances, DimSizes, Unknown, UnknownOp, check_dims
from pase.frontends.signature import argument_names
from pase.ir import FixedLayout, Graph, Place, Remark, Tensor
from pase.ir.types import is_floating
from pase.ir.whole_step import loss_of
from pase.ops import GraphBuilder, nests
from pase.ops.attention import attention
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Sharding
    from jax.tree_util import PyTreeDef

    from pase.frontends.jax.draws import BatchDraw

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
"""Primitives that call a jaxpr once -> the parameter that contains it."""


KEPT_WHOLE = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"})
"""Calls with their own derivative rule, which a backend must not inline."""


@dataclass(frozen=True, kw_only=True)
class TracedJax(registry.Traced):
    """A callable's jaxpr, with the names of its inputs."""

    jaxpr: ClosedJaxpr
    """The jax ClosedJaxpr. Its inputs are the leaves of params, then those of the batch."""
    in_tree: PyTreeDef
    """The treedef of (params, *batch)."""
    operands: Mapping[Place, tuple[str | None, ...]]
    """Equation -> the tensor name of each input; None for a literal."""
    results: Mapping[Place, tuple[str, ...]]
    """Equation, or part of a loop or a branch -> the tensor name of each output. This includes equations inside calls
    that are kept whole."""
    fn: Callable[..., Tree] | None = field(default=None, repr=False, compare=False)
    """The function that was traced, so that it can be traced again on a part of the batch."""
    unknown: Unknown = "error"
    mode: Mode = "train"
    carry: Carry = field(default_factory=dict)
    """Batch argument -> where the function returns its next value, as the user specified."""
    trip_counts: DimSizes = field(default_factory=dict)
    """The trip counts of while loops, as the user specified."""
    chances: Chances = field(default_factory=dict)
    """The probabilities of branches, as the user specified."""
    programs: tuple[str, ...] = ()
    """For a ``Generation``: the path prefixes of the equations of prefill and of decode."""
    kept: Tree = field(default=None, repr=False, compare=False)
    """The arguments with their static leaves, and None in place of the others."""
    out_tree: PyTreeDef | None = None
    """The treedef of what the jaxpr returns: a loss, or (loss, aux)."""
    kept_out: Tree = field(default=None, repr=False, compare=False)
    """The static leaves of the function's result."""
    written: TracedJax | None = field(default=None, repr=False, compare=False)
    """For a program with padded dims: the program as the user wrote it."""
    modules: ModuleFunction | None = field(default=None, repr=False, compare=False)
    """For a function of Flax NNX modules: how its arguments become those of the program."""
    drawn: Mapping[Place, BatchDraw] = field(default_factory=dict, repr=False, compare=False)
    """For the program of a micro-batch: the draws of which it has a part (``draws_of_batch``)."""
    shardings: tuple[Sharding | None, ...] = field(default=(), repr=False, compare=False)
    """The user's sharding of each input leaf. Empty if the program was traced on shapes alone."""

    @cached_property
    def fixed(self) -> Mapping[str, FixedLayout]:
        paths, ranks = (*self.param_paths, *self.input_paths), [a.ndim for a in self.jaxpr.in_avals]
        names = [n.ops[0].writes[0].tensor for n in self.graph.nodes if n.kind in ("parameter", "input")]
        found = fixed_layouts(paths, ranks, self.shardings) if any(self.shardings) else []
        return {name: x for name, x in zip(names, found, strict=False) if x is not None}

    @cached_property
    def out_names(self) -> tuple[str | None, ...]:
        """For each result of the program, its name in the graph; None for a literal."""
        jaxpr = self.jaxpr.jaxpr
        leaves = (n.ops[0].writes[0].tensor for n in self.graph.nodes if n.kind in ("parameter", "input"))
        names = dict(zip(jaxpr.invars, leaves, strict=False))
        for i, eqn in enumerate(jaxpr.eqns):
            names |= zip(eqn.outvars, self.results[Place(str(i))], strict=True)
        return tuple(None if versions.is_literal(v) else names.get(v) for v in jaxpr.outvars)

    @cached_property
    def held(self) -> frozenset[int]:
        """The input leaves that are not part of a batch: state that calls pass on, and the Variables of modules."""
        variables = 0 if self.modules is None else self.in_tree.children()[-1].num_leaves
        count = len(self.param_paths) + len(self.input_paths)
        return frozenset({*self.carried, *range(count - variables, count)})

    @property
    def has_aux(self) -> bool:
        """Whether the loss function returns more than the loss. What it returns may have no arrays (``{}``)."""
        import jax

        if self.mode != "train" or self.out_tree is None:
            return False
        _, aux = self.out_tree.children()
        nothing: Tree = jax.tree.structure(None)
        return aux != nothing


def reads(model: object) -> bool:
    """Whether this frontend reads the model: it reads any callable."""
    return callable(model)


def coverage() -> dict[str, list[str]]:
    """Loop nest -> primitives, for ``pase ops``."""
    return registry.by_nest(RULES, CONTROL) | {"call, inlined": sorted(INLINED)}


def inlined(eqn: Eqn) -> bool:
    """Whether the equation is a call whose body is inlined in the graph. A backend inlines it, too."""
    name = eqn.primitive.name
    return name in INLINED and name not in KEPT_WHOLE and jax_attention.call_of(eqn) is None


def inner_jaxpr(eqn: Eqn) -> tuple[Jaxpr, Sequence[Array]]:
    """The jaxpr that a call equation calls, as (jaxpr, consts)."""
    return versions.opened(eqn.params[INLINED[eqn.primitive.name]])


def _paths(tree: Tree) -> Iterator[str]:
    """The path of each leaf, such as ``blocks.0.w``; "" if the pytree is a single leaf."""
    import jax

    for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(keys, simple=True, separator=".")


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
    """Traces ``fn(params, *batch)`` on shapes.

    params, batch: pytrees of arrays or jax.ShapeDtypeStruct, including Equinox and Flax NNX modules. Symbolic dims of
        jax.export.symbolic_shape stay symbolic in the graph, unless ``dims`` binds them.
    unknown: what to do with a primitive that has no rule: "error", or "replicate" (the op is then not split).
    dims: symbolic size or while loop -> its size or trip count.
    mode: see ``Mode``.
    carry: batch argument -> where the function returns its next value.
    chances: conditional -> the probability of each branch.

    Raises PaseError, with the line of the user's program if it is known.
    """
    if params is None:
        raise _no_arguments_error()
    import jax

    versions.check()
    called, asked = name or name_of(fn), mode
    fn, args, mode, carry = _pure(fn, (params, *batch), mode, carry)
    as_shapes, trip_counts, symbols = arguments(args, dims, called)
    program = program_of(fn, args, as_shapes, mode, carry)
    if isinstance(fn, ModuleFunction):
        fn, program = advancing(fn, program, args, as_shapes, mode, carry, INLINED)
        if asked == "step" and not program.carried:
            raise _no_step_error(called)
    closed = program.jaxpr
    param_paths, input_paths = _leaf_paths(argument_names(fn, len(args)), as_shapes, program.stored)
    b = GraphBuilder(name=called, frozen=mode != "train")
    programs = programs_of(fn, closed)
    lower = _JaxLowering(
        b=b,
        unknown=unknown,
        told=AtRunTime(trip_counts=trip_counts, chances=chances or {}),
        programs=programs,
    )
    lower.leaves(closed, param_paths, input_paths)
    lower.eqns(closed.jaxpr.eqns, "")
    check_dims(trip_counts, {*symbols, *lower.told.loops}, b.name)
    lower.told.check_chances(b.name)
    say_dropped(b, program.dropped)
    returned = [lower.read(v) for v in closed.jaxpr.outvars]
    outs = [t for t in (returned[:1] if mode == "train" else returned) if t is not None]
    if mode == "train":
        _check_gradient(b, outs, called, bool(lower.told.loops))
    lower.thread(closed.jaxpr, program.carried, returned)
    for t in dict.fromkeys(t for t in outs if t.role == "activation"):
        b.output(t)
    graph = b.finish(outs, frontend="jax")
    return TracedJax(
        graph=_as_step(graph, closed, returned, program.carried.values()) if asked == "step" else graph,
        contents=b.contents,
        attributes=b.attributes,
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


_NO_LOSS = Remark(
    "assumed",
    "nothing of this step is hidden behind compute, and each gradient is summed by itself, because the step returns no "
    "loss by which to tell forward from backward: return it beside the new state",
)


_WRITTEN_OUT = Remark(
    "assumed",
    "the step differentiates its attention itself, so that JAX writes it out as products and a softmax: a plan of the "
    "loss alone runs it as one kernel where there is one, and plan.jax.value_and_grad() then takes the gradient's "
    "place in the step",
)


def _as_step(
    graph: Graph, program: ClosedJaxpr, returned: Sequence[Tensor | None], carried: Collection[int]
) -> Graph:
    """A graph that knows which of the step's results is its loss. carried: the results that are the next state."""
    numbers = [
        t.name
        for i, t in enumerate(returned)
        if t is not None and i not in carried and t.shape == () and is_floating(t.dtype)
    ]
    loss = loss_of(graph, numbers)
    remarks = [*graph.remarks, *([] if loss else [_NO_LOSS])]
    if is_differentiated(program.jaxpr.eqns):
        remarks.append(_WRITTEN_OUT)
    return replace(graph, facts=replace(graph.facts, loss=loss), remarks=tuple(remarks))


def _leaf_paths(
    names: Sequence[str], as_shapes: tuple[Tree, ...], stored: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(Paths of the leaves of the first ``stored`` arguments, those of the others), all distinct, each behind the name
    of its argument; those of parameters alone without. Raises PaseError if two of the first are equal."""
    named = [
        [".".join(filter(None, (name, path))) for path in _paths(tree)]
        for name, tree in zip(names, as_shapes, strict=True)
    ]
    alone = [path or "params" for path in _paths(as_shapes[0])]
    param_paths = tuple(chain(*named[:stored]) if stored > 1 else alone)
    if twice := [path for path, n in Counter(param_paths).items() if n > 1]:
        raise _same_path_error(twice[0])
    return param_paths, registry.distinct_paths(tuple(chain(*named[stored:])), param_paths)


def _pure(
    fn: Callable[..., Tree], args: tuple[Tree, ...], mode: Mode, carry: Carry | None
) -> tuple[Callable[..., Tree], tuple[Tree, ...], Mode, Carry | None]:
    """Returns (function, its arguments, mode, carry) of arrays only. A ``Generation`` gets its cache as an argument;
    modules are split into arrays."""
    if isinstance(fn, Generation):
        if has_modules(args):
            raise PaseError(
                "pase.Generation takes arrays, but an argument is a Flax NNX module",
                fix="pass nnx.state(model), and merge it in prefill and decode",
            )
        params, *batch = args
        mode, carry = "inference", {len(batch): (1, 0), len(batch) + 1: (1, 1)}
        args = (*args, *fn.state(params, tuple(batch)))
    check_order(fn, len(args))
    if mode == "step" and has_modules(
        args
    ):  # what it passes on are its Variables, as in any function of modules
        mode = "inference"
    fn, carry, args = opened(fn, mode, carry, args)
    return fn, args, mode, carry


def _no_arguments_error() -> PaseError:
    return PaseError(
        "the loss function has no example arguments",
        fix="pass them after the function: pase.compile(loss_fn, params, batch, devices=…)",
    )


def _no_step_error(called: str) -> PaseError:
    return PaseError(
        "it writes no Variable of its modules, so it is no train step",
        where=f"mode='step' of {called}",
        fix="write it as step(model, optimizer, *batch), with optimizer.update(model, grads) for an nnx.Optimizer, or "
        "compile the loss",
    )


def _same_path_error(path: str) -> PaseError:
    return PaseError(
        f"two parameters have the path '{path}'", fix="give the keys of the pytree distinct names"
    )


def _check_gradient(b: GraphBuilder, outs: list[Tensor], called: str, loops: bool) -> None:
    """Raises PaseError if the loss depends on no parameter."""
    b.settle_gradients()
    if not (outs and b.tensors[outs[0].name].needs_grad):
        raise _no_gradient_error(called, loops)


def _no_gradient_error(called: str, loops: bool) -> PaseError:
    """The error for a loss without a gradient. loops: whether the program contains while loops."""
    loop = "; JAX cannot differentiate a while loop in reverse: use lax.scan, or fori_loop with numbers as bounds"
    return PaseError(
        "its loss does not depend on any parameter",
        where=called,
        fix=f"pass the parameters first, {called}(params, *batch), and make sure that at least one is floating-point "
        f"and reaches the loss{loop if loops else ''}",
    )


def from_jax(
    fn: Callable[..., Tree], params: Tree, *batch: Tree, name: str | None = None, unknown: Unknown = "error"
) -> Graph:
    """Returns the raw graph of ``fn(params, *batch)``; see ``trace``."""
    return trace(fn, params, *batch, name=name, unknown=unknown).graph


def dtype_of(aval: Aval) -> str:
    """The dtype's name in the graph; "key" for any type of random keys."""
    return "key" if (text := str(aval.dtype)).startswith("key<") else text


@dataclass
class _JaxLowering:
    """Lowers the equations of one jaxpr into a graph. ``inner`` gives the lowering of a jaxpr inside it."""

    b: GraphBuilder
    unknown: Unknown
    env: dict[Var, Tensor | None] = field(default_factory=dict)
    """Variable -> tensor. None for a number that shapes alone determine; it is treated like a literal."""
    operands: dict[Place, tuple[str | None, ...]] = field(default_factory=dict)
    results: dict[Place, tuple[str, ...]] = field(default_factory=dict)
    inside: str = ""
    """The path of the enclosing call with a custom derivative rule, which a backend keeps whole; "" outside."""
    told: AtRunTime = field(default_factory=AtRunTime)
    """The trip counts of while loops and the probabilities of branches, as far as they are known."""
    programs: Mapping[str, int] = field(default_factory=dict)
    """Path of each program's equations -> how often it runs; see ``programs_of``."""
    policy: Callable[..., object] | None = None
    """The policy of the enclosing rematerialised region, which decides which results are saved."""

    def inner(self) -> _JaxLowering:
        return replace(self, env={})

    def read(self, var: Var) -> Tensor | None:
        """The tensor of a variable. None for a literal, which is part of the op that reads it."""
        return None if versions.is_literal(var) else self.env[var]

    def write(self, variables: Sequence[Var], tensors: Sequence[Tensor]) -> None:
        self.env.update(zip(variables, tensors, strict=True))

    def leaves(self, closed: ClosedJaxpr, param_paths: Sequence[str], input_paths: Sequence[str]) -> None:
        """Adds the program's arguments and constants."""
        jaxpr, values = versions.opened(closed)
        kinds = [*[self.b.parameter] * len(param_paths), *[self.b.input] * len(input_paths)]
        for var, leaf, path in zip(jaxpr.invars, kinds, (*param_paths, *input_paths), strict=True):
            self.env[var] = leaf(path, shape_of(var.aval), dtype_of(var.aval))
        self.constants(jaxpr, values)

    def thread(self, jaxpr: Jaxpr, carried: Mapping[int, int], returned: Sequence[Tensor | None]) -> None:
        """Connects the state that a call passes to the next. carried: argument -> result, both by position."""
        for into, of in carried.items():
            held = self.of(jaxpr.invars[into])
            if (value := returned[of]) is not None and not self.programs:
                self.b.thread(held, value)
            # Each program returns the whole state, and nothing else.
            for k, (path, times) in enumerate(self.programs.items()):
                if (value := returned[of - (1 - k) * len(carried)]) is not None:
                    with self.b.region("program", path, times=times):
                        self.b.thread(held, value)

    def eqns(self, eqns: Sequence[Eqn], prefix: str) -> None:
        for i, eqn in enumerate(eqns):
            # A cached inner jaxpr has no lines, so the last known line stays.
            self.b.source = versions.source_line(eqn) or self.b.source
            at = self.b.eqn = Place(self.inside or f"{prefix}{i}")
            self.b.tell(_attributes(eqn))
            self.b.precision = versions.precision(eqn)
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
                raise UnknownOp.in_frontend(
                    f"no lowering for JAX primitive '{name}'",
                    where=str(self.b.source or "an unknown line"),
                    rules="frontends/jax/rules.py",
                )
            made = (self.env[v] for v in eqn.outvars)
            self.results[Place(f"{prefix}{i}")] = tuple("" if t is None else t.name for t in made)
        self.b.saved = False

    def _known(self, eqn: Eqn) -> bool:
        """Whether this is arithmetic on symbolic sizes (a mean divides by b). A known b would be a literal in JAX."""
        variables = [v for v in eqn.invars if not versions.is_literal(v)]
        return (
            bool(variables)
            and pointwise(eqn)
            and eqn.outvars[0].aval.shape == ()
            and all(self.env[v] is None for v in variables)
        )

    def _primitive(self, eqn: Eqn) -> None:
        try:
            self.write(eqn.outvars, RULES[eqn.primitive.name](self.b, eqn, [*map(self.read, eqn.invars)]))
        except UnknownOp:  # a kernel whose cost is not known
            if self.unknown != "replicate":
                raise
            self.b.remark_unknown(eqn.primitive.name)
            self.replicate(eqn, 0.0)

    def _call(self, eqn: Eqn, prefix: str) -> None:
        if eqn.primitive.name == "custom_jvp_call":
            check_jvp_rule(self, eqn)
        jaxpr, values = inner_jaxpr(eqn)
        inner = self.inner()
        inner.constants(jaxpr, values)
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

    def constants(self, jaxpr: Jaxpr, values: Sequence[Array]) -> None:
        """Adds the jaxpr's own constants. values: those of its constvars; none for an open jaxpr."""
        for var, value in zip_longest(jaxpr.constvars, values):
            held = None if value is None else partial(versions.plain_array, value)
            self.env[var] = self.b.constant(shape_of(var.aval), dtype_of(var.aval), contents=held)

    def bind(self, inner: _JaxLowering, names: Sequence[Var], values: Sequence[Var]) -> None:
        for var, value in zip(names, values, strict=True):
            inner.env[var] = self.of(value)

    def _return(self, inner: _JaxLowering, names: Sequence[Var], outs: Sequence[Var]) -> None:
        self.write(outs, [inner.of(name) for name in names])

    def alone(self, told: AtRunTime) -> _JaxLowering:
        """A lowering for a single body, used to count its FLOPs."""
        return _JaxLowering(b=GraphBuilder(name="body"), unknown=self.unknown, told=told)

    def of(self, var: Var) -> Tensor:
        """The tensor of a variable. A literal becomes a constant."""
        tensor = self.read(var)
        if tensor is not None:
            return tensor
        held = var.val if versions.is_literal(var) else None
        return self.b.constant(shape_of(var.aval), dtype_of(var.aval), contents=held)

    def replicate(self, eqn: Eqn, flops: float) -> None:
        inputs = [t for v in eqn.invars if (t := self.read(v)) is not None]
        outs = [(shape_of(v.aval), dtype_of(v.aval)) for v in eqn.outvars]
        self.write(eqn.outvars, nests.opaque(self.b, eqn.primitive.name, inputs, outs, flops=flops))


def _attributes(eqn: Eqn) -> object:
    """The plain parameters and the literals of an equation, for ops that the graph does not determine. Trip counts and
    the literals of elementwise equations are left out: the graph has them."""
    name = eqn.primitive.name
    told = {k: v for k, v in eqn.params.items() if isinstance(v, int | float | str) and k != "length"}
    plain = not pointwise(eqn) and name not in INLINED and name not in CONTROL
    return name, told, [v.val for v in eqn.invars if plain and versions.is_literal(v)]


def _saves(policy: Callable[..., object], eqn: Eqn) -> bool:
    """Whether a jax.checkpoint policy saves this equation's results. The policy is called as JAX calls it."""
    if eqn.primitive.name in INLINED or eqn.primitive.name in CONTROL:
        return False  # the policy decides about the equations inside
    answer = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    return answer if isinstance(answer, bool) else type(answer).__name__ != "RecomputeType"


# This frontend reads any callable, so it is tried last.
registry.FRONTENDS.add(
    "jax",
    registry.Frontend(
        reads=reads,
        trace=trace,
        coverage=coverage,
        programs=True,
        fused_attention="Request one: jax.nn.dot_product_attention(..., implementation='cudnn') on a GPU, which has "
        "no dropout; nnx.MultiHeadAttention takes it as attention_fn, and zoo models as attention=fused",
        narrow_result="Without preferred_element_type, jnp.matmul(x, w).astype(jnp.float32) is summed in float32 too, "
        "and rounded once",
        fewer_bits="That is what JAX uses without precision= and jax.default_matmul_precision",
    ),
    rank=1,
)
