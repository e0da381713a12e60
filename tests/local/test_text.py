"""A local program's text reads back to an equal program; errors in a text are refused with line and column."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases.plans import reduced
from pase.errors import PaseError
from pase.local.lower import local_program
from pase.local.text import program_from_text, program_text
from pase.local.verify import verify_program
from pase.machine import mesh_from
from pase.tables.layouts import configs
from tests.local.programs import planned_program


@functools.cache
def program(model, shape, seed):
    graph, mesh, rng = reduced(model).problem.graph, mesh_from(shape, 8), np.random.default_rng(seed)
    rows = {n.name: configs(n, mesh) for n in graph.nodes}
    return local_program(graph, mesh, {n: r[rng.integers(len(r))] for n, r in rows.items()})


programs = st.builds(
    program,
    st.sampled_from(["mlp", "rnnlm", "gpt2"]),
    st.sampled_from(["8", "2x4", "2x2x2"]),
    st.integers(0, 50),
)


@settings(max_examples=25)
@given(programs)
def test_a_printed_program_reads_back_to_the_same(made):
    text = program_text(made)
    again = program_from_text(text)
    assert again == made and program_text(again) == text


def test_what_is_sent_once_a_step_reads_back():
    made = program("mlp", "2x4", 1)
    once = replace(made, hoisted="all", transfers=tuple(replace(t, hoisted=True) for t in made.transfers))
    assert program_from_text(program_text(once)) == once


@settings(max_examples=150)
@given(st.data())
def test_any_other_text_is_read_or_refused_with_its_place(data):
    text = program_text(program("mlp", "2x4", 1))
    lines = text.split("\n")
    k = data.draw(st.integers(0, len(lines) - 1))
    at = data.draw(st.integers(0, len(lines[k])))
    stop = data.draw(st.integers(at, len(lines[k])))
    put = data.draw(
        st.sampled_from(["", " ", "x", "[", "]", "-1", "9" * 40, "+", "data", "\n", "\x00", "::", "read"])
    )
    lines[k] = lines[k][:at] + put + lines[k][stop:]
    try:
        program_text(program_from_text("\n".join(lines)))
    except PaseError as e:
        assert "local program" in str(e)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("local program", "graph", r"line 1, column 1: expected 'local', found 'graph"),
        ("data=2", "data=0", r"line 1, column 31: .*at least one"),
        ("model=4", "data=4", r"line 1, column 33: .*found '=4'"),
        ("  move 0", "  move 1", r"'move 1' .*twice|no 'move 0'"),
        ("    there", "    here", r"line \d+, column 5: .*found 'here"),
        (" by=0", " by=99999", r"no 'move 99999'"),
        ("data:0/2", "date:0/2", r"data, model, found 'date"),
        ("\n    make", "\n  # a remark\n    made", r"joined, read, make, send, found 'made"),
        ("\nnode", "\n  matmul dot_general ->\nnode", r"line \d+, column 1: .*before the first node"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(old, new, says):
    plan = reduced("mlp").plan("megatron/megatron_2x4")
    text = program_text(plan.jax.program)
    verify_program(program_from_text(text))
    assert old in text
    with pytest.raises(PaseError, match=says):
        program_from_text(text.replace(old, new, 1))


def test_nothing_and_too_much_are_refused():
    for text in ("", "\n# nothing\n"):
        with pytest.raises(PaseError) as e:
            program_from_text(text)
        assert "line 1, column 1" in e.value.where and "NAME on AXIS=SIZE" in e.value.fix
    with pytest.raises(PaseError, match="at most 262144"):
        program_from_text("local program p on a=2\n" + "x" * 300_000)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [("mlp", "megatron/megatron_2x4"), ("alexnet", "random1@2x4")],
    ids=["mlp", "alexnet"],
)
def test_golden(model, strategy, golden):
    """Megatron's split of two layers, with its all-reduces; and a strategy at random, with halos and reshard steps."""
    _, local = planned_program(model, strategy)
    golden(model, program_text(local))
