"""Equimo's vision models, Equinox modules, in small sizes: attention, convolution and state-space mixers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.programs.catalog import PROGRAMS, LibraryProgram, normal

_VIT = {
    "img_size": 16,
    "in_channels": 3,
    "dim": 32,
    "patch_size": 4,
    "num_heads": [4],
    "depths": [2],
    "num_classes": 8,
    "reg_tokens": 0,
}
_STAGED = {"img_size": 16, "in_channels": 3, "patch_size": 2, "num_heads": [2, 4], "num_classes": 8}
_MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "vit": ("VisionTransformer", _VIT),
    "vit_registers_rope": (
        "VisionTransformer",
        {
            **_VIT,
            "num_heads": 4,
            "reg_tokens": 4,
            "use_global_pos_embed": False,
            "use_local_pos_embed": True,
            "init_values": 1e-2,
        },
    ),
    "vit_swiglu": (
        "VisionTransformer",
        {**_VIT, "ffn_layer": "swiglu", "global_pool": "token", "qk_norm": True},
    ),
    "convnext": ("ConvNeXt", {"depths": [1, 1], "dims": [16, 32], "num_classes": 8}),
    "mlla": ("Mlla", {**_STAGED, "patch_size": 4, "dim": 16, "depths": [1, 1]}),
    "vssd": (
        "Vssd",
        {
            **_STAGED,
            "dim": 16,
            "d_state": 8,
            "depths": [1, 1],
            "attentions_layers": ("mamba2mixer", "attention"),
        },
    ),
    "lowformer": (
        "LowFormer",
        {
            "in_channels": 3,
            "widths": [8, 16, 32],
            "depths": [1, 1, 1],
            "att_strides": [2, 2, 1],
            "block_types": ["conv", "conv", "attention"],
            "attention_type": "softmax",
            "num_classes": 8,
        },
    ),
    "reduceformer": (
        "ReduceFormer",
        {
            "in_channels": 3,
            "widths": [8, 16, 32],
            "depths": [1, 1, 1],
            "block_types": ["conv", "conv", "attention"],
            "head_dim": 8,
            "num_classes": 8,
        },
    ),
}


def _made(name: str, settings: Mapping[str, Any]) -> Callable[[], LibraryProgram]:
    def made() -> LibraryProgram:
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        from equimo import models

        model = eqx.filter_jit(lambda key: getattr(models, name)(**settings, key=key))(jax.random.key(0))

        def loss(model: Any, images: Any) -> Any:
            keys = jax.random.split(jax.random.key(1), images.shape[0])
            return jnp.mean(jax.vmap(lambda x, key: model(x, key))(images, keys) ** 2)

        return loss, model, normal(8, 3, 16, 16)

    return made


PROGRAMS.update({f"equimo.{name}": _made(*of) for name, of in _MODELS.items()})
