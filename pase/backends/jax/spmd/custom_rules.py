"""Runs calls with their own derivative rule on one device: the rule's forward and backward programs, on shards.

The rule is read as two programs, as ``jax.vjp`` runs it: forward to the results and residuals, and backward to the
gradients. Each is traced separately, split according to its operands' layouts (``pase.local.follow``), and lowered to
its own local program. The plan gives the layouts of the call's operands and results, and of the gradients of both.

Here, the call becomes a ``jax.custom_vjp`` over shards. Operands enter it twice: the values without a gradient, and the
arrays to which their gradients are returned, which may be gradient carriers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.backends.jax.ops.arrays import JaxArrays
from pase.backends.jax.spmd.values import Cache, DeviceValue
from pase.frontends.jax.frontend import INLINED, inner_jaxpr, trace
from pase.frontends.jax.rules import RULES, Elementwise
from pase.frontends.jax.types import ClosedJaxpr, Eqn, Jaxpr
from pase.frontends.jax.versions import called, evaluate, is_dropped, opened, pulled_back, value_of
from pase.ir import Place
from pase.local.follow import followed
from pase.local.lower import between, local_program
from pase.local.reshard import resharded
from pase.local.types import LocalOperand
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    from jax import Array

    from pase.backends.jax.spmd.interpreter import ManualWalk

__all__ = ["call_with_rule"]


def call_with_rule(
    walk: ManualWalk, eqn: Eqn, ins: Sequence[DeviceValue], at: Place, cache: Cache
) -> list[DeviceValue]:
    """Run a ``custom_jvp`` or ``custom_vjp`` call, some of whose results have gradients, on this device."""
    import jax

    call = _RuledCall.of(walk, eqn, ins, at)
    read = [call.as_read(i, cache) for i in range(len(ins))]
    targets = [call.gradient_target(i, read[i], cache) for i in range(len(ins)) if call.trained[i]]
    forward_program, backward_program, has_gradient = pulled_back(eqn, call.trained)
    residuals: list[DeviceValue] = []

    def forward(arrays: Sequence[Array]) -> tuple[list[Array], list[Array | None]]:
        values = [replace(h, array=x) for h, x in zip(read, arrays, strict=True)]
        forward_results = _ran(walk, forward_program, values, [*map(call.made_as, call.results)])
        residuals[:] = forward_results[len(has_gradient) :]
        made = [h.array for h in forward_results[: len(has_gradient)]]
        return made, [call.gradient_carrier(n, x) for n, x in zip(call.results, made, strict=True)]

    def backward(
        residual_arrays: Sequence[Array], gradients: tuple[Sequence[Array], Sequence[Array | None]]
    ) -> tuple[list[Array], None]:
        backward_operands = [replace(h, array=x) for h, x in zip(residuals, residual_arrays, strict=True)]
        for g, of_carrier, n, has in zip(*gradients, call.results, has_gradient, strict=True):
            if has:
                backward_operands.append(
                    DeviceValue(array=g if of_carrier is None else of_carrier, layout=call.gradient_of(n))
                )
        found = _ran(walk, backward_program, backward_operands, [layout for _, layout in targets])
        return [h.array for h in found], None

    run = jax.custom_vjp(lambda _, arrays: forward(arrays))
    run.defvjp(lambda _, arrays: (forward(arrays), [h.array for h in residuals]), backward)
    made, gradient_carriers = run([x for x, _ in targets], [jax.lax.stop_gradient(h.array) for h in read])
    found = {
        n: DeviceValue(array=x, tensor=n, layout=call.made_as(n), gradient_carrier=c)
        for n, x, c in zip(call.results, made, gradient_carriers, strict=True)
    }
    # A result that nothing reads has no array.
    return [found.get(n, DeviceValue(array=None, tensor=n)) for n in walk.traced.results[at]]  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class _RuledCall:
    """What the plan contains about a call with a derivative rule.

    ins: the operands. trained: which of them have gradients. results: the names of the results that are used. reads:
    for each operand, how the first op inside reads it; None if none does. returns: if the user's rule has a backward
    function (``custom_vjp``), each operand with a gradient as the op that returns this gradient has it.
    """

    walk: ManualWalk
    eqn: Eqn
    ins: Sequence[DeviceValue]
    trained: list[bool]
    results: list[str]
    reads: list[LocalOperand | None]
    returns: list[LocalOperand]

    @classmethod
    def of(cls, walk: ManualWalk, eqn: Eqn, ins: Sequence[DeviceValue], at: Place) -> _RuledCall:
        tensors, program = walk.traced.graph.tensors, walk.program
        ops = [op for op in program.at.get(at, ()) if op.op.kind != "copy"]
        forward = [o for op in ops if op.op.kind != "gradient" for o in op.operands]

        def read(h: DeviceValue) -> LocalOperand | None:
            return next((o for o in forward if h.tensor and program.original(o.tensor) == h.tensor), None)

        names = zip(walk.traced.results[at], eqn.outvars, strict=True)
        return cls(
            walk=walk,
            eqn=eqn,
            ins=ins,
            trained=[h.tensor is not None and tensors[h.tensor].needs_grad for h in ins],
            results=[n for n, v in names if not is_dropped(v)],
            reads=[read(h) for h in ins],
            returns=[op.operands[1] for op in ops if op.op.kind == "gradient"],
        )

    def as_read(self, i: int, cache: Cache) -> DeviceValue:
        """An operand in the layout in which the call reads it."""
        wanted = self.reads[i]
        return self.ins[i] if wanted is None else self.walk.received(self.ins[i], wanted, cache)

    def gradient_target(self, i: int, read: DeviceValue, cache: Cache) -> tuple[Array, AxisLayout]:
        """(the array that receives an operand's gradient, the layout in which the gradient is returned)."""
        h, program = self.ins[i], self.walk.program
        returned = next((o for o in self.returns if program.original(o.tensor) == h.tensor), None)
        if returned is not None:
            return self.walk.gradient_carrier(h, returned, cache), returned.gradient
        wanted = self.reads[i]
        if wanted is None:
            raise self.walk.refusal(
                self.eqn, f"'{h.tensor}' has a gradient, but nothing in the call reads it"
            )
        if read.gradient_carrier is not None:
            return read.gradient_carrier, program.result(wanted.tensor).gradient
        return read.array, wanted.gradient

    def made_as(self, name: str) -> AxisLayout:
        """The layout in which a result is made."""
        program = self.walk.program
        return program.result(name).layout if name in program.maker else AxisLayout.whole(program.mesh)

    def gradient_of(self, name: str) -> AxisLayout:
        """The layout in which a result's gradient arrives."""
        program = self.walk.program
        if name not in program.maker:
            return AxisLayout.whole(program.mesh)
        return program.result(name).gradient

    def gradient_carrier(self, name: str, made: Array) -> Array | None:
        """The part of a result in the layout in which its gradient arrives; None if the gradient is split alike."""
        program = self.walk.program
        if name not in program.maker:
            return None
        r = program.result(name)
        if r.layout.local_shape(r.shape, program.mesh) == r.gradient.local_shape(r.shape, program.mesh):
            return None
        steps = between(r.layout, r.gradient, program.mesh)
        if not all(m.free for m in steps):
            raise self.walk.refusal(self.eqn, f"its result '{name}' and its gradient are split differently")
        return resharded(made, steps, r.shape, "sum", JaxArrays(program.mesh))


def _ran(
    walk: ManualWalk, closed: ClosedJaxpr, values: Sequence[DeviceValue], layouts: Sequence[AxisLayout]
) -> list[DeviceValue]:
    """Run a program on values in their layouts.

    layouts: of its first results. In the other results, partial sums are reduced.
    """
    mesh, jaxpr = walk.program.mesh, opened(closed)[0]
    replicated = AxisLayout.whole(mesh)
    have = [replicated if h.layout is None else h.layout for h in values]
    shaped = zip(jaxpr.invars, have, strict=True)
    layouts_of_arrays = {(tuple(v.aval.shape), layout) for v, layout in shaped if math.prod(v.aval.shape) > 1}
    # A pointwise program on arrays that are all split alike runs on the shards as it is.
    if len(layouts_of_arrays) == 1 and _pointwise(jaxpr, next(iter(layouts_of_arrays))[0]):
        ((shape, layout),) = layouts_of_arrays
        arrays = _on_parts(closed, [h.array for h in values], layout.local_shape(shape, mesh))
        outs = [
            DeviceValue(array=x, layout=layout if tuple(v.aval.shape) == shape else replicated)
            for x, v in zip(arrays, jaxpr.outvars, strict=True)
        ]
        inner = walk
    else:
        inner, outs = _traced(walk, closed, values, have)
    return [
        inner.resharded(h, layouts[k] if k < len(layouts) else None, tuple(v.aval.shape))
        for k, (h, v) in enumerate(zip(outs, jaxpr.outvars, strict=True))
    ]


def _traced(
    walk: ManualWalk, closed: ClosedJaxpr, values: Sequence[DeviceValue], layouts: Sequence[AxisLayout]
) -> tuple[ManualWalk, list[DeviceValue]]:
    """Run a program as a separate local program: (the walk that ran it, its results).

    layouts: of the values.
    """
    import jax

    mesh, jaxpr = walk.program.mesh, opened(closed)[0]
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    traced = trace(lambda leaves: called(closed)(*leaves), shapes, name="rule", mode="inference")
    names = [n.ops[0].writes[0].tensor for n in traced.graph.nodes if n.kind == "parameter"]
    configs = followed(traced.graph, mesh, dict(zip(names, layouts, strict=True)))
    program = local_program(traced.graph, mesh, configs)
    # Arrivals go by the numbers of transfers, and this program has its own.
    inner = replace(walk, program=program, traced=traced, blocks=(), kept=frozenset(), arrivals=None)
    args = [
        inner.resharded(
            DeviceValue(array=h.array, tensor=n, layout=layout), program.result(n).layout, v.shape
        )
        for h, n, layout, v in zip(values, names, layouts, shapes, strict=True)
    ]
    return inner, inner.run(traced.jaxpr.jaxpr, traced.jaxpr.consts, args, "", Cache())


def _pointwise(jaxpr: Jaxpr, shape: tuple[int, ...]) -> bool:
    """Whether a program computes pointwise, on arrays of one shape and on scalars. It may then run on any part of
    the arrays.
    """

    def computes_pointwise(eqn: Eqn) -> bool:
        if eqn.primitive.name in INLINED:
            return _pointwise(inner_jaxpr(eqn)[0], shape)
        fits = all(tuple(v.aval.shape) == shape or math.prod(v.aval.shape) == 1 for v in eqn.outvars)
        broadcasts_scalar = (
            eqn.primitive.name == "broadcast_in_dim" and math.prod(eqn.invars[0].aval.shape) == 1
        )
        return fits and (broadcasts_scalar or isinstance(RULES.get(eqn.primitive.name), Elementwise))

    return all(map(computes_pointwise, jaxpr.eqns))


def _on_parts(closed: ClosedJaxpr, arrays: Sequence[Array], part_shape: tuple[int, ...]) -> list[Array]:
    """Run a pointwise program on parts of the shape ``part_shape``."""
    import jax

    jaxpr, consts = opened(closed)
    info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arrays), strict=True))
    for eqn in jaxpr.eqns:
        ins = [value_of(v, env) for v in eqn.invars]
        if eqn.primitive.name in INLINED:
            outs = _on_parts(eqn.params[INLINED[eqn.primitive.name]], ins, part_shape)
        elif eqn.primitive.name == "broadcast_in_dim" and math.prod(eqn.params["shape"]) > 1:
            outs = [jax.numpy.broadcast_to(jax.numpy.reshape(ins[0], ()), part_shape)]
        else:
            outs = evaluate(eqn, ins, info)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [value_of(v, env) for v in jaxpr.outvars]
