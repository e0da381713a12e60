"""Predicted peak memory against XLA's memory analysis of the compiled step: a quick part of bench/audit/memory.py."""

import optax
import pytest

from bench.cases.plans import reduced
from pase.backends.audit.xla_memory import compare_memory

CASES = [
    ("mlp", "data_parallel", 0.05),
    ("mlp", "zero2", 0.05),
    ("mlp", "zero2 manual", 0.05),
    ("gpt2", "zero2", 0.15),
    ("gpt2", "fsdp manual", 0.15),
    ("gpt2", "ours@2x4", 0.15),
    ("llama3_8b", "megatron/megatron_2x4", 0.15),
    ("vgg19", "data_parallel", 0.1),
    ("vgg19", "ours@2x4", 0.1),
]


@pytest.mark.some(3)
@pytest.mark.parametrize(("model", "strategy", "within"), CASES, ids=lambda x: str(x).split("/")[-1])
def test_peak_is_near_and_what_is_stored_exact(model, strategy, within):
    """Parameters and optimizer state are exact to the byte, except for Adam's step count. The peak is near."""
    strategy, _, lowering = strategy.partition(" ")
    plan, lowering = reduced(model).plan(strategy), lowering or "annotated"
    step = plan.jax.lower_train_step(optax.adam(1e-3), lowering=lowering)
    peak = compare_memory(plan, step.compile(), lowering)
    assert abs(peak.stored_compiled - peak.stored) <= 64
    assert abs(peak.error) <= within
