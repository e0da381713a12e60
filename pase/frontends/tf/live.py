"""Reads Keras models and TensorFlow functions as graphs. Tracing runs the user's Python code, but computes nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pase.errors import PaseError
from pase.frontends.registry import DimSizes
from pase.frontends.tf.graph_def import graph_of
from pase.frontends.tf.sources import (
    InputSpec,
    TfSource,
    Variable,
    bound,
    distinct,
    dtype_of,
    is_keras,
    shape_of,
    short,
)
from pase.pytree import Tree

if TYPE_CHECKING:
    from keras import Model as KerasModel
    from tensorflow import TensorSpec
    from tensorflow.python.framework.func_graph import FuncGraph
    from tensorflow.types.experimental import ConcreteFunction
    from tensorflow.types.experimental import PolymorphicFunction as TfFunction

__all__ = ["from_function", "from_keras", "keras_paths"]


def from_keras(model: KerasModel, args: Sequence[Tree], name: str | None, dims: DimSizes) -> TfSource:
    """A Keras model, traced with training=True and with its loss if it was compiled with one."""
    import tensorflow as tf

    title = name or str(getattr(model, "name", type(model).__name__))
    if args:
        given = _specs(args, dims, title)
    else:
        inputs = getattr(model, "inputs", None)
        if not inputs:
            raise PaseError(
                "the Keras model does not know its inputs yet",
                where=title,
                fix="give an example, pase.compile(model, tf.TensorSpec((8, 224, 224, 3)), …), or build the model from "
                "keras.Input",
            )
        names = distinct([str(i.name).partition(":")[0] for i in inputs])
        specs = [
            InputSpec(name=n, shape=shape_of(i.shape, f"input '{n}'"), dtype=dtype_of(i.dtype))
            for n, i in zip(names, inputs, strict=True)
        ]
        flat = [tf.TensorSpec(s.shape, s.dtype, name=s.name) for s in bound(specs, dims, title)]
        structure = getattr(model, "_inputs_struct", None)
        if structure is None:
            structure = inputs if len(inputs) > 1 else inputs[0]
        given = [tf.nest.pack_sequence_as(structure, flat)]
    loss = getattr(model, "loss", None)

    def step(*x: Tree) -> Tree:
        y = model(*x, training=True)
        return y

    def with_loss(labels: Tree, *x: Tree) -> Tree:
        return model.compute_loss(x=x, y=labels, y_pred=model(*x, training=True))

    try:
        concrete = tf.function(step, autograph=False).get_concrete_function(*given)
        if loss is not None and not isinstance(loss, (list, tuple, dict)):
            labels = _labels(loss, concrete)
            if labels is not None:
                concrete = tf.function(with_loss, autograph=False).get_concrete_function(labels, *given)
    except (TypeError, ValueError, NotImplementedError, tf.errors.OpError) as e:
        raise PaseError(f"Keras cannot trace the model on these shapes: {short(e)}", where=title) from e
    return _concrete(concrete, title, {}, keras_paths(model))


def _labels(loss: Callable[..., Tree] | str, concrete: ConcreteFunction) -> TensorSpec | None:
    """A spec for the labels of a compiled model's loss; None if the model has several outputs.

    Labels have the shape of the output, or, for a sparse loss, that shape without the last dim.
    """
    import tensorflow as tf

    outputs = tf.nest.flatten(concrete.structured_outputs)
    if len(outputs) != 1 or outputs[0].shape.rank in (None, 0):
        return None
    text = loss if isinstance(loss, str) else str(getattr(loss, "name", getattr(loss, "__name__", "")))
    if "sparse" in text.lower():
        return tf.TensorSpec(outputs[0].shape[:-1], "int32", name="labels")
    return tf.TensorSpec(outputs[0].shape, outputs[0].dtype, name="labels")


def keras_paths(model: KerasModel) -> dict[int, Variable]:
    """Id of a variable's handle -> the variable, with Keras's path (``dense/kernel``)."""
    variables = list(getattr(model, "variables", []))
    paths = distinct([str(getattr(v, "path", None) or v.name).partition(":")[0] for v in variables])
    out: dict[int, Variable] = {}
    for v, path in zip(variables, paths, strict=True):
        inner = getattr(v, "value", v)
        inner = v if callable(inner) else inner
        handle = getattr(inner, "handle", None)
        if handle is not None:
            out[id(handle)] = Variable(
                path=path,
                shape=tuple(map(int, v.shape)),
                dtype=dtype_of(v.dtype),
                trainable=bool(v.trainable),
            )
    return out


def from_function(model: TfFunction, args: Sequence[Tree], name: str | None, dims: DimSizes) -> TfSource:
    """A tf.function, traced on the example arguments, or a ConcreteFunction."""
    import tensorflow as tf

    title = name or str(getattr(model, "__name__", "function"))
    concrete = model
    if hasattr(model, "get_concrete_function"):
        title = name or str(getattr(getattr(model, "python_function", model), "__name__", title))
        if not args and getattr(model, "input_signature", None) is None:
            raise PaseError(
                "a tf.function needs example arguments",
                where=title,
                fix="give them after it: pase.compile(fn, tf.TensorSpec((8, 32)), …)",
            )
        given = _specs(args, dims, title)
        try:
            concrete = model.get_concrete_function(*given)
        except (TypeError, ValueError, NotImplementedError, tf.errors.OpError) as e:
            raise PaseError(
                f"TensorFlow cannot trace the function on these shapes: {short(e)}", where=title
            ) from e
        dims = {} if args else dims
    elif args:
        raise PaseError(
            "the shapes of a ConcreteFunction are fixed", where=title, fix="give no arguments after it"
        )
    return _concrete(concrete, title, dims, _closed_over(getattr(model, "python_function", None)))


def _closed_over(function: Any) -> dict[int, Variable]:
    """Id of a variable's handle -> the variable, for Keras layers and modules that a Python function refers to."""
    out: dict[int, Variable] = {}
    code = getattr(function, "__code__", None)
    if code is None:
        return out
    cells = [c for c in getattr(function, "__closure__", None) or ()]
    objects = [getattr(function, "__self__", None)]
    for cell in cells:
        try:
            objects.append(cell.cell_contents)
        except ValueError:  # the cell is still empty
            continue
    objects += [function.__globals__[n] for n in code.co_names if n in function.__globals__]
    for thing in objects:
        if is_keras(thing):
            out |= keras_paths(thing)
    return out


