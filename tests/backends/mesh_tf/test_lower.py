"""Rules that all frontends share. All missing translations are listed at once."""

from __future__ import annotations

import pytest

from pase.backends.mesh_tf.lower import MeshTfRules, apply, check_known
from pase.backends.mesh_tf.names import Names
from pase.backends.mesh_tf.program import Input, MeshTfProgram, SourceOp
from pase.errors import PaseError
from pase.ir import from_text
from pase.ir.functions import FUNCTIONS
from pase.machine import Mesh
from tests.backends.mesh_tf.results import needs_mesh_tf, worker


def rules() -> MeshTfRules:
    made = MeshTfRules(
        file="backends/mesh_tf/some_ops.py",
        function=lambda name: FUNCTIONS.get(name.lower()),
        reduce={"Sum": "mtf.reduce_sum"},
        views=frozenset({"Reshape"}),
        axes=lambda op: ([0], False),
    )
    made.instead["Sort"] = "its rows are not split; sort before the step"
    return made


def op(name: str, dtype: str = "float32") -> SourceOp:
    return SourceOp(
        at=None,
        name=name,
        label=f"model.py:{len(name)}",
        inputs=(Input(tensor="t", shape=(8,), dtype=dtype),),
        outputs=("u",),
        shapes=((8,),),
        dtypes=("float32",),
    )


def test_every_op_without_a_translation_is_listed_once() -> None:
    """With the first place of each, and with what to do instead if that is known."""
    made = rules()
    check_known(made, [op("Exp"), op("Add"), op("Sum"), op("Reshape")])
    with pytest.raises(PaseError) as e:
        check_known(made, [op("Sort"), op("Exp"), op("Cumsum"), op("Sort")])
    said = str(e.value)
    assert said.count("'Sort' at model.py:4") == 1 and "sort before the step" in said
    assert said.count("'Cumsum' at model.py:6") == 1 and "some_ops.py" in said and "Exp" not in said


def test_a_rule_is_known_under_each_of_its_names() -> None:
    made = rules()

    @made.rule("First", "Second")
    def rule(p: MeshTfProgram, op: SourceOp) -> list[None]:
        return []

    assert all(name in made for name in ("Add", "Exp", "First", "Reshape", "Second", "Sum"))
    assert "Third" not in made and "Cumsum" not in made
    assert made.rules["First"] is made.rules["Second"] is rule


def test_an_op_that_no_table_has_is_refused() -> None:
    graph = from_text("graph g\ntensor t float32[8] activation\nnode t (b=8)\n  generate iota -> t[b]\n")
    p = MeshTfProgram(Names(graph, Mesh(names=("x",), sizes=(2,)), {}))
    with pytest.raises(PaseError, match="sort before the step") as e:
        apply(rules(), p, op("Sort"))
    assert e.value.where == "'Sort' at model.py:4"


@pytest.mark.parametrize(("name", "dtype"), [("And", "int32"), ("Not", "uint8"), ("Div", "int32")])
def test_a_function_that_is_another_one_of_integers_is_refused(name: str, dtype: str) -> None:
    """Mesh-TF's functions are logical, and it divides by multiplication."""
    graph = from_text("graph g\ntensor t float32[8] activation\nnode t (b=8)\n  generate iota -> t[b]\n")
    p = MeshTfProgram(Names(graph, Mesh(names=("x",), sizes=(2,)), {}))
    with pytest.raises(PaseError, match=dtype if name != "Div" else "other integers"):
        apply(rules(), p, op(name, dtype))


@needs_mesh_tf
def test_every_function_is_the_one_that_the_graph_defines() -> None:
    errors = worker()["functions"]
    assert len(errors) > 45 and {k: e for k, e in errors.items() if not e < 2e-6} == {}
