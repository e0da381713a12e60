"""Runs a generated Mesh-TensorFlow program on logical devices of one machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pase.backends.mesh_tf.legality import check_layout
from pase.backends.mesh_tf.shim import mesh_tensorflow
from pase.pytree import Tree

__all__ = ["EmittedModel", "MeshTfRun", "demo", "lowered", "run"]


class EmittedModel(Protocol):
    """A module that ``emit`` wrote, or any object with the same names."""

    MESH_SHAPE: str
    LAYOUT_RULES: str
    INPUTS: Mapping[str, tuple[list[int], str]]
    PARAMETERS: Mapping[str, tuple[list[int], str]]

    def model(
        self, mesh: object, inputs: Mapping[str, object], values: Mapping[str, object] | None
    ) -> tuple[Tree, Tree]:
        """(loss, parameters), as Mesh-TF tensors."""
        ...


@dataclass(frozen=True, kw_only=True)
class MeshTfRun:
    """Results of training steps, in the source's shapes.

    gradients: of the first step.
    parameters: after the last step.
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, np.ndarray]
    parameters: Mapping[str, np.ndarray]
    counters: Mapping[str, float]
    """Mesh-TF's counts from the lowering of a step: elements moved, summed over devices, by op and mesh axis."""


def lowered(
    program: EmittedModel,
    inputs: Mapping[str, np.ndarray],
    values: Mapping[str, np.ndarray] | None,
    learning_rate: float,
) -> tuple[Tree, ...]:
    """(Mesh-TF's graph, its lowering, loss, parameters, gradients, assignments) in TensorFlow's current graph."""
    mtf, _ = mesh_tensorflow()
    mesh, _ = check_layout(program.MESH_SHAPE, program.LAYOUT_RULES)
    devices = [f"/cpu:{i}" for i in range(int(np.prod(list(mesh.values()), dtype=int)))]
    graph = mtf.Graph()
    where = mtf.Mesh(graph, "mesh")
    loss, parameters = program.model(where, inputs, values)
    from pase.backends.mesh_tf.runtime_ops import descend

    loss, gradients, updates = descend(loss, parameters, learning_rate)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(program.MESH_SHAPE, program.LAYOUT_RULES, devices)
    return graph, mtf.Lowering(graph, {where: impl}), loss, parameters, gradients, updates


def run(
    program: EmittedModel,
    inputs: Mapping[str, np.ndarray],
    values: Mapping[str, np.ndarray] | None = None,
    *,
    learning_rate: float = 0.1,
    steps: int = 1,
) -> MeshTfRun:
    """Run steps of gradient descent, on one logical CPU device per device of the program's mesh.

    program: a module that ``emit`` wrote, or any object with the same names.
    inputs, values: arrays by the source's names.
    """
    _, tf = mesh_tensorflow()
    mesh, _ = check_layout(program.MESH_SHAPE, program.LAYOUT_RULES)
    config = tf.ConfigProto(
        device_count={"CPU": int(np.prod(list(mesh.values()), dtype=int))}, allow_soft_placement=True
    )
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        fed = {k: tf.constant(inputs[k], dtype) for k, (_, dtype) in program.INPUTS.items()}
        _, lowering, loss, parameters, gradients, updates = lowered(program, fed, values, learning_rate)
        out = lowering.export_to_tf_tensor(loss)
        grads = [lowering.export_to_tf_tensor(g) for g in gradients]
        step = tf.group([lowering.lowered_operation(u) for u in updates])
        start, back = lowering.copy_masters_to_slices(), lowering.copy_slices_to_masters()
        masters = [p.operation.get_master() for p in parameters.values()]
        session.run(tf.global_variables_initializer())
        session.run(start)
        losses, first = [], None
        for _ in range(steps):
            loss_now, grads_now, _ = session.run([out, grads, step])
            losses.append(float(loss_now))
            first = grads_now if first is None else first
        session.run(back)
        after = session.run(masters)
        counters: dict[str, float] = {}
        for key, elements in lowering._counters:
            counters[key] = counters.get(key, 0.0) + float(elements)
    shapes = {k: shape for k, (shape, _) in program.PARAMETERS.items()}

    def shaped(arrays: Sequence[np.ndarray] | None) -> dict[str, np.ndarray]:
        return {k: np.asarray(a).reshape(shapes[k]) for k, a in zip(parameters, arrays or (), strict=True)}

    return MeshTfRun(
        losses=tuple(losses),
        gradients=shaped(first),
        parameters=shaped(after),
        counters=counters,
    )


def demo(program: EmittedModel, steps: int = 3) -> None:
    """The main function of a generated program: a few training steps on random data."""
    rng = np.random.default_rng(0)

    def made_up(shape: Sequence[int], dtype: str) -> np.ndarray:
        if "int" in dtype:
            return rng.integers(0, 2, shape).astype(dtype)
        return rng.standard_normal(shape).astype(dtype)

    inputs = {k: made_up(*spec) for k, spec in program.INPUTS.items()}
    done = run(program, inputs, steps=steps)
    print(f"mesh {program.MESH_SHAPE}; layout {program.LAYOUT_RULES or 'all replicated'}", file=sys.stderr)
    for i, loss in enumerate(done.losses):
        print(f"step {i + 1}: loss {loss:.6g}")
