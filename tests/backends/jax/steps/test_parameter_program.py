"""The local program of a tree of parameters, from the names and stages of a scheduling problem's tensors."""

from __future__ import annotations

import numpy as np
import pytest

from bench.cases.schedules import link
from pase.backends.jax.steps.parameter_program import StoredParameter, parameter_program
from pase.errors import PaseError
from pase.machine import Mesh
from pase.schedule import BucketPlan, ComputeBlock, ScheduleProblem, Transfer, whole

MESH = Mesh(names=("data", "model"), sizes=(4, 2))
WHOLE = StoredParameter(path="w", shape=(8, 4), placement=((), ()))
STACK = StoredParameter(path="layers", shape=(3, 8, 4), placement=((), (), ()))


def problem_of(*tensors):
    """A step of one block forward and one backward. tensors: (name, kind)."""
    blocks = (
        ComputeBlock(name="forward", phase="forward", seconds=1.0),
        ComputeBlock(name="backward", phase="backward", seconds=1.0),
    )
    each = tuple(
        Transfer(name=name, nbytes=128, ready_after=1, needed_before=0, kind=kind) for name, kind in tensors
    )
    return ScheduleProblem(name="p", blocks=blocks, tensors=each, links=(link(),))


def program_of(problem, stored, **options):
    plan = BucketPlan(policy="x", messages=tuple(whole(problem, [i]) for i in range(len(problem.tensors))))
    return parameter_program(problem, plan, stored, mesh=MESH, data_axes=("data",), **options)


def test_a_parameter_is_one_transfer_and_a_stack_one_for_each_layer():
    names = ["w", *(f"layers[{k}].grad" for k in range(3))]
    made = program_of(problem_of(*((n, "all_reduce") for n in names)), [WHOLE, STACK])
    assert list(made.numbers) == [(0,), (1, 2, 3)]
    assert made.carried == {0, 1, 2, 3}
    sent = [[m.kind for m in t.backward] for t in made.local.transfers]
    assert sent == [["all_reduce"]] * 4
    assert not any(m.kind != "slice" for t in made.local.transfers for m in t.forward)


def test_parts_are_joined_to_the_leaves_again():
    names = ["w", *(f"layers[{k}].grad" for k in range(3))]
    made = program_of(problem_of(*((n, "all_reduce") for n in names)), [WHOLE, STACK])
    leaves = [np.arange(32.0).reshape(8, 4), np.arange(96.0).reshape(3, 8, 4)]
    parts = made.parts(leaves)
    assert [parts[k].shape for k in range(4)] == [(8, 4)] * 4
    for got, wanted in zip(made.joined(parts), leaves, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_stages_that_do_not_lead_to_the_stored_layout_are_left_out_of_the_messages():
    """The parameter is whole on each device, so a reduce-scatter alone leaves a part of its gradient."""
    made = program_of(problem_of(("w", "reduce_scatter")), [WHOLE])
    assert made.carried == frozenset() and list(made.numbers) == [(0,)]
    assert [m.kind for m in made.local.transfers[0].backward] == ["all_reduce"]


def test_layers_that_are_not_all_named_are_reduced_as_one_stack():
    made = program_of(problem_of(("layers[0].grad", "all_reduce"), ("layers[2].grad", "all_reduce")), [STACK])
    assert list(made.numbers) == [(0,)] and made.carried == frozenset()


def test_other_names_than_those_of_the_parameters_are_refused():
    with pytest.raises(PaseError, match="'v'") as e:
        program_of(problem_of(("v", "all_reduce")), [WHOLE])
    assert e.value.where == "problem 'p'" and "w" in e.value.fix
    with pytest.raises(PaseError, match="layers") as e:
        program_of(problem_of(("w", "all_reduce")), [WHOLE, STACK])
    assert "lenient=True" in e.value.fix
    made = program_of(problem_of(("w", "all_reduce")), [WHOLE, STACK], lenient=True)
    assert list(made.numbers) == [(0,), (1,)] and made.carried == {0}
