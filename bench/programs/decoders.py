"""Released language models as Hugging Face's Flax code builds them, in small sizes.

Each has another architecture: rotary or learned positions, ALiBi, grouped queries, sliding windows, two stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.programs.catalog import PROGRAMS, LibraryProgram, integers

_SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_DECODERS: Mapping[str, Mapping[str, Any]] = {
    "GPT2": {"vocab_size": 128, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "GPTJ": {"vocab_size": 128, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "GPTNeo": {
        "vocab_size": 128,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 32,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "Llama": _GROUPED,
    "Mistral": {**_GROUPED, "sliding_window": 8},
    "Gemma": {**_GROUPED, "head_dim": 8},
    "OPT": {**_SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "Bloom": {"vocab_size": 128, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "XGLM": {
        "vocab_size": 128,
        "d_model": 32,
        "ffn_dim": 64,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 32,
    },
}
_ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "Bert": _SMALL,
    "Roberta": {**_SMALL, "max_position_embeddings": 40},
    "Electra": {**_SMALL, "embedding_size": 32},
    "Albert": {**_SMALL, "embedding_size": 16},
    "DistilBert": {
        "vocab_size": 128,
        "dim": 32,
        "hidden_dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 32,
    },
    "RoFormer": {**_SMALL, "embedding_size": 32},
}
_BOTH: Mapping[str, Mapping[str, Any]] = {
    "Bart": {
        "vocab_size": 128,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "max_position_embeddings": 32,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    }
}


def _predicts(name: str, head: str, config: Mapping[str, Any]) -> Callable[[], LibraryProgram]:
    """Returns a program: the mean cross entropy of the next token, or of the token itself, in 8 texts of 16 tokens."""

    def made() -> LibraryProgram:
        import jax
        import optax
        import transformers

        settings = getattr(transformers, f"{name}Config")(**config)
        model = getattr(transformers, f"Flax{name}LMHeadModel" if name == "GPT2" else f"Flax{name}For{head}")(
            settings, input_shape=(1, 16), _do_init=False
        )
        params = jax.jit(model.init_weights, static_argnums=1)(jax.random.key(0), (1, 16))
        ahead = int(head == "CausalLM")

        def loss(params: Any, tokens: Any) -> Any:
            inside = {"decoder_input_ids": tokens} if head == "ConditionalGeneration" else {}
            logits = model(tokens, params=params, **inside).logits
            return optax.softmax_cross_entropy_with_integer_labels(
                logits[:, : tokens.shape[1] - ahead], tokens[:, ahead:]
            ).mean()

        return loss, params, 3 + integers(120, 8, 16)

    return made


for _heads, _models in (("CausalLM", _DECODERS), ("MaskedLM", _ENCODERS), ("ConditionalGeneration", _BOTH)):
    for _name, _config in _models.items():
        PROGRAMS[f"decoders.{_name.lower()}"] = _predicts(_name, _heads, _config)
