"""Helpers for the equations of a jaxpr."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal

from pase.backends.jax.ops.jaxprs import boundary, noted, of_operand, places_only
from pase.ir.blocks import Block

S = jax.ShapeDtypeStruct


def program(x, w):
    a = jnp.sin(x)
    b = a * w
    c = b + 1.0
    return c * a, b


@pytest.mark.parametrize(("start", "stop"), itertools.combinations(range(5), 2))
def test_the_boundary_of_a_block_is_what_crosses_it(start, stop):
    jaxpr = jax.make_jaxpr(program)(1.0, 2.0).jaxpr
    assert len(jaxpr.eqns) == 4
    reads, makes = boundary(jaxpr, Block(prefix="", start=start, stop=stop))
    inside = jaxpr.eqns[start:stop]
    made = [v for e in inside for v in e.outvars]
    later = [v for e in jaxpr.eqns[stop:] for v in e.invars] + jaxpr.outvars
    assert makes == [v for v in made if any(v is x for x in later)]
    wanted = [v for e in inside for v in e.invars if not isinstance(v, Literal) and v not in made]
    assert reads == list(dict.fromkeys(wanted))


def equations(fn, *shapes):
    return jax.make_jaxpr(fn)(*shapes).jaxpr.eqns


def test_equations_that_only_place_their_operands():
    device = jax.devices()[0]
    x = S((4,), "float32")
    (put,) = equations(lambda x: jax.device_put(x, device), x)
    assert places_only(put)
    (host,) = equations(lambda x: jax.device_put(x, jax.memory.Space.Host), x)
    assert not places_only(host)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    (held,) = equations(lambda x: jax.lax.with_sharding_constraint(x, split), x)
    assert places_only(held)
    (other,) = equations(jnp.sin, x)
    assert not places_only(other)


def test_an_equation_of_several_operands_is_restricted_to_one():
    (put,) = equations(lambda x, y: jax.device_put((x, y)), S((4,), "float32"), S((2,), "int32"))
    for i, shape in enumerate([(4,), (2,)]):
        one = of_operand(put, i)
        assert [v.aval.shape for v in (*one.invars, *one.outvars)] == [shape, shape]
        assert all(len(one.params[k]) == 1 for k in ("devices", "srcs", "copy_semantics"))


def test_an_error_has_one_note_with_the_innermost_equation():
    outer, inner = equations(lambda x: jnp.cos(jnp.sin(x)), S((4,), "float32"))
    with pytest.raises(KeyError) as e, noted(outer), noted(inner):
        raise KeyError("t99")
    (note,) = e.value.__notes__
    assert f"'{inner.primitive.name}'" in note and "test_jaxprs.py" in note
