"""What a local op computes, as a loop nest; what the graph does not determine is refused."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bench.cases.plans import case_of
from pase.errors import PaseError
from pase.local.interpret import loss_and_gradients
from pase.local.lower import local_program
from pase.machine import mesh_from
from pase.tables.layouts import configs


def test_what_the_graph_does_not_determine_is_named():
    for fn, op, fix in (
        (lambda p, x: jnp.sum(lax.lgamma(x @ p)), "lgamma", "rules"),
        (
            lambda p, x: jnp.sum(lax.dynamic_slice(x @ p, (x[0, 0].astype(int), 0), (2, 4))),
            "dynamic_slice",
            "rules",
        ),
    ):
        made = case_of(fn, jnp.ones((4, 4)), jnp.ones((4, 4)))
        graph, mesh = made.problem.graph, mesh_from("1", 1)
        program = local_program(graph, mesh, {n.name: configs(n, mesh)[0] for n in graph.nodes})
        given_ = {t.name: np.ones((4, 4)) for t in (*graph.parameters, *graph.inputs)}
        with pytest.raises(PaseError) as e:
            loss_and_gradients(program, graph, given_, graph.outputs[0])
        assert e.value.where.startswith(f"'{op}' at ") and Path(__file__).name in e.value.where
        assert f"`{fix}`" in e.value.fix
