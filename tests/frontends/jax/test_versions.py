"""One module handles JAX's versions: bounds and a warning for newer ones. No other module uses JAX's internals."""

from __future__ import annotations

import itertools
import re
import tomllib
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Literal, Primitive

from pase.errors import PaseError
from pase.frontends.jax import versions
from pase.frontends.jax.frontend import from_jax
from pase.frontends.jax.versions import literal_array

ROOT = Path(__file__).parents[3]
ONLY_THERE = re.compile(
    r"jax\.extend|jax\._src|\"num_consts\"|\"num_carry\"|\"ft_in\"|\.as_text\(\)(?!\.)\s*$", re.M
)
S = jax.ShapeDtypeStruct


def test_the_bounds_of_the_package_are_what_is_known():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = [r for r in project["optional-dependencies"]["jax"] if re.match(r"jax\b", r)]
    low, high = re.fullmatch(r"jax>=(\d+\.\d+)(?:\.\d+)?,<(\d+\.\d+)", asked).groups()
    (major, oldest), (_, newest) = versions.KNOWN[0], versions.KNOWN[-1]
    assert (low, high) == (f"{major}.{oldest}", f"{major}.{newest + 1}")
    assert tuple(map(int, jax.__version__.split(".")[:2])) in versions.KNOWN


def test_an_older_version_is_refused_and_a_newer_one_warned_of_once():
    with pytest.raises(PaseError, match=r"0\.9\.2 .* 0\.10 to 0\.12") as e:
        versions.check("0.9.2")
    assert "pip install" in e.value.fix
    major, newest = versions.KNOWN[-1]
    unknown = f"{major}.{newest + 1}.0.dev20300101"
    with pytest.warns(UserWarning, match=rf"{re.escape(unknown)} is newer .* {major}\.{newest}"):
        versions.check(unknown)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check(unknown)
        versions.check()


def test_a_newer_version_is_tried(monkeypatch):
    major, newest = versions.KNOWN[-1]
    monkeypatch.setattr(jax, "__version__", f"{major}.{newest + 7}.0")
    versions.check.cache_clear()
    try:
        with pytest.warns(UserWarning, match="is newer than"):
            graph = from_jax(
                lambda w, x: jnp.sum(jnp.tanh(x @ w)), S((8, 4), "float32"), S((16, 8), "float32")
            )
    finally:
        versions.check.cache_clear()
    assert any(n.name.startswith("dot") for n in graph.nodes)


def test_nobody_else_looks_behind_the_front_of_jax():
    """Only these do: ``drivers`` names a logger, and is apart because importing it takes no time."""
    front = ROOT / "pase" / "frontends" / "jax"
    wrong = [
        f"{file.relative_to(ROOT)}: {found[0].strip()}"
        for file in (ROOT / "pase").rglob("*.py")
        if file not in (front / "versions.py", front / "drivers.py")
        if (found := ONLY_THERE.search(file.read_text()))
    ]
    assert wrong == []


def test_a_polynomial_costs_a_product_and_a_sum_a_term():
    """JAX 0.12 introduced it. Here it is constructed, so that it is tested with every version."""
    polynomial = Primitive("polynomial")
    polynomial.def_abstract_eval(lambda x, *_: x)
    graph = from_jax(lambda x: jnp.sum(polynomial.bind(x, 1.0, 0.5, 2.0)), S((8, 4), "float32"))
    (node,) = (n for n in graph.nodes if n.name.startswith("polynomial"))
    assert [op.flops_per_point for op in node.ops] == [4.0]


@pytest.mark.parametrize("x64", [False, True])
def test_a_literal_is_an_array_of_its_dtype(x64: bool) -> None:
    with jax.enable_x64(x64):
        eqns = jax.make_jaxpr(
            lambda x, y: (
                x * 2.0 + jnp.full(3, -jnp.inf, x.dtype),
                lax.broadcast_in_dim(True, (3,), ()),
                y + 1,
            )
        )(jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.int8)).eqns
    literals = [v for v in itertools.chain(*(e.invars for e in eqns)) if isinstance(v, Literal)]
    assert len(literals) == 4
    for v in literals:
        assert (literal_array(v).shape, literal_array(v).dtype) == ((), v.aval.dtype)


def test_traces_leave_nothing_behind_in_jax():
    """Each trace once added a file to those that JAX does not count as the user's. JAX asks for each line whether it is
    the user's, so each trace made all later ones slower."""
    from jax._src import source_info_util

    from_jax(lambda w, x: jnp.sum(x @ w), S((4, 4), jnp.float32), S((2, 4), jnp.float32))
    before = list(source_info_util._exclude_paths)
    from_jax(lambda w, x: jnp.sum(x * w), S((4, 4), jnp.float32), S((4, 4), jnp.float32))
    assert source_info_util._exclude_paths == before
