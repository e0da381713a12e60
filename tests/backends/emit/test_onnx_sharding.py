"""ONNX's multi-device annotations say where every element is, and unsound ones are refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.backends.emit.onnx_sharding import check, from_spec, to_spec
from pase.errors import PaseError
from pase.machine import Mesh
from pase.tables.axis_layout import AxisLayout
from tests.backends.emit.onnx_models import small

MESH = Mesh(names=("x", "y", "z"), sizes=(2, 3, 2))


def element_owners(shape: tuple[int, ...], digits: Any, mesh: Mesh) -> np.ndarray:
    """Which devices hold which elements, by the definition of a digit: bool [devices, *shape]."""
    out = np.ones((mesh.devices, *shape), bool)
    for device, at in enumerate(itertools.product(*map(range, mesh.sizes))):
        for a, d in enumerate(digits):
            if d is not None:
                dim, blocks = d
                index = np.arange(shape[dim]) * blocks // shape[dim] % mesh.sizes[a]
                view = [1] * len(shape)
                view[dim] = -1
                out[device] &= (index == at[a]).reshape(view)
    return out


def owners_of_spec(spec: Any, shape: tuple[int, ...], devices: int) -> np.ndarray:
    """Which devices hold which elements, read from the annotation alone."""
    groups = {e.key: list(e.value) for e in spec.index_to_device_group_map}
    factors = [(d.axis, s.dim_value, s.num_shards) for d in spec.sharded_dim for s in d.simple_sharding]
    out = np.zeros((devices, *shape), bool)
    for k, coordinates in enumerate(itertools.product(*(range(n) for _, _, n in factors))):
        mine = np.ones(shape, bool)
        for dim in {d for d, _, _ in factors}:
            index = np.arange(shape[dim])
            inner = shape[dim]
            keep = np.ones(shape[dim], bool)
            for (axis, extent, n), at in zip(factors, coordinates, strict=True):
                if axis == dim:
                    inner //= extent
                    keep &= (index // inner % extent) * n // extent == at
            view = [1] * len(shape)
            view[dim] = -1
            mine &= keep.reshape(view)
        entry = spec.device[k]
        for device in groups.get(entry, [entry]):
            out[device] |= mine
    return out


@st.composite
def layouts(draw: Any) -> tuple[tuple[int, ...], Any]:
    """A shape and a layout of it on MESH: some axes split some dims, with unsplit factors between them."""
    rank = draw(st.integers(1, 3))
    cut = [1] * rank
    digits: list[Any] = [None] * 3
    for a in draw(st.permutations(range(3))):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            cut[dim] *= draw(st.sampled_from([1, 1, 2, 3])) * MESH.sizes[a]
            digits[a] = (dim, cut[dim])
    return tuple(c * draw(st.integers(1, 3)) for c in cut), AxisLayout(digits)


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_a_spec_says_where_every_element_is(case: Any) -> None:
    shape, digits = case
    spec = to_spec("t", shape, digits, MESH)
    assert (owners_of_spec(spec, shape, MESH.devices) == element_owners(shape, digits, MESH)).all()
    again = from_spec(spec, MESH)
    assert (element_owners(shape, again, MESH) == element_owners(shape, digits, MESH)).all()
    flat = (int(np.prod(shape)),)
    moved = digits.reshaped(shape, flat, MESH)
    assert moved is not None
    wanted = element_owners(shape, digits, MESH).reshape(MESH.devices, -1)
    assert (element_owners(flat, moved, MESH) == wanted).all()
    back = moved.reshaped(flat, shape, MESH)
    assert (
        back is not None and (element_owners(shape, back, MESH) == element_owners(shape, digits, MESH)).all()
    )
    for new in ((n, flat[0] // n) for n in range(1, flat[0] + 1) if flat[0] % n == 0):
        if (divided := moved.reshaped(flat, new, MESH)) is not None:
            assert (element_owners(new, divided, MESH) == wanted.reshape(MESH.devices, *new)).all()


def broken(change: Any) -> Any:
    """A validly annotated model with one change."""
    model = small()
    model.ir_version = 11
    model.configuration.add(name="c", num_devices=12)
    conf = model.graph.node[0].device_configurations.add(configuration_id="c")
    conf.sharding_spec.append(to_spec("w", (512, 4096), AxisLayout(((0, 2), None, (1, 2))), MESH))
    check(model)
    change(model, conf, conf.sharding_spec[0])
    return model


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m, c, s: setattr(m, "ir_version", 10), "need IR version 11"),
        (lambda m, c, s: setattr(c, "configuration_id", "d"), "no device configuration 'd'"),
        (lambda m, c, s: setattr(s, "tensor_name", "q"), "'q' is neither an input nor an output"),
        (
            lambda m, c, s: setattr(s.sharded_dim[0], "axis", 5),
            "axis 5 is out of range",
        ),
        (lambda m, c, s: setattr(s.sharded_dim[1], "axis", -2), "axis 0 is sharded twice"),
        (
            lambda m, c, s: setattr(s.sharded_dim[0].simple_sharding[0], "num_shards", 3),
            "512 elements .* into 3 shards",
        ),
        (lambda m, c, s: setattr(s.sharded_dim[0].simple_sharding[0], "dim_value", 64), "has 512 elements"),
        (lambda m, c, s: s.device.pop(), "4 shards do not match 3 devices"),
        (
            lambda m, c, s: s.index_to_device_group_map[0].value.append(99),
            "no device 99 among 12",
        ),
        (lambda m, c, s: s.index_to_device_group_map[0].value.append(11), "a device holds two shards"),
        (lambda m, c, s: c.sharding_spec.append(s), "sharded twice in one configuration"),
        (lambda m, c, s: m.configuration.add(name="c", num_devices=1), "name is missing or already used"),
    ],
)
def test_the_validator_sees_what_the_checker_does_not(change: Any, match: str) -> None:
    with pytest.raises(PaseError, match=match):
        check(broken(change))
