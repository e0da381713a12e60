"""Twelve models of transformers, small enough to train on one core, and a step of each by PyTorch alone, in float64."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bench.cases.plans import Case

__all__ = ["MODELS", "TorchExample", "example", "in_float32", "in_float64", "state_of"]

VOCABULARY, LENGTH, SIDE, LABELS = 128, 16, 16, 8
_TEXT = {"vocab_size": VOCABULARY}
_WIDTH = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION = {"image_size": SIDE, "patch_size": 4}


@dataclass(frozen=True, kw_only=True)
class _TinyModel:
    """A class of transformers, its settings, and the contents of its batch."""

    name: str
    settings: Mapping[str, Any]
    batch: Callable[[int], dict[str, Any]]


def _ids(batch: int, length: int = LENGTH) -> Any:
    import torch

    return torch.randint(3, VOCABULARY, (batch, length))


def _text(batch: int) -> dict[str, Any]:
    return {"input_ids": _ids(batch), "labels": _ids(batch)}


def _pixels(batch: int, side: int = SIDE) -> Any:
    import torch

    return torch.randn(batch, 3, side, side)


def _images(side: int) -> Callable[[int], dict[str, Any]]:
    import torch

    return lambda batch: {"pixel_values": _pixels(batch, side), "labels": torch.randint(LABELS, (batch,))}


def _pairs(batch: int) -> dict[str, Any]:
    return {"input_ids": _ids(batch), "pixel_values": _pixels(batch), "return_loss": True}


def _speech(batch: int) -> dict[str, Any]:
    import torch

    return {"input_features": torch.randn(batch, 8, 2 * LENGTH), "labels": _ids(batch, 8)}


_EXPERTS = {**_TEXT, **_WIDTH, "num_key_value_heads": 2, "num_experts_per_tok": 2}
MODELS: dict[str, _TinyModel] = {
    "Llama": _TinyModel(
        name="LlamaForCausalLM", settings={**_TEXT, **_WIDTH, "num_key_value_heads": 2}, batch=_text
    ),
    "GPT-2": _TinyModel(
        name="GPT2LMHeadModel",
        settings={**_TEXT, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": LENGTH},
        batch=_text,
    ),
    "BERT": _TinyModel(
        name="BertForMaskedLM", settings={**_TEXT, **_WIDTH, "max_position_embeddings": LENGTH}, batch=_text
    ),
    "T5": _TinyModel(
        name="T5ForConditionalGeneration",
        settings={
            **_TEXT,
            **{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
            "decoder_start_token_id": 0,
        },
        batch=_text,
    ),
    "Mixtral": _TinyModel(
        name="MixtralForCausalLM", settings={**_EXPERTS, "num_local_experts": 4}, batch=_text
    ),
    "Qwen-MoE": _TinyModel(
        name="Qwen2MoeForCausalLM",
        settings={
            **_EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        batch=_text,
    ),
    "ViT": _TinyModel(
        name="ViTForImageClassification",
        settings={**_WIDTH, **_VISION, "num_labels": LABELS},
        batch=lambda batch: _images(SIDE)(batch),
    ),
    "CLIP": _TinyModel(
        name="CLIPModel",
        settings={
            "projection_dim": 32,
            "text_config": {**_TEXT, **_WIDTH, "max_position_embeddings": LENGTH},
            "vision_config": {**_WIDTH, **_VISION},
        },
        batch=_pairs,
    ),
    "Whisper": _TinyModel(
        name="WhisperForConditionalGeneration",
        settings={
            **_TEXT,
            **{
                f"{part}_{what}": n
                for part in ("encoder", "decoder")
                for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
            },
            "d_model": 32,
            "num_mel_bins": 8,
            "max_source_positions": LENGTH,
            "max_target_positions": LENGTH,
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        batch=_speech,
    ),
    "ResNet": _TinyModel(
        name="ResNetForImageClassification",
        settings={"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": LABELS},
        batch=lambda batch: _images(32)(batch),
    ),
    "ConvNeXt": _TinyModel(
        name="ConvNextForImageClassification",
        settings={"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "num_labels": LABELS},
        batch=lambda batch: _images(32)(batch),
    ),
    "Mamba": _TinyModel(
        name="MambaForCausalLM",
        settings={**_TEXT, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1, "time_step_rank": 4},
        batch=lambda batch: {"input_ids": _ids(batch, 8), "labels": _ids(batch, 8)},
    ),
}
"""Name -> the model. Heads, experts, widths and vocabularies can be split into eight or four parts."""


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Replaces float32 by float64 inside this context. Models of transformers compute norms, losses and shares of
    experts in float32, whatever their dtype, and rounding would hide a wrong term of its size."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._pytree import tree_map

    class Float64(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            args, kwargs = tree_map(
                lambda v: torch.float64 if v is torch.float32 else v, (tuple(args), dict(kwargs or {}))
            )
            return args[0].double() if func is torch.Tensor.float else func(*args, **kwargs)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            yield
    finally:
        torch.set_default_dtype(before)


def _without_chance(config: Any) -> None:
    """Removes dropout from a configuration and from those inside of it."""
    for key, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _without_chance(value)
        elif "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)


def _module(name: str) -> Any:
    """Returns the model as the library makes it, without dropout."""
    import torch
    import transformers

    kind = MODELS[name]
    made = getattr(transformers, kind.name)
    config = made.config_class(**kind.settings)
    _without_chance(config)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    torch.manual_seed(0)
    return made(config).train()


def in_float32(name: str, batch: int) -> tuple[Any, dict[str, Any]]:
    """Returns (module, batch) as the library makes them, without dropout."""
    return _module(name), MODELS[name].batch(batch)


def example(name: str, batch: int) -> tuple[Any, dict[str, Any]]:
    """Returns (module, batch) in float64. No parameter is zero or one, so that no gradient vanishes."""
    import torch

    module = _module(name).double()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return module, MODELS[name].batch(batch)


@dataclass(frozen=True, kw_only=True)
class TorchExample:
    """A model, its batch, and its problem of splitting."""

    module: Any
    batch: dict[str, Any]
    case: Case

    @classmethod
    def of(cls, name: str, batch: int, devices: int) -> TorchExample:
        """Returns the example. Raises PaseError for a model that cannot be read."""
        from pase import machine
        from pase.compiler.problem.problem import SplitProblem
        from pase.frontends import registry

        with in_float64():
            module, given = example(name, batch)
            traced = registry.trace(module, given)
        problem = SplitProblem.of(traced.graph, devices, machine.load("h100x8"), "analytic", "adam")
        return cls(module=module, batch=given, case=Case(traced=traced, problem=problem))

    @cached_property
    def alone(self) -> dict[str, Any]:
        """Returns the state after a step by PyTorch alone; see ``state_of``."""
        with in_float64():
            module = copy.deepcopy(self.module)
            # One expert after the other: an oracle for grouped products, which PyTorch only has in float32.
            module.config._experts_implementation = "eager"
            loss = module(**self.batch).loss
            loss.backward()
            return state_of(module, loss)


def state_of(module: Any, loss: Any) -> dict[str, Any]:
    """Returns the whole loss, gradients, and parameters and buffers after an update as numpy arrays, for a module after
    backward.

    Every rank of a sharded module must call it.
    """
    import torch

    def whole(t: Any) -> Any:
        return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone().numpy()

    made = {"loss": whole(loss)}
    made |= {f"gradient of {k}": whole(p.grad) for k, p in module.named_parameters() if p.grad is not None}
    torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3).step()
    return made | {f"after: {k}": whole(t) for k, t in module.state_dict().items()}
