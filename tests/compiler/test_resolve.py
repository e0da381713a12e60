"""Models by name, and the names and objects that are refused with what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pase.compiler.problem.options import CompileOptions
from pase.compiler.resolve import resolve, traced_model
from pase.errors import PaseError

MODULE = """
import jax.numpy as jnp

def model():
    return (lambda w, x: jnp.mean(x @ w)), jnp.zeros((8, 4)), jnp.zeros((2, 8))

def takes_one(x):
    return x

def gives_a_number():
    return 3

def gives_only_a_function():
    return lambda: 1
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resolved_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "resolved_here", raising=False)


@pytest.mark.usefixtures("here")
def test_a_function_of_the_current_folder_is_called_and_traced() -> None:
    traced = resolve("resolved_here:model")
    assert traced.graph.name == "resolved_here:model"
    shapes = {t.role: t.shape for t in traced.graph.tensors.values() if t.role in ("parameter", "input")}
    assert shapes == {"parameter": (8, 4), "input": (2, 8)}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpt2", "is not a model"),
        ("mine:model?layers=4", "settings behind"),
        ("n" * 5000, "is not a model"),  # longer than a file's name may be
        ("resolved_here:", "is not a model"),
        ("1st:model", "is not a model"),
        ("not_here:model", "cannot import 'not_here'"),
        ("resolved_here:none", "has no 'none'"),
        ("resolved_here:takes_one", "without arguments"),
        ("resolved_here:gives_a_number", "returned int"),
        ("resolved_here:gives_only_a_function", "returned function"),
    ],
)
def test_a_name_without_a_model_says_why(name: str, says: str) -> None:
    with pytest.raises(PaseError, match=says):
        resolve(name)


def test_a_name_takes_no_arguments_and_a_number_is_no_model() -> None:
    asked = CompileOptions(devices=2)
    for more in ((np.zeros(3), ()), (None, (np.zeros(3),))):
        with pytest.raises(PaseError, match="no further arguments") as e:
            traced_model("zoo:mlp", *more, asked)
        assert e.value.where == "'zoo:mlp'"
    with pytest.raises(PaseError, match="not int"):
        traced_model(3, None, (), asked)


@pytest.mark.parametrize(
    ("model", "what", "fix"),
    [
        ("gpt.py:loss_fn", "it names a file, not a module", "write gpt:loss_fn"),
        ("models/gpt.py:loss_fn", "it names a file, not a module", "write models.gpt:loss_fn"),
        ("nowhere.keras", "there is no such file", "check the path"),
    ],
)
def test_a_name_that_cannot_be_meant_is_refused_before_a_framework_is_loaded(
    model: str, what: str, fix: str
) -> None:
    with pytest.raises(PaseError) as e:
        resolve(model)
    assert (e.value.what, e.value.fix) == (what, fix)
