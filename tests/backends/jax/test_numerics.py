"""The sharded step equals the unsharded one: every zoo model in its reduced size, under plans that send data.

All steps run in float32. The two steps add the same numbers in different order, so a sum of n of them may differ by
about 2⁻²⁴ √n of its largest partial sum: 1e-5 for the longest sums here, and ten times more for gradients that pass
many layers. A misplaced shard, or a sum that is missing or taken twice, changes a gradient by about its own size.
Differences are relative to the largest gradient of all, because a bias whose gradient is zero in exact arithmetic
(attention's key bias) has a gradient of rounding errors only. Adam divides by the gradient's size, and would amplify
such errors to a full step; with epsilon = 1e-3 and a learning rate of 1e-2 they grow tenfold at most.

bench/audit/communication.py runs the full matrix of models and strategies; here, each model runs at least once.
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
"""Model -> the strategies that run here. Any other model runs "ours@2x4"."""
DEEP = ("inception_v3", "resnet101", "densenet121", "vgg19", "bert_base", "vit_l16")
"""Models of many layers. densenet121 has their ops."""
CASES = [
    pytest.param(m, s, marks=[pytest.mark.release] * (m in DEEP))
    for m in distinct_models()
    for s in STRATEGIES.get(m, ["ours@2x4"])
]


@pytest.mark.parametrize(("model", "strategy"), CASES, ids=lambda x: x.split("/")[-1])
def test_step_equals_unsharded(model, strategy):
    off, rows = measured(model, strategy)
    assert sum(r.compiled for r in rows) > 1000, "this plan sends no data, so it tests nothing"
    assert {k: v for k, v in off.items() if v > TOLERANCE[k]} == {}


def test_a_wrong_layout_is_noticed():
    """The tolerance is orders of magnitude smaller than the effect of one missing sum."""
    case = reduced("mlp")
    import jax
    import optax

    from pase.backends.audit.xla import unsharded_step

    params, batch = case.model.init(0)
    whole = unsharded_step(case.model.loss_fn, optax.sgd(0.1), params, batch)
    half = jax.tree.map(lambda x: x[: len(x) // 2], batch)
    off = whole.differences(unsharded_step(case.model.loss_fn, optax.sgd(0.1), params, half))
    assert min(off["loss"], off["gradients"]) > 100 * max(TOLERANCE.values())
