"""A plan as rules for Flax's logical axes, which Flax applies on eight devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import pase
from pase.backends.emit import flax_rules
from pase.backends.registry import emit
from pase.errors import PaseError
from tests.backends.emit import flax_models as m


def test_flax_lays_out_its_variables_as_planned_and_the_step_is_the_unsharded_one(tmp_path: Path) -> None:
    path = tmp_path / "rules.py"
    plan = pase.compile(
        *m.named_mlp(), devices=8, target="flax-rules", mesh="data=2,fsdp=2,tensor=2", baselines=False
    )
    assert "rules for 4 logical axes" in emit(plan, "flax-rules", path)
    written: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), written)
    assert dict(written["RULES"])["embed"] == ("fsdp",) and dict(written["RULES"])["batch"] == (
        "data",
        "fsdp",
    )
    shapes = jax.eval_shape(m.init, jax.random.key(0))
    shardings = written["shardings"](shapes)
    variables = jax.jit(m.init, out_shardings=shardings)(jax.random.key(0))
    boxed = jax.tree.leaves(variables, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))
    assert len(boxed) == len(plan.parameters)
    for array, t in zip(jax.tree.leaves(variables), plan.parameters.values(), strict=True):
        wanted = PartitionSpec(*(axes or None for axes in t.storage))
        assert array.sharding.is_equivalent_to(
            jax.sharding.NamedSharding(array.sharding.mesh, wanted), array.ndim
        )
    tokens = np.random.default_rng(0).integers(m.VOCAB, size=(2, m.BATCH, m.LENGTH))
    batch = {"tokens": tokens[0], "labels": tokens[1]}
    with jax.set_mesh(written["mesh"]()), nn.logical_axis_rules(written["RULES"]):
        value, grads = jax.jit(jax.value_and_grad(m.loss))(variables, batch)
    alone, expected = jax.jit(jax.value_and_grad(m.loss))(m.init(jax.random.key(0)), batch)
    assert np.allclose(value, alone, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected)


def test_names_that_disagree_are_refused() -> None:
    plan = pase.compile(*m.named_mlp(), devices=8, target="flax-rules", mesh="fsdp=8", baselines=False)
    path = next(p for p in plan.parameters if p.endswith("Dense_1.kernel.value"))
    other = replace(plan.parameters[path], storage=(("fsdp",), ()))
    with pytest.raises(PaseError) as e:
        flax_rules.rules(replace(plan, parameters={**plan.parameters, path: other}))
    assert "'mlp'" in e.value.what and path in e.value.what
    bare = pase.compile("zoo:mlp", devices=8, target="flax-rules", baselines=False)
    with pytest.raises(PaseError, match="no logical names"):
        flax_rules.rules(bare)
