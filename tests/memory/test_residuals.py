"""What is kept for backward, compared with what JAX lists as the residuals of the same program on one device.

What a loop keeps is linear in its trip count, not quadratic, in every framework.
"""

import pytest

import pase
from bench.audit.residuals import explained, loss_of, scores_of
from bench.audit.residuals_jax import residuals
from bench.composer.spec import parse
from pase.memory.residuals import kept, kept_bytes, written_bytes
from tests.memory.patterns import PATTERNS, pattern
from tests.memory.programs import (
    JAX_LOOPS,
    ONNX_LOOPS,
    N,
    graph_of,
    jax_loop,
    onnx_loop,
    residual_bytes,
    spec,
)

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


@pytest.mark.some(10)
@pytest.mark.parametrize("line", COMPOSED.strip().splitlines())
def test_a_composed_programs_residuals_are_those_that_jax_lists(line):
    check(*loss_of(parse(line)))


ROW = 4 * N * 4
"""Bytes of the value of one iteration."""


def linear(of):
    """Check that kept bytes are linear in the trip count; return those of 8, 16 and 24 iterations.

    of: trip count -> graph.
    """
    graphs = [of(turns) for turns in (8, 16, 24)]
    found = [residual_bytes(g) for g in graphs]
    assert all(b <= written_bytes(g) for b, g in zip(found, graphs, strict=True))
    assert found[2] - found[1] == found[1] - found[0] >= 0
    return found


@pytest.mark.parametrize("name", JAX_LOOPS)
def test_what_jax_loops_keep_grows_with_their_turns(name):
    linear(lambda turns: graph_of(*jax_loop(name, turns)))


@pytest.mark.parametrize("kind", ONNX_LOOPS)
def test_what_onnx_loops_keep_grows_with_their_turns(kind):
    found = linear(lambda turns: graph_of(onnx_loop(kind, turns)))
    assert kind == "Scan" or found[0] > 8 * ROW  # a Scan is one op, whose inside is not counted


@pytest.mark.minutes
def test_what_a_tensorflow_loop_keeps_grows_with_its_turns():
    pytest.importorskip("tensorflow")
    from tests.frontends.tf.graphs import lstm

    assert linear(lambda turns: graph_of(lstm(width=N, steps=turns), dims={"batch": 4}))[0] > 8 * ROW


@pytest.mark.some(1)
@pytest.mark.torch
@pytest.mark.parametrize("kind", ["Scans", "Maps"])
def test_what_pytorch_loops_keep_grows_with_their_turns(kind):
    import torch

    from tests.frontends.torch.bodies import models

    linear(lambda turns: graph_of(getattr(models(), kind)(), torch.empty(turns, 32, 64)))


@pytest.mark.torch
def test_what_pytorchs_lstm_keeps_grows_with_its_turns():
    import torch

    class Last(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(N, N)

        def forward(self, x):
            return self.lstm(x)[0].sum()

    linear(lambda turns: graph_of(Last(), torch.empty(turns, 4, N)))


@pytest.mark.torch
def test_a_call_of_pytorch_keeps_no_value_that_only_it_reads_but_a_norm_keeps_its_mean_and_what_it_divides_by():
    """SiLU keeps its input and not the sigmoid within; written out, the sigmoid is a call of its own."""
    import torch

    class Gated(torch.nn.Module):
        def __init__(self, silu):
            super().__init__()
            self.up, self.norm, self.silu = torch.nn.Linear(N, N), torch.nn.LayerNorm(N), silu

        def forward(self, x):
            return self.silu(self.norm(self.up(x))).sum()

    def of(silu):
        graph = graph_of(Gated(silu), torch.empty(4, N))
        found = [graph.tensors[k.tensor] for k in kept(graph).values()]
        return sorted(t.shape for t in found if t.role == "activation")

    statistics, silu = [(4, 1), (4, 1)], torch.nn.functional.silu
    assert of(silu) == [*statistics, (4, N), (4, N)]
    assert of(lambda x: x * torch.sigmoid(x)) == [*statistics, (4, N), (4, N), (4, N)]


@pytest.mark.torch
def test_a_slice_that_pytorch_keeps_is_a_view_that_keeps_the_whole():
    import torch

    class First(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(N, N), torch.nn.Linear(N, N)

        def forward(self, x):
            return self.down(self.up(x)[:, 0]).sum()

    graph = graph_of(First(), torch.empty(4, 8, N))
    found = [graph.tensors[k.tensor] for k in kept(graph).values()]
    assert [t.shape for t in found if t.role == "activation"] == [(4, 8, N)]


def test_a_stack_is_kept_once_and_a_carry_once_a_turn():
    """A product reads the carry h, the derivative of tanh needs its result, and the loss needs the stack of h.

    JAX stacks both the result of tanh and 1 minus that result.
    """
    graph = graph_of(*jax_loop("stacked", 8))
    by_shape = {}
    for k in kept(graph).values():
        t = graph.tensors[k.tensor]
        if t.role == "activation":
            by_shape.setdefault(t.shape, []).append(k.times)
    assert by_shape == {(4, N): [8, 16], (8, 4, N): [1]}


def test_a_slice_of_a_stack_is_not_kept_beside_it():
    """The product of each iteration reads a slice of the batch, which is in memory anyway."""
    graph = graph_of(*jax_loop("maps", 8))
    assert all(graph.tensors[k.tensor].shape != (4, N) or k.times == 16 for k in kept(graph).values())
    assert (
        residual_bytes(graph) == 3 * 8 * ROW
    )  # tanh keeps two arrays per iteration, and the square keeps the stack


def test_what_a_region_keeps_inside_counts_the_turns_of_its_own_loops():
    """A loop that is recomputed as a whole has the values of all its iterations at once."""
    graph = graph_of(*jax_loop("loop_again", 8))
    (inside,) = {k.region for k in kept(graph).values()} - {None}
    of_region = [k for k in kept(graph).values() if k.region == inside]
    assert {k.times for k in of_region if graph.tensors[k.tensor].shape == (4, N)} == {8, 16}


def test_the_plan_of_a_long_loop_does_not_need_the_square_of_its_turns():
    """Row 4 of issue 32: 15.7 GiB were predicted although XLA needs 39 MiB."""
    plan = pase.compile(*jax_loop("stacked", 2000), devices=1)
    assert plan.memory.activations < 6 * 2000 * ROW
    assert plan.accumulate == 1 and not plan.remat


def test_the_bound_on_what_is_kept_is_what_is_written():
    graph = graph_of(lambda w, x: (jax_tanh(x @ w) ** 2).sum(), spec(N, N), spec(4, N))
    assert residual_bytes(graph) <= written_bytes(graph) <= 12 * ROW


def jax_tanh(x):
    import jax.numpy as jnp

    return jnp.tanh(x)
