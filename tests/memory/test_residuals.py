"""What is kept for backward, beside what JAX lists as the residuals of the same program on one device."""

import pytest

from bench.residual_truth_jax import residuals
from pase.memory.residuals import kept_bytes, residual_bytes, written_bytes
from tests.memory.patterns import PATTERNS, pattern
from tests.memory.programs import JAX_LOOPS, graph_of, jax_loop

SMALL = 1024


def near(found, truth):
    return abs(found - truth) <= max(0.1 * truth, SMALL)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_patterns_residuals_are_those_that_jax_lists(name):
    """All of them, or what is left of them when a compiler makes again what it can in the fusions that read it."""
    program = pattern(name)
    graph, truth = graph_of(*program), residuals(*program)
    assert near(kept_bytes(graph), truth.fused) or near(kept_bytes(graph), truth.listed)
    assert residual_bytes(graph) <= written_bytes(graph)


@pytest.mark.parametrize("name", sorted(JAX_LOOPS.keys() - {"branches"}))
def test_a_loops_residuals_are_those_that_jax_lists(name):
    """A branch also returns copies of the operands that its own residuals are; they are not counted."""
    program = jax_loop(name, 32)
    assert near(kept_bytes(graph_of(*program)), residuals(*program).listed)


@pytest.mark.parametrize("model", ["mlp", "rnnlm", "gpt2", "bert_base", "vit_l16", "densenet121"])
def test_a_models_residuals_are_those_that_jax_lists(model):
    from pase import zoo

    m = zoo.reduced(model)
    assert near(
        kept_bytes(graph_of(m.loss_fn, m.params, *m.inputs)), residuals(m.loss_fn, m.params, *m.inputs).fused
    )
