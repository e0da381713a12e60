"""The sharded step equals the unsharded one: every zoo model in its reduced size, under plans that move data.

All in float32. The two steps add the same numbers in another order, so a sum of n of them may differ by about
2⁻²⁴ √n of its largest partial sum: 1e-5 for the longest sums here, and an order more where gradients pass many
layers. A shard in the wrong place, a sum left out or taken twice, changes a gradient by as much as it is large.
Gradients are therefore held relative to the largest gradient: a bias whose gradient is zero in exact arithmetic
(attention's key bias) has nothing but rounding in it. Adam divides by the gradient's size, and would blow such
rounding up to a full step; with epsilon = 1e-3 and a learning rate of 1e-2 it grows tenfold at most.

The full matrix of models and strategies is bench/comm_audit.py; here each model runs at least once.
"""

import pytest

from bench.cases.plans import TOLERANCE, distinct_models, measured, reduced

STRATEGIES = {
    "mlp": [
        "data_parallel",
        "zero2",
        "fsdp",
        "ours@8",
        "ours@2x2x2",
        "random1@2x4",
        "random2@2x2x2",
        "random3@8",
    ],
    "alexnet": ["ours@2x4"],
    "rnnlm": ["fsdp", "random1@2x4"],
    "gpt2": ["ours@2x2x2"],
    "llama3_8b": ["megatron/megatron_sp_2x4", "megatron/megatron_sp_zero2_2x4"],
    "transformer": ["ours@8"],
    "vit_l16": ["fsdp"],
    "inception_v3": ["data_parallel"],
    "densenet121": ["data_parallel"],
    "resnet101": ["fsdp"],
}
"""Model -> strategies that run here; a model that is not listed runs "ours@2x4"."""
CASES = [(m, s) for m in distinct_models() for s in STRATEGIES.get(m, ["ours@2x4"])]


@pytest.mark.parametrize(("model", "strategy"), CASES, ids=lambda x: x.split("/")[-1])
def test_step_equals_unsharded(model, strategy):
    off, rows = measured(model, strategy)
    assert sum(r.compiled for r in rows) > 1000, "this plan moves no data: it tests nothing"
    assert {k: v for k, v in off.items() if v > TOLERANCE[k]} == {}


def test_a_wrong_layout_is_noticed():
    """The tolerance is orders below what one missing sum does."""
    case = reduced("mlp")
    import jax
    import optax

    from pase.backends.audit.xla import unsharded_step

    params, batch = case.model.init(0)
    whole = unsharded_step(case.model.loss_fn, optax.sgd(0.1), params, batch)
    half = jax.tree.map(lambda x: x[: len(x) // 2], batch)
    off = whole.differences(unsharded_step(case.model.loss_fn, optax.sgd(0.1), params, half))
    assert min(off["loss"], off["gradients"]) > 100 * max(TOLERANCE.values())
