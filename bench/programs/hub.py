"""Released models as Keras Hub builds them, in small sizes: decoders, encoders, both, and images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.programs.catalog import PROGRAMS, LibraryProgram, integers, normal
from bench.programs.keras_ import trained

HubSettings = Mapping[str, Any]

_LAYERED = {"num_layers": 2, "hidden_dim": 32, "intermediate_dim": 64}
_HEADS = {**_LAYERED, "vocabulary_size": 64, "num_heads": 4}
_SHORT = {**_HEADS, "max_sequence_length": 16}
_GROUPED = {**_LAYERED, "vocabulary_size": 64, "num_query_heads": 4, "num_key_value_heads": 2}
_DECODERS: Mapping[str, HubSettings] = {
    "GPT2": _SHORT,
    "OPT": _SHORT,
    "Bloom": _HEADS,
    "GPTNeoX": _SHORT,
    "Falcon": {**_LAYERED, "vocabulary_size": 64, "num_attention_heads": 4},
    "Llama": _GROUPED,
    "Llama3": _GROUPED,
    "Mistral": {**_GROUPED, "sliding_window": 4},
    "Mixtral": {**_GROUPED, "num_experts": 4},
    "Phi3": _GROUPED,
    "Qwen": _GROUPED,
    "Qwen3": {**_GROUPED, "head_dim": 8},
    "QwenMoe": {
        **_GROUPED,
        "num_layers": 1,
        "moe_intermediate_dim": 32,
        "shared_expert_intermediate_dim": 32,
        "num_experts": 4,
        "top_k": 2,
    },
    "Qwen3Moe": {**_GROUPED, "num_layers": 1, "moe_intermediate_dim": 32, "num_experts": 4, "top_k": 2},
    "GptOss": {**_GROUPED, "num_layers": 1, "num_experts": 4, "sliding_window": 4, "head_dim": 8},
    "SmolLM3": {
        **_LAYERED,
        "vocabulary_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_layer_enabled_list": [True, False],
        "layer_types": ["full_attention"] * 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 16,
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
    },
    "Gemma": {**_GROUPED, "intermediate_dim": 128, "head_dim": 8},
    "Gemma3": {
        **_GROUPED,
        "image_size": 16,
        "head_dim": 8,
        "use_sliding_window_attention": True,
        "sliding_window_size": 4,
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
    },
    "RWKV7": {
        "hidden_size": 32,
        "head_size": 8,
        "num_layers": 1,
        "vocabulary_size": 64,
        "intermediate_dim": 64,
        "gate_lora": 8,
        "mv_lora": 8,
        "aaa_lora": 8,
        "decay_lora": 8,
    },
}
_ENCODERS: Mapping[str, HubSettings] = {
    "Bert": _SHORT,
    "Albert": {**_SHORT, "embedding_dim": 16},
    "Roberta": _SHORT,
    "DistilBert": _SHORT,
    "DebertaV3": {**_SHORT, "bucket_size": 8},
    "Electra": {**_LAYERED, "vocab_size": 64, "num_heads": 4, "embedding_dim": 16, "max_sequence_length": 16},
    "FNet": {**_LAYERED, "vocabulary_size": 64, "max_sequence_length": 16},
    "ESM": _SHORT,
    "RoformerV2": {**_HEADS, "head_size": 8},
    "XLNet": _HEADS,
}
_BOTH: Mapping[str, HubSettings] = {"Bart": _SHORT, "T5": _HEADS}
_PATCHES = {"image_shape": (16, 16, 3), "patch_size": 4, "num_layers": 2, "num_heads": 4, "hidden_dim": 32}
_IMAGES: Mapping[str, HubSettings] = {
    "ViT": {**_PATCHES, "patch_size": (4, 4), "mlp_dim": 64},
    "DeiT": {**_PATCHES, "intermediate_dim": 64},
    "DINOV2": {**_PATCHES, "intermediate_dim": 64, "position_embedding_shape": (16, 16, 3)},
    "ResNet": {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [3],
        "stackwise_num_filters": [64, 64],
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_strides": [1, 2],
        "block_type": "basic_block",
        "image_shape": (16, 16, 3),
    },
    "VGG": {"stackwise_num_repeats": [1, 1], "stackwise_num_filters": [8, 16], "image_shape": (16, 16, 3)},
    "DenseNet": {
        "stackwise_num_repeats": [2, 2],
        "compression_ratio": 0.5,
        "growth_rate": 8,
        "image_shape": (32, 32, 3),
    },
    "CSPNet": {
        "stem_filters": 8,
        "stem_kernel_size": 3,
        "stem_strides": 1,
        "stackwise_depth": [1, 1],
        "stackwise_strides": [2, 2],
        "stackwise_num_filters": [8, 16],
        "block_type": "dark_block",
        "stage_type": "dark",
        "image_shape": (16, 16, 3),
    },
    "SwinTransformer": {
        "image_shape": (16, 16, 3),
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": 2,
        "patch_size": 2,
        "drop_path": 0.0,
    },
    "MiT": {
        "layerwise_depths": [1, 1],
        "num_layers": 2,
        "layerwise_num_heads": [1, 2],
        "layerwise_sr_ratios": [2, 1],
        "max_drop_path_rate": 0.0,
        "layerwise_patch_sizes": [3, 3],
        "layerwise_strides": [2, 2],
        "image_shape": (16, 16, 3),
        "hidden_dims": [8, 16],
    },
}


def _ones() -> Any:
    import jax.numpy as jnp

    return jnp.ones((8, 16), "int32")


def _texts() -> dict[str, Any]:
    """Returns 8 texts of 16 tokens out of 64, under all names that a backbone may use."""
    tokens, ones = integers(64, 8, 16), _ones()
    return {
        "token_ids": tokens,
        "padding_mask": ones,
        "segment_ids": 0 * ones,
        "encoder_token_ids": tokens,
        "encoder_padding_mask": ones,
        "decoder_token_ids": tokens,
        "decoder_padding_mask": ones,
    }


def _made(name: str, settings: HubSettings) -> Callable[[], LibraryProgram]:
    def made() -> LibraryProgram:
        import keras_hub

        backbone = getattr(keras_hub.models, f"{name}Backbone")(**settings)
        if name in _IMAGES:
            return trained(backbone, normal(8, *settings["image_shape"]))
        texts = _texts()
        return trained(backbone, {k.name: texts[k.name] for k in backbone.inputs})

    return made


for _models in (_DECODERS, _ENCODERS, _BOTH, _IMAGES):
    PROGRAMS.update({f"hub.{name.lower()}": _made(name, settings) for name, settings in _models.items()})
