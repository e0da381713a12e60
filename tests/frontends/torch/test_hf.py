"""Models of the transformers library by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pase.errors import PaseError
from pase.frontends.torch.hf import build

pytestmark = pytest.mark.torch


def test_no_memory_for_the_largest_model() -> None:
    module, _ = build("hf:LlamaForCausalLM?hidden_size=16384&num_hidden_layers=1&vocab_size=128256")
    assert sum(p.nelement() for p in module.parameters()) > 4e9


def test_an_example_is_as_long_as_the_positions_allow() -> None:
    _, (batch,) = build("hf:WhisperForConditionalGeneration?encoder_layers=1&decoder_layers=1&batch=2")
    assert batch["labels"].shape == (2, 448)


def test_a_configuration_file_is_its_class_with_its_fields(tmp_path: Path) -> None:
    """The reference is the same model by its class and settings."""
    fields: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256}
    by_class, _ = build(
        "hf:LlamaForCausalLM?dtype=bfloat16&" + "&".join(f"{k}={v}" for k, v in fields.items())
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", **fields}))
    for name in (f"hf:{path}?batch=4", f"hf:{tmp_path}?batch=4"):
        module, (batch,) = build(name)
        assert batch["input_ids"].shape[0] == 4
        assert {k: (p.shape, p.dtype) for k, p in module.named_parameters()} == {
            k: (p.shape, p.dtype) for k, p in by_class.named_parameters()
        }
    module, _ = build(f"hf:{path}?dtype=float32&num_hidden_layers=1")
    assert len(module.model.layers) == 1 and str(next(module.parameters()).dtype) == "torch.float32"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"hidden_size": 64}', "architectures"),
        ("[1]", "one JSON object"),
        ('{"architectures": ["LamaForCausalLM"]}', "did you mean"),
        ('{"architectures": ["LlamaForCausalLM"], "hidden_size": "wide"}', "cannot build"),
    ],
)
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PaseError, match=what):
        build(f"hf:{tmp_path}")


def test_a_model_of_the_hub_that_is_not_here_is_not_downloaded() -> None:
    with pytest.raises(PaseError, match=r"hf download nobody/nothing config\.json"):
        build("hf:nobody/nothing")
