"""TensorFlow models to graphs: Keras models, tf.function, SavedModel folders, frozen GraphDefs. Nothing is run.

``read`` (with ``live`` and ``files``) makes a graph of whatever the user has, ``graph`` checks and
orders it, ``lower`` walks it, and the rules for single ops are in ``rules``, ``rules_nn``,
``rules_shape``, ``lists`` and ``loops``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pase.errors import PaseError
from pase.frontends import registry
from pase.frontends.registry import DimSizes, Unknown
from pase.frontends.tf import sources
from pase.frontends.tf.graph import CALLS, TfGraph, TfNode
from pase.frontends.tf.lists import LISTS
from pase.frontends.tf.loops import REGIONS
from pase.frontends.tf.lower import PASSED_ON, TfLowering
from pase.frontends.tf.read import read_source
from pase.frontends.tf.rules import RULES
from pase.frontends.tf.sources import InputSpec, TfSource, Variable
from pase.frontends.tf.values import Absent, Handle, Reshaped, TfValue
from pase.ir import Graph, Place, Tensor
from pase.ir.types import is_floating
from pase.ops import GraphBuilder
from pase.pytree import Tree

__all__ = ["TracedTf", "coverage", "from_tf", "reads", "trace"]

reads = sources.reads

_SEED = 8
"""Integers in the largest variable that is a random seed or a counter: on every device, like JAX's keys."""


@dataclass(frozen=True, kw_only=True)
class TracedTf(registry.Traced):
    """A TensorFlow graph with the names of what goes in, and of every tensor in it."""

    program: TfGraph
    """What was lowered: the main body and the functions that it calls."""
    source: TfSource
    operands: Mapping[Place, tuple[str | None, ...]]
    """Node -> tensor name of each operand (None: a number, or no tensor)."""
    results: Mapping[Place, tuple[str, ...]]
    """Node -> tensor name of each result ("" where it is none); and of each part of a loop."""
    variables: Mapping[str, Variable]
    """Path -> variable, of those that the outputs depend on."""


def coverage() -> dict[str, list[str]]:
    """loop nest -> ops, for ``pase ops``."""
    out = registry.by_nest({**RULES, **LISTS}, REGIONS)
    out["elementwise"] = sorted({*out.get("elementwise", ())} - PASSED_ON)
    out["no work"] = sorted({*out.get("no work", ()), *PASSED_ON})
    return out | {"call, inlined": sorted(CALLS)}


def trace(
    model: object,
    *args: Tree,
    name: str | None = None,
    unknown: Unknown = "error",
    dims: DimSizes | None = None,
) -> TracedTf:
    """Read a TensorFlow model.

    model: a Keras model (traced with training=True), a tf.function with example arguments behind it (TensorSpecs,
        tensors, arrays), a ConcreteFunction, a SavedModel's folder, a frozen GraphDef or its .pb file.
    dims: sizes for dims that the model leaves open: ``batch`` for the first dim of every input, ``INPUT.DIM`` for any.
    unknown: what to do at an op without a rule: "error", or "replicate" (it may not be split).

    If a model returns a scalar, that is its loss; otherwise its floating-point outputs are used as the loss.
    """
    source = read_source(model, args, name, dict(dims or {}))
    b = GraphBuilder(name=source.name)
    variables = _ModelVariables(b=b, source=source)
    lower = TfLowering(
        b=b,
        graph=source.graph,
        unknown=unknown,
        variable=variables.read,
        weight=variables.weight,
        source=lambda n: source.lines.get(n, ""),
    )
    read = {r for n in source.graph.main.nodes for r in n.inputs} | set(source.graph.main.outputs)
    given: dict[str, TfValue] = {}
    for ref, v in source.captured.items():
        if ref in read and isinstance(v, Variable):
            given[ref] = Handle(variables.tensor(v))
    for ref, spec in source.inputs.items():
        given[ref] = b.input(spec.name, _whole(spec), spec.dtype)
    for ref, v in source.captured.items():
        if ref in read and isinstance(v, InputSpec):
            given[ref] = b.constant(_whole(v), v.dtype)
    args_in = [given.get(ref) or Absent("not read") for ref in source.graph.main.args]
    outs = lower.body(source.graph.main, args_in, "")
    outs = [
        v.tensor(b) if isinstance(v, Reshaped) else v.tensor if isinstance(v, Handle) else v for v in outs
    ]
    lower.finish()
    tensors = [v for v in outs if isinstance(v, Tensor)]
    tensors = [t for t in dict.fromkeys(tensors) if is_floating(t.dtype)]
    if not any(b.tensors[t.name].needs_grad for t in tensors):
        raise PaseError(
            f"what '{source.name}' returns does not depend on any trainable floating-point variable: there is nothing "
            f"to parallelize"
        )
    tensors = [t for t in tensors if b.tensors[t.name].needs_grad]
    for t in tensors:
        b.output(t)
    return TracedTf(
        graph=b.finish(tensors, frontend="tensorflow"),
        param_paths=tuple(t.path for t in b.tensors.values() if t.role == "parameter"),
        input_paths=tuple(t.path for t in b.tensors.values() if t.role == "input"),
        program=source.graph,
        source=source,
        operands=lower.operands,
        results=lower.results,
        variables=variables.used,
    )


@dataclass(kw_only=True)
class _ModelVariables:
    """The model's variables, each a parameter or an input once something reads it. used: those, by path."""

    b: GraphBuilder
    source: TfSource
    used: dict[str, Variable] = field(default_factory=dict)
    _handles: dict[str, Tensor] = field(default_factory=dict)

    def tensor(self, v: Variable) -> Tensor:
        """The variable's value."""
        if v.path not in self._handles:
            if any(s < 1 for s in v.shape):
                raise PaseError(
                    f"variable '{v.path}' has shape {v.shape}: a dim without elements cannot be split"
                )
            floats = is_floating(v.dtype)
            make = self.b.parameter if v.trainable and floats else self.b.input
            seed = not floats and math.prod(v.shape) <= _SEED
            self._handles[v.path] = make(v.path, v.shape, "key" if seed else v.dtype)
            self.used[v.path] = v
        return self._handles[v.path]

    def read(self, node: TfNode) -> TfValue:
        """The value of a node that makes a variable."""
        if node.name not in self.source.variables:
            raise PaseError(f"variable '{node.name}' has no static shape: pase needs one")
        t = self.tensor(self.source.variables[node.name])
        return Handle(t) if node.op == "VarHandleOp" else t

    def weight(self, node: TfNode, shape: tuple[int, ...], dtype: str) -> Tensor | None:
        """A constant of a frozen graph that was a variable; None: it was none."""
        if node.name not in self.source.weights or dtype == "string":
            return None
        return self.tensor(Variable(path=_unfrozen(node.name), shape=shape, dtype=dtype))


def from_tf(model: object, *args: Tree, unknown: Unknown = "error", dims: DimSizes | None = None) -> Graph:
    """The raw graph of a TensorFlow model; see ``trace``."""
    return trace(model, *args, unknown=unknown, dims=dims).graph


def _unfrozen(name: str) -> str:
    """The variable's name of a frozen constant: freezing in TensorFlow 2 puts the reading node's name behind it."""
    return name.removesuffix("/resource").removesuffix("/ReadVariableOp")


def _whole(spec: InputSpec) -> tuple[int, ...]:
    if any(s is None for s in spec.shape):
        raise PaseError(f"'{spec.name}' has shape {spec.shape}: pase needs static shapes")
    return tuple(s for s in spec.shape if s is not None)


registry.FRONTENDS.add("tensorflow", registry.Frontend(reads=reads, trace=trace, coverage=coverage))
