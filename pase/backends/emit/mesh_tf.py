"""Writes a plan as a Mesh-TensorFlow program: mesh_shape, layout_rules, and the model in ``mtf`` ops.

The ops of the plan's graph are translated in order, by the functions that they compute
(``pase.backends.mesh_tf.walk``). The names of a tensor's dims follow from the plan (``pase.backends.mesh_tf.names``).
An op that Mesh-TensorFlow cannot express is an error with the op's name and place.
"""

from __future__ import annotations

import base64
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pase.backends.mesh_tf.legality import check_layout, check_tensor
from pase.backends.mesh_tf.names import Names, flat
from pase.backends.mesh_tf.program import MeshTfProgram, MeshTfValue, comment
from pase.backends.mesh_tf.walk import translate
from pase.backends.registry import BACKENDS, Backend
from pase.errors import PaseError
from pase.ir import Graph
from pase.local.interpret import known_values
from pase.plan.targets import TARGETS, PlanTarget, TargetForm

if TYPE_CHECKING:
    from pase.plan.types import PlanData, TensorPlan

__all__ = ["MeshTfLayout", "emit", "layout", "program"]


@dataclass(frozen=True, kw_only=True)
class MeshTfLayout:
    """mesh_shape and layout_rules in Mesh-TF's format, and the dims of the parameters and inputs under them."""

    mesh_shape: str
    layout_rules: str
    dims: Mapping[str, tuple[tuple[str, int], ...]]
    """Parameter or input -> (name, size) of each of its Mesh-TF dims."""


def emit(plan: PlanData, path: Path, *, model: object) -> str:
    """Write the program. See ``backends.registry``."""
    from pase.files.atomic import write_atomically

    text, found = program(_with_model(plan, model))
    write_atomically(path, text)
    return f'{path}: a Mesh-TensorFlow program; mesh_shape "{found.mesh_shape}", layout_rules "{found.layout_rules}"'


def layout(plan: PlanData) -> MeshTfLayout:
    """Only the two strings, and the dims of the parameters and inputs under them. ``plan`` must have its model."""
    return program(plan)[1]


def program(plan: PlanData) -> tuple[str, MeshTfLayout]:
    """(the text of the program, its layout). Raises PaseError if Mesh-TensorFlow cannot express the model or the
    plan.
    """
    if plan.traced is None:
        raise PaseError(
            "it was loaded without its model, which a Mesh-TensorFlow program is made from",
            where=f"the plan for '{plan.model}'",
            fix="emit it with the model that it was compiled from",
        )
    graph = plan.split_graph
    frontend = plan.traced.graph.facts.frontend
    if frontend not in ("jax", "tensorflow"):
        raise PaseError(
            f"Mesh-TensorFlow programs are made from TensorFlow and JAX models, not from {frontend or 'this one'}",
            where=f"the plan for '{graph.name}'",
            fix="emit it in another format (see pase emit --help)",
        )
    given = {name: np.asarray(c() if callable(c) else c) for name, c in plan.traced.contents.items()}
    p = MeshTfProgram(Names(graph, plan.mesh, plan.strategy), known=known_values(plan.traced.graph, given))
    leaves = _leaves(p, graph)
    translate(p)
    loss = _loss(p, [p.values[t] for t in graph.outputs if t in p.values])
    found = _checked(p, leaves)
    return _text(plan, p, leaves, loss, found), found


def _loss(p: MeshTfProgram, outputs: Sequence[MeshTfValue]) -> MeshTfValue:
    """The scalar that the model returns, or the mean of its result if that is not a scalar."""
    if not outputs:
        raise PaseError(
            "the Mesh-TensorFlow program computes none of the model's results",
            where=f"the plan for '{p.names.graph.name}'",
        )
    if len(outputs) == 1 and not outputs[0].order:
        return outputs[0]
    p.lines += ["", "# The model does not return a scalar. The mean of its results is used as the loss."]
    terms = [f"mtf.reduce_mean({v.code}, output_shape=[])" for v in outputs]
    return p.let(" + ".join(terms), (), (), outputs[0].dtype, "loss")


def _with_model(plan: PlanData, model: object) -> PlanData:
    if plan.traced is not None:
        return plan
    from pase.frontends import registry
    from pase.frontends.blocks import as_padded

    if registry.frontend_of(model) is None:
        raise PaseError(
            "a Mesh-TensorFlow program needs the model that the plan was compiled from",
            where=f"the plan for '{plan.model}'",
            fix="give this model",
        )
    return plan.with_model(as_padded(registry.trace(model, name=plan.model), plan.padding))


