"""What is kept for backward, compared with what JAX lists as the residuals of the same program on one device."""

import pytest

from bench.audit.residuals import explained, loss_of, scores_of
from bench.audit.residuals_jax import residuals
from bench.composer.spec import parse
from pase.memory.residuals import kept_bytes, residual_bytes, written_bytes
from tests.memory.patterns import PATTERNS, pattern
from tests.memory.programs import JAX_LOOPS, graph_of, jax_loop

COMPOSED = """
8,8,8 linen_module.8948 inner_gradient.39581! dense.34826 layer_scan.45459 | contrastive.36710
8,3,8 recurrent.11396 linear_algebra.50514 | weighted.7203
8,3,8 target_network.15117 mixer.3636! attention.49954 | log_mean_exp.12787
8,4,16 attention.19339 batch_norm.36860 mlp.17367 | log_mean_exp.21711
8,4,16 batch_norm.22132 bilinear.919 | contrastive.17862!
8,5,12 embedding.11038 ordinary_differential.47406 mixed_precision.1997 | contrastive.34014!
8,5,12 ensemble.1538 | sum_square.45099
8,4,16 running_average.49589 | regularised.64750
16,4,8 norm.47063 | self_distilled.47084
8,6,8 target_network.60610 cumulative_sums.45577 | mean_square.57046
8,4,8 fixed_point.49111 linear_algebra.49289 resized.20481 layer_scan.1952! | mean_square.63953
8,8,8 nnx_module.1468! random_numbers.15673 among_examples.1697! | margin.5274!
16,4,8 bilinear.43180 resized.37953 norm.56814 nested_parameters.58281 | sum_square.37075
8,8,8 norm.6797! linear_attention.44689 | mean_square.65172
8,4,16 blockwise_attention.49659 layer_scan.7570! | contrastive.46054!
8,5,12 codebook.68 shapes.46507 embedding.13040 | contrastive.39410
16,8,16 experts.31269! inner_gradient.15651 blockwise_attention.49229! | sum_square.16991
12,4,8 experts.13205 | self_distilled.36577!
8,5,12 codebook.18620 layer_scan.58100 | cross_entropy.25042!
8,4,8 layer_scan.47560! inner_gradient.40853 rotation.48905 | cross_entropy.4976
8,5,12 picked_tokens.58235 library_attention.28953 mixed_precision.43970 | regularised.3435!
8,8,8 experts.48696 | margin.36798
16,8,16 linear_attention.14501 rematerialised_block.59281! | contrastive.57930
16,4,8 by_example.56258 | masked_tokens.61128
"""
"""Programs that the composer drew, written out so that they do not change if it gets more patterns."""


def check(loss, params, *batch):
    """Check that what is kept is within 10% of what JAX lists, or differs for a known reason."""
    graph, truth = graph_of(loss, params, *batch), residuals(loss, params, *batch)
    assert explained(kept_bytes(graph), truth, scores_of(graph)) != "unexplained", (kept_bytes(graph), truth)
    assert residual_bytes(graph) <= written_bytes(graph)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_patterns_residuals_are_those_that_jax_lists(name):
    check(*pattern(name))


@pytest.mark.parametrize("name", sorted(JAX_LOOPS.keys() - {"branches"}))
def test_a_loops_residuals_are_those_that_jax_lists(name):
    """If loops stack residuals, no fusion recomputes any of them.

    Branches are left out: they also return copies of the operands that are their residuals, which are not counted.
    """
    program = jax_loop(name, 32)
    kept, listed = kept_bytes(graph_of(*program)), residuals(*program).listed
    assert kept == pytest.approx(listed, rel=0.1, abs=1024)


@pytest.mark.parametrize("model", ["mlp", "rnnlm", "gpt2", "bert_base", "vit_l16", "densenet121"])
def test_a_models_residuals_are_those_that_jax_lists(model):
    from pase import zoo

    m = zoo.reduced(model)
    check(m.loss_fn, m.params, *m.inputs)


@pytest.mark.parametrize("line", COMPOSED.strip().splitlines())
def test_a_composed_programs_residuals_are_those_that_jax_lists(line):
    check(*loss_of(parse(line)))
