"""The prefill and decode programs of a ``Generation``, each as a separate function under one plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from pase.backends.jax.gspmd import AnnotatedWalk
from pase.backends.jax.spmd.lower import Lowering, Manual, lowered
from pase.backends.jax.steps.stepper import Stepper, with_static
from pase.errors import PaseError
from pase.frontends.jax.frontend import inner_jaxpr
from pase.frontends.jax.types import Var
from pase.frontends.jax.versions import value_of
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh

    from pase.backends.jax.one_program import OneProgramPlan

__all__ = ["PartName", "part_of", "threaded_arguments"]

PartName = Literal["prefill", "decode"]
_NUMBER: dict[PartName, int] = {"prefill": 0, "decode": 1}


def part_of(
    plan: OneProgramPlan, name: PartName, mesh: JaxMesh, *, donate: bool = True, lowering: Lowering = "auto"
) -> Stepper:
    """One of the programs of a ``Generation``, jitted under the plan.

    donate: whether decode may reuse the memory of its cache argument.
    """
    import jax

    traced = plan.traced
    if not traced.programs:
        raise PaseError(
            f"it is one program, without a separate {name}",
            where=f"'{traced.graph.name}'",
            fix="compile pase.Generation(prefill=…, decode=…, tokens=…) to get two programs",
        )
    shardings, number = plan._in_shardings(mesh), _NUMBER[name]
    last = len(shardings)
    takes = (0, *range(1, last - 2)) if name == "prefill" else (0, last - 2, last - 1)
    assert traced.out_tree is not None  # a program that was traced has one
    state_tree = traced.out_tree.children()[number]

    def annotated(*args: Tree) -> Tree:
        outs = _outs(plan, number, dict(zip(takes, args, strict=True)), mesh)
        return jax.tree.unflatten(state_tree, outs)

    def manual() -> Callable[..., Tree]:
        leaves = _leaves_of_arguments(plan)
        local = Manual(plan=plan, mesh=mesh).part(number, [i for k in takes for i in leaves[k]])
        return lambda *args: jax.tree.unflatten(state_tree, local(*jax.tree.leaves(args)))

    return Stepper(
        run=lowered(lowering, mesh, manual, annotated),
        in_shardings=tuple(shardings[k] for k in takes),
        out_shardings=tuple(shardings[-2:]),
        donate=(2,) if donate and name == "decode" else (),
        whole=with_static(traced.kept_out[number]),
    )


def _outs(plan: OneProgramPlan, number: int, args: Mapping[int, Tree], mesh: JaxMesh) -> list[Array]:
    """The results of one program, with constraints. args: position among all of the model's arguments -> argument."""
    import jax

    closed, names = plan.traced.jaxpr, plan.leaf_names()
    eqn, walk = closed.jaxpr.eqns[number], AnnotatedWalk.of(plan, mesh)
    env: dict[Var, Array] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for k, leaves in enumerate(_leaves_of_arguments(plan)):
        if k in args:
            for i, x in zip(leaves, jax.tree.leaves(args[k]), strict=True):
                env[closed.jaxpr.invars[i]] = walk.defined(x, names[i])
    inner, consts = inner_jaxpr(eqn)
    ins = [value_of(v, env) for v in eqn.invars]
    made = walk.run(inner, consts, ins, plan.traced.programs[number], {})
    env.update(zip(eqn.outvars, made, strict=True))
    each = len(closed.jaxpr.outvars) // len(_NUMBER)
    mine = closed.jaxpr.outvars[number * each : (number + 1) * each]
    return [value_of(v, env) for v in mine]


def _leaves_of_arguments(plan: OneProgramPlan) -> list[range]:
    """For each argument of the model, the indices of its leaves."""
    out, at = [], 0
    for tree in plan.traced.in_tree.children():
        out.append(range(at, at + tree.num_leaves))
        at += tree.num_leaves
    return out


def threaded_arguments(plan: OneProgramPlan) -> tuple[int, ...]:
    """The indices of the arguments for which the function returns new values of all leaves."""
    carried = plan.traced.carried
    every = enumerate(_leaves_of_arguments(plan))
    return tuple(k for k, leaves in every if leaves and all(i in carried for i in leaves))
