"""What devices receive between two layouts, compared with a simulation element by element."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import pase
from pase.errors import PaseError
from pase.machine import load, mesh_from
from pase.plan.parameter_reshard import parameter_reshards
from pase.plan.types import TensorPlan

MACHINE = load("h100x8")
LAYOUTS = [((), ()), (("x",), ()), ((), ("x", "y")), (("y", "x"), ()), (("x",), ("y",)), (("z",), ("y", "x"))]


@pytest.fixture(scope="module")
def plan() -> Any:
    w, x = (jax.ShapeDtypeStruct(s, "float32") for s in ((16, 16), (32, 16)))
    return pase.compile(lambda p, x: (x @ p).mean(), w, x, devices=16, mesh="x=2,y=4,z=2", baselines=False)


def held(plan: Any) -> np.ndarray:
    """Which device holds which element: bool [16, 16, 16]."""
    sizes = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    (t,) = plan.parameters.values()
    out = np.zeros((plan.devices, *t.shape), bool)
    for device, place in enumerate(itertools.product(*map(range, plan.mesh.sizes))):
        at = dict(zip(plan.mesh.names, place, strict=True))
        inside = np.ones(t.shape, bool)
        for dim, axes in enumerate(t.storage):
            index = 0
            for a in axes:
                index = index * sizes[a] + at[a]
            block = np.arange(t.shape[dim]) // (t.shape[dim] // int(np.prod([sizes[a] for a in axes])))
            inside &= (block == index).reshape([-1 if i == dim else 1 for i in range(len(t.shape))])
        out[device] = inside
    return out


@pytest.mark.parametrize(("old", "new"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_bytes_are_those_of_the_elements(plan: Any, old: Any, new: Any) -> None:
    ((name, t),) = plan.parameters.items()

    def stored(how: Any) -> Any:
        mesh = mesh_from("x=2,y=4,z=2", 16)
        return replace(plan, mesh=mesh, parameters={name: replace(t, storage=how)})

    a, b = stored(old), stored(new)
    have, want = held(a), held(b)
    node = [have[:8].any(0), have[8:].any(0)]
    inner = max(4 * int((want[d] & node[d // 8] & ~have[d]).sum()) for d in range(16))
    outer = max(4 * int((want[d] & ~node[d // 8]).sum()) for d in range(16))
    found = parameter_reshards(a, b, MACHINE)
    assert [m.received for m in found] == ([(inner, outer)] if inner or outer else [])
    assert sum(m.seconds(MACHINE) for m in found) == pytest.approx(
        inner / MACHINE.levels[0].bandwidth_bytes_per_s + outer / MACHINE.levels[1].bandwidth_bytes_per_s
    )


def test_another_model_is_refused(plan: Any) -> None:
    other = replace(plan, parameters={"v": TensorPlan(shape=(2,), dtype="float32", storage=((),))})
    with pytest.raises(PaseError, match="not of one model"):
        parameter_reshards(plan, other, MACHINE)
