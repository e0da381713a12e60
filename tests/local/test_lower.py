"""Lowering a strategy to a local program."""

import pytest

from bench.cases.plans import reduced
from pase.errors import PaseError
from pase.local.lower import program_of
from tests.local.programs import planned_program


def test_a_strategy_of_another_model_is_refused():
    _, local = planned_program("mlp", "data_parallel")
    graph = reduced("gpt2").problem.graph
    with pytest.raises(PaseError) as e:
        program_of(graph, local.mesh, {})
    assert graph.name in e.value.where and min(n.name for n in graph.nodes) in e.value.what
