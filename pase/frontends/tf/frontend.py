"""Reads TensorFlow models: Keras models, tf.function, SavedModel folders, frozen GraphDefs. Nothing is run.

``read`` (with ``live`` and ``files``) reads a model as a TensorFlow graph, ``graph`` checks and orders the graph, and
``lower`` walks it. The rules for single ops are in ``rules*``, ``lists`` and ``loops``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pase.errors import PaseError
from pase.frontends import registry
from pase.frontends.common.values import Value
from pase.frontends.registry import DimSizes, Unknown
from pase.frontends.tf import sources
from pase.frontends.tf.graph import CALLS, TfGraph, TfNode
from pase.frontends.tf.lists import LISTS
from pase.frontends.tf.loops import REGIONS
from pase.frontends.tf.lower import PASSED_ON, TfLowering
from pase.frontends.tf.read import read_source
from pase.frontends.tf.rules import RULES
from pase.frontends.tf.sources import InputSpec, TfSource, Variable
from pase.frontends.tf.values import Absent, Handle, TfResult, TfValue, tensor_of, value_of, whole
from pase.ir import Graph, Place, Tensor
from pase.ir.types import is_floating
from pase.ops import GraphBuilder
from pase.pytree import Tree

__all__ = ["TracedTf", "coverage", "from_tf", "reads", "trace"]

reads = sources.reads

_SEED = 8
"""An integer variable of at most this many elements is a random seed or a counter: replicated, like JAX's keys."""


@dataclass(frozen=True, kw_only=True)
class TracedTf(registry.Traced):
    """A TensorFlow model's graph, with the names of its inputs and of the tensors that its nodes read and make."""

    program: TfGraph
    """The TensorFlow graph that was lowered: the main body and the functions that it calls."""
    source: TfSource
    operands: Mapping[Place, tuple[str | None, ...]]
    """Node -> the name of the tensor of each operand (None for a number, or for a value that is no tensor)."""
    results: Mapping[Place, tuple[str, ...]]
    """Node, or part of a loop -> the name of the tensor of each result ("" for a value that is no tensor)."""
    variables: Mapping[str, Variable]
    """Path -> variable, for the variables that the outputs depend on."""


def coverage() -> dict[str, list[str]]:
    """Loop nest -> the ops that are lowered to it, for ``pase ops``."""
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

    model: a Keras model (traced with training=True), a tf.function followed by example arguments (TensorSpecs, tensors,
        arrays), a ConcreteFunction, the folder of a SavedModel, or a frozen GraphDef or its .pb file.
    dims: sizes for dims that the model leaves open. ``batch`` is the first dim of every input, ``INPUT.DIM`` any dim.
    unknown: what to do with an op without a rule: "error", or "replicate" (the op is not split).

    If the model returns a scalar, that is its loss; otherwise, all floating-point outputs are used as the loss.
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
        given[ref] = value_of(b.input(spec.name, _whole(spec), spec.dtype))
    for ref, v in source.captured.items():
        if ref in read and isinstance(v, InputSpec):
            given[ref] = value_of(b.constant(_whole(v), v.dtype))
    args_in = [given.get(ref) or Absent("not read") for ref in source.graph.main.args]
    outs = [whole(v) for v in lower.body(source.graph.main, args_in, "")]
    lower.finish()
    b.settle_gradients()
    made = [tensor_of(v) for v in outs if isinstance(v, (Value, Handle))]
    tensors = [t for t in dict.fromkeys(made) if t is not None and is_floating(t.dtype)]
    if not any(b.tensors[t.name].needs_grad for t in tensors):
        raise PaseError(
            "its outputs do not depend on any trainable floating-point variable, so there is nothing to parallelize",
            where=source.name,
        )
    tensors = [t for t in tensors if b.tensors[t.name].needs_grad]
    for t in tensors:
        b.output(t)
    return TracedTf(
        graph=b.finish(tensors, frontend="tensorflow"),
        contents=b.contents,
        attributes=b.attributes,
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
    """The model's variables. A variable becomes a parameter or an input when something first reads it.

    used: path -> variable, for the variables that have been read.
    """

    b: GraphBuilder
    source: TfSource
    used: dict[str, Variable] = field(default_factory=dict)
    _handles: dict[str, Tensor] = field(default_factory=dict)

    def tensor(self, v: Variable) -> Tensor:
        """The tensor of a variable."""
        if v.path not in self._handles:
            if any(s < 1 for s in v.shape):
                raise PaseError(
                    f"its shape is {v.shape}, but a dim without elements cannot be split",
                    where=f"variable '{v.path}'",
                )
            floats = is_floating(v.dtype)
            make = self.b.parameter if v.trainable and floats else self.b.input
            seed = not floats and math.prod(v.shape) <= _SEED
            self._handles[v.path] = make(v.path, v.shape, "key" if seed else v.dtype)
            self.used[v.path] = v
        return self._handles[v.path]

    def read(self, node: TfNode) -> TfResult:
        """The value of a node that makes a variable: a handle, or the tensor itself for variables of version 1."""
        if node.name not in self.source.variables:
            raise PaseError(
                "it has no static shape",
                where=f"variable '{node.name}'",
                fix="save the model with a static shape",
            )
        t = self.tensor(self.source.variables[node.name])
        return Handle(t) if node.op == "VarHandleOp" else t

    def weight(self, node: TfNode, shape: tuple[int, ...], dtype: str) -> Tensor | None:
        """The parameter for a constant of a frozen graph that used to be a variable; None for any other constant."""
        if node.name not in self.source.weights or dtype == "string":
            return None
        return self.tensor(Variable(path=_unfrozen(node.name), shape=shape, dtype=dtype))


def from_tf(model: object, *args: Tree, unknown: Unknown = "error", dims: DimSizes | None = None) -> Graph:
    """The raw graph of a TensorFlow model; see ``trace``."""
    return trace(model, *args, unknown=unknown, dims=dims).graph


def _unfrozen(name: str) -> str:
    """The name of a variable from the name of its frozen constant.

    Freezing in TensorFlow 2 appends the name of the node that read the variable.
    """
    return name.removesuffix("/resource").removesuffix("/ReadVariableOp")


def _whole(spec: InputSpec) -> tuple[int, ...]:
    if any(s is None for s in spec.shape):
        raise PaseError(
            f"its shape {spec.shape} is not static",
            where=f"input '{spec.name}'",
            fix="give it a static shape",
        )
    return tuple(s for s in spec.shape if s is not None)


registry.FRONTENDS.add("tensorflow", registry.Frontend(reads=reads, trace=trace, coverage=coverage))