def _specs(args: Sequence[Tree], dims: DimSizes, title: str) -> list[Tree]:
    """TensorSpecs for example arguments, which may be anything with shape and dtype. The nesting is kept."""
    import tensorflow as tf

    flat = tf.nest.flatten(list(args))
    found: list[InputSpec] = []
    for k, leaf in enumerate(flat):
        if isinstance(leaf, (bool, int, float)):
            leaf = tf.constant(leaf)
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None:
            raise PaseError(
                f"it is a {type(leaf).__name__}, which has no shape and dtype",
                where=f"argument {k} of '{title}'",
                fix="give tf.TensorSpec(shape, dtype) or an array",
            )
        name = getattr(leaf, "name", None) if isinstance(leaf, tf.TensorSpec) else None
        found.append(
            InputSpec(name=name or f"arg{k}", shape=shape_of(shape, f"argument {k}"), dtype=dtype_of(dtype))
        )
    names = distinct([s.name for s in found])
    found = [InputSpec(name=n, shape=s.shape, dtype=s.dtype) for n, s in zip(names, found, strict=True)]
    specs = [
        tf.TensorSpec(s.shape, s.dtype, name=re.sub(r"[^\w.]", "_", s.name))
        for s in bound(found, dims, title)
    ]
    packed: list[Tree] = tf.nest.pack_sequence_as(list(args), specs)
    return packed


def _concrete(
    concrete: ConcreteFunction, title: str, dims: DimSizes, paths: Mapping[int, Variable]
) -> TfSource:
    """The graph of a traced function. paths: id of a variable's handle -> the variable, where its own path is known.

    Its placeholders are its arguments, followed by the variables and arrays that it closes over.
    """
    graph = concrete.graph
    closed: dict[str, Variable | InputSpec] = {}
    own = {id(v.handle): v for v in graph.variables if hasattr(v, "handle")}
    names = distinct([str(v.name).partition(":")[0] for v in own.values()])
    named = dict(zip(own, names, strict=True))
    for outside, inside in graph.captures:
        ref = inside.name
        if id(outside) in paths:
            closed[ref] = paths[id(outside)]
        elif id(outside) in own:
            v = own[id(outside)]
            closed[ref] = Variable(
                path=named[id(outside)],
                shape=tuple(map(int, v.shape)),
                dtype=dtype_of(v.dtype),
                trainable=bool(v.trainable),
            )
        else:
            closed[ref] = InputSpec(
                name=ref, shape=shape_of(inside.shape, f"captured '{ref}'"), dtype=dtype_of(inside.dtype)
            )
    twice = [
        p for p, n in Counter(v.path for v in closed.values() if isinstance(v, Variable)).items() if n > 1
    ]
    if twice:
        raise PaseError("two variables have this name", where=twice[0], fix="give them distinct names")
    placeholders = [t for t in graph.inputs if t.name not in closed]
    labels = distinct([str(t.op.name) for t in placeholders])
    specs = [
        InputSpec(name=n, shape=shape_of(t.shape, f"input '{n}'"), dtype=dtype_of(t.dtype))
        for n, t in zip(labels, placeholders, strict=True)
    ]
    inputs = dict(zip([t.name for t in placeholders], bound(specs, dims, title), strict=True))
    graph_def = graph.as_graph_def(add_shapes=True)
    outputs = [t.name for t in graph.outputs if not t.dtype.is_integer and t.dtype.is_floating]
    if not outputs:
        raise PaseError("it returns no floating-point tensor that could be its loss", where=title)
    scalars = [t.name for t in graph.outputs if t.dtype.is_floating and t.shape.rank == 0]
    return TfSource(
        name=title,
        graph=graph_of(graph_def, scalars[:1] or outputs, [*inputs, *closed]),
        inputs=inputs,
        captured=closed,
        lines=_lines(graph),
    )


def _lines(graph: FuncGraph) -> dict[str, str]:
    """Node -> the user's line: the innermost frame that belongs to no library."""
    out: dict[str, str] = {}
    for op in graph.get_operations():
        for frame in reversed(op.traceback or ()):
            if "site-packages" not in frame.filename and "/pase/frontends/" not in frame.filename:
                if "/frontends/tf_" not in frame.filename:
                    out[op.name] = f"{Path(frame.filename).name}:{frame.lineno}"
                break
    return out