def _leaves(p: MeshTfProgram, graph: Graph) -> dict[str, MeshTfValue]:
    """Add the statements that create the parameters and import the inputs. Returns name -> value."""
    out: dict[str, MeshTfValue] = {}
    for node in graph.nodes:
        if node.kind not in ("parameter", "input"):
            continue
        access = node.ops[0].writes[0]
        tensor = graph.tensors[access.tensor]
        dims = p.dims(node, access)
        order = flat(dims)
        if node.kind == "parameter":
            code = f'ops.variable(mesh, {tensor.path!r}, {p.shape(order)}, "{tensor.dtype}", values)'
            out[tensor.path] = p.let(code, order, dims, tensor.dtype, _short(tensor.path))
            p.lines[-1] = p.lines[-1].replace(" = ", f" = parameters[{tensor.path!r}] = ", 1)
        else:
            sizes = [d.size for d in order]
            given = f"inputs[{tensor.path!r}]"
            if tuple(sizes) != tensor.shape:
                given = f"tf.reshape({given}, {sizes})"
            code = f"mtf.import_tf_tensor(mesh, {given}, shape={p.shape(order)})"
            out[tensor.path] = p.let(code, order, dims, tensor.dtype, _short(tensor.path))
        p.values[tensor.name] = out[tensor.path]
    return out


def _short(path: str) -> str:
    """The last two words of a path, as a name for a variable of the program."""
    return "_".join(re.split(r"[/.]", path)[-2:])


def _checked(p: MeshTfProgram, leaves: Mapping[str, MeshTfValue]) -> MeshTfLayout:
    """The layout, after every tensor of the program has been checked against Mesh-TF's rules."""
    mesh_shape, rules = p.names.mesh_shape, p.names.layout_rules
    mesh, by_name = check_layout(mesh_shape, rules)

    def pairs(value: MeshTfValue) -> tuple[tuple[str, int], ...]:
        return tuple((p.names.name(d), d.size) for d in value.order)

    for name, value in p.values.items():
        check_tensor(f"tensor {name}", pairs(value), mesh, by_name)
    return MeshTfLayout(
        mesh_shape=mesh_shape, layout_rules=rules, dims={name: pairs(v) for name, v in leaves.items()}
    )


_HEAD = '''"""{model} on {devices} devices in Mesh-TensorFlow, as pase {version} planned it.

Predicted: {cost:.6g} {unit} per step. Run this file for a few steps on random data, on logical CPU devices.
``model`` builds the loss, ``train_step`` the gradients and a step of gradient descent.
"""

{imports}from pase.backends.mesh_tf import runtime_ops as ops
from pase.backends.mesh_tf.shim import mesh_tensorflow

mtf, tf = mesh_tensorflow()

MESH_SHAPE = "{mesh_shape}"
LAYOUT_RULES = "{layout_rules}"

PARAMETERS = {{
{parameters}
}}
INPUTS = {{
{inputs}
}}
{constants}
{dims}


def model(mesh, inputs, values=None):
    """(loss, parameters). inputs: name -> tf.Tensor; values: parameter -> array to start from."""
    parameters = {{}}
{body}
    return {loss}, parameters


def train_step(mesh, inputs, learning_rate, values=None):
    """(loss, gradients, assignments)."""
    loss, parameters = model(mesh, inputs, values)
    return ops.descend(loss, parameters, learning_rate)


if __name__ == "__main__":
    import sys

    from pase.backends.mesh_tf.run import demo

    demo(sys.modules[__name__])
'''


def _text(
    plan: PlanData,
    p: MeshTfProgram,
    leaves: Mapping[str, MeshTfValue],
    loss: MeshTfValue,
    found: MeshTfLayout,
) -> str:
    import pase

    def table(tensors: Mapping[str, TensorPlan]) -> str:
        return "\n".join(
            f'    {k!r}: ({list(t.shape)}, "{t.dtype}"),' for k, t in tensors.items() if k in leaves
        )

    dims = [f'{var} = mtf.Dimension("{name}", {size})' for (name, size), var in p.dim_names.items()]
    body = textwrap.indent("\n".join(p.lines), "    ", lambda line: bool(line.strip()))
    return _HEAD.format(
        model=comment(plan.model).replace("\\", "/").replace('"', "'"),
        devices=plan.devices,
        version=pase.__version__,
        cost=plan.cost,
        unit=plan.unit,
        mesh_shape=found.mesh_shape,
        layout_rules=found.layout_rules,
        parameters=table(plan.parameters),
        inputs=table(plan.inputs),
        dims="\n".join(dims),
        body=body,
        loss=loss.code,
        constants=_constants(p.constants),
        imports="import base64\nimport io\n\nimport numpy as np\n\n" if p.constants else "",
    )


def _constants(arrays: Mapping[str, np.ndarray]) -> str:
    """Constant arrays of the source program (masks, tables of positions), packed into text."""
    if not arrays:
        return ""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{k: _plain(a) for k, a in arrays.items()})  # type: ignore[arg-type]
    lines = textwrap.wrap(base64.b64encode(buffer.getvalue()).decode(), 100)
    packed = "\n".join(f'    "{line}"' for line in lines)
    return f"CONSTANTS = np.load(io.BytesIO(base64.b64decode(\n{packed}\n)))\n"


def _plain(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float32) if a.dtype.name == "bfloat16" else a


TARGETS.add(
    "mesh-tf",
    PlanTarget(
        program="Mesh-TensorFlow",
        says="each dim of a tensor along one mesh dim, and optimizer state laid out as its parameter",
        forms=(TargetForm(one_axis_a_dim=True, state_as_stored=True),),
    ),
)
BACKENDS.add(
    "mesh-tf",
    Backend(writes="Mesh-TensorFlow program with mesh_shape and layout_rules", emit=emit, needs_model=True),
)
