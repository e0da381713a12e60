"""Models of the transformers library by name."""

from __future__ import annotations

import pytest

from pase.frontends.torch.hf import build

pytestmark = pytest.mark.torch


def test_no_memory_for_the_largest_model() -> None:
    module, _ = build("hf:LlamaForCausalLM?hidden_size=16384&num_hidden_layers=1&vocab_size=128256")
    assert sum(p.nelement() for p in module.parameters()) > 4e9


def test_an_example_is_as_long_as_the_positions_allow() -> None:
    _, (batch,) = build("hf:WhisperForConditionalGeneration?encoder_layers=1&decoder_layers=1&batch=2")
    assert batch["labels"].shape == (2, 448)
