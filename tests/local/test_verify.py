"""The verifier names what is unsound in a local program."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from bench.cases.plans import case_of
from pase.errors import PaseError
from pase.local.lower import program_of
from pase.local.verify import verify_program
from pase.tables.axis_layout import AxisLayout
from tests.local.programs import planned_program


def test_what_is_unsound_is_named():
    _, local = planned_program("mlp", "random1@2x4")
    k = next(i for i, t in enumerate(local.transfers) if any(m.kind == "all_gather" for m in t.forward))
    t = local.transfers[k]
    for broken, says in (
        (replace(t, forward=()), "must arrive as"),
        (replace(t, forward=(*t.forward, t.forward[-1])), "starts from"),
        (replace(t, forward=tuple(replace(m, kind="all_reduce") for m in t.forward)), "all_reduce of"),
    ):
        with pytest.raises(PaseError) as e:
            verify_program(with_transfer(local, k, broken))
        assert says in e.value.what and f"'{t.tensor}'" in e.value.what
        assert e.value.where == f"local program of '{local.name}'"
    k = next(i for i, t in enumerate(local.transfers) if t.backward)
    t = local.transfers[k]
    for moves, says in (((), "must arrive as"), (t.backward * 2, "starts from")):
        with pytest.raises(PaseError, match=says):
            verify_program(with_transfer(local, k, replace(t, backward=moves)))


def with_transfer(local, k, transfer):
    return replace(local, transfers=(*local.transfers[:k], transfer, *local.transfers[k + 1 :]))


def test_a_move_that_hands_on_no_whole_parts_is_named():
    """What one axis holds of a dim becomes a part of what a wider axis holds. No exchange between devices does that."""
    _, local = planned_program("mlp", "random1@2x4")
    k = next(i for i, t in enumerate(local.transfers) if t.forward and not t.forward[0].free)
    t = local.transfers[k]
    rank = len(local.result(t.tensor).shape)
    crossed = replace(
        t.forward[0],
        kind="all_to_all",
        axes=("x", "y"),
        before=AxisLayout([(rank - 1, 2), None]),
        after=AxisLayout([None, (rank - 1, 4)]),
    )
    with pytest.raises(PaseError) as e:
        verify_program(with_transfer(local, k, replace(t, forward=(crossed,))))
    assert f"all_to_all of '{t.tensor}' for {t.dst} over x, y: " in e.value.what


def changed(program, tensor, **fields):
    """The program with changed fields of one result. tensor: names the result."""

    def of(op):
        results = (replace(r, **fields) if r.tensor == tensor else r for r in op.results)
        return replace(op, results=tuple(results))

    return replace(program, ops=tuple(map(of, program.ops)))


def test_a_derivative_at_anything_but_the_value_is_refused():
    def of(f, method="zero2"):
        case = case_of(lambda p, x: (x @ f(p["w"])).sum(), {"w": jnp.ones((16, 32))}, jnp.ones((16, 16)))
        plan = case.plan(method)
        made = program_of(case.problem.graph, plan.mesh, plan.strategy)
        verify_program(made)
        (tensor,) = (r.tensor for op in made.ops for r in op.results if op.op.kind == "parameter")
        return made, tensor

    made, w = of(lambda w: jnp.exp(2 * w))
    assert made.result(w).layout != made.result(w).gradient
    with pytest.raises(PaseError, match=r"'exp' at .*test_verify.* at zeros"):
        verify_program(changed(made, w, gradient_carrier="zeros"))
    split, w = of(lambda w: jnp.exp(2 * w), "fsdp")
    elsewhere = split.result(w).gradient.renumbered(lambda dim: 1 - dim)
    with pytest.raises(PaseError, match="lies on other devices"):
        verify_program(changed(split, w, gradient=elsewhere))
    straight, w = of(lambda w: -(2 * w).T.reshape(16, 32))
    verify_program(changed(straight, w, gradient_carrier="zeros"))
