"""Statements of a Mesh-TensorFlow program: every variable has a name of its own, and a reshape is written once."""

from __future__ import annotations

import ast

import numpy as np
import pytest

from pase.backends.mesh_tf.names import MeshTfDim, Names
from pase.backends.mesh_tf.program import MeshTfProgram, comment
from pase.ir import from_text
from pase.machine import Mesh

GRAPH = "graph g\ntensor t float32[8] activation\nnode t (b=8)\n  generate iota -> t[b]\n"


def program() -> MeshTfProgram:
    mesh = Mesh(names=("x",), sizes=(2,))
    return MeshTfProgram(Names(from_text(GRAPH), mesh, {"t": {"b": ("x",)}}))


@pytest.mark.parametrize("hint", ["w", "for", "2nd", "", "décalage", "a.b/c-d", 'x"]; import os'])
def test_variables_are_python_names_and_differ(hint: str) -> None:
    p = program()
    made = [p.variable(hint) for _ in range(3)]
    assert len(set(made)) == 3
    for name in made:
        ((target,),) = [n.targets for n in ast.parse(f"{name} = 0").body if isinstance(n, ast.Assign)]
        assert isinstance(target, ast.Name) and target.id == name


def test_readers_with_the_same_dims_share_a_reshape() -> None:
    p = program()
    whole, split = MeshTfDim("k", 8), MeshTfDim("k", 8, "x")
    x = p.let("mtf.zeros()", (whole,), ((whole,),), "float32")
    assert p.to(x, ((whole,),)) == x and len(p.lines) == 1
    first, again = (p.to(x, ((split,),)) for _ in range(2))
    assert first == again and first.order == (split,)
    assert [line.partition("(")[0] for line in p.lines] == [
        f"{x.code} = mtf.zeros",
        f"{first.code} = mtf.reshape",
    ]


def test_a_known_array_is_a_number_a_list_or_an_array_beside_the_program() -> None:
    """The list in the code is the array. A large array is kept once, however often it is read."""
    p = program()
    p.constant(np.full((2, 3), np.inf, "float32"), None, "float32")
    assert 'float("inf")' in p.lines[-1] and not p.constants
    few = np.arange(6).reshape(2, 3)
    p.constant(few, None, "int32")
    (call,) = [
        n
        for n in ast.walk(ast.parse(p.lines[-1]))
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "tf.constant"
    ]
    assert np.array_equal(ast.literal_eval(call.args[0]), few)
    many = np.arange(100.0)
    for _ in range(2):
        assert p.constant(many, None, "float32").shape == (100,)
        assert 'CONSTANTS["c0"]' in p.lines[-1]
    assert list(p.constants) == ["c0"] and p.constants["c0"] is many


def test_a_comment_stays_on_its_line() -> None:
    assert comment('a\n"""\rb\u2028c' + "d" * 300) == 'a """ b c' + "d" * 191
