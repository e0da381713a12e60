"""Language models from the libraries that train or release them: Gemma, Griffin, Tunix, Mamba 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

from bench.programs.catalog import PROGRAMS, LibraryProgram, integers, program

_VOCABULARY, _TEXTS, _LENGTH = 64, 8, 16


def _key() -> Any:
    import jax

    return jax.random.key(0)


def _tokens() -> Any:
    return integers(_VOCABULARY, _TEXTS, _LENGTH)


def _next_token(logits: Any, tokens: Any) -> Any:
    """Returns the mean cross entropy of each next token."""
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1].astype("float32"), tokens[:, 1:]
    ).mean()


def _causal() -> Any:
    import jax.numpy as jnp

    return jnp.tril(jnp.ones((_TEXTS, _LENGTH, _LENGTH), bool))


def _places() -> Any:
    import jax.numpy as jnp

    return jnp.broadcast_to(jnp.arange(_LENGTH), (_TEXTS, _LENGTH))


_GEMMAS: Mapping[str, Mapping[str, Any]] = {
    "gemma_2": {"final_logit_softcap": 30.0, "attn_logits_soft_cap": 50.0},
    "gemma_3": {
        "final_logit_softcap": None,
        "use_qk_norm": True,
        "transpose_gating_einsum": True,
        "global_base_frequency": 1_000_000,
    },
}


def _gemma(settings: Mapping[str, Any]) -> Callable[[], LibraryProgram]:
    """Returns a program: a local and a global layer of DeepMind's own code."""

    def made() -> LibraryProgram:
        import jax
        from gemma import gm
        from gemma.gm.nn import _config, _modules

        config = _config.TransformerConfig(
            num_embed=_VOCABULARY,
            embed_dim=32,
            hidden_dim=64,
            num_heads=4,
            head_dim=8,
            num_kv_heads=2,
            use_post_attn_norm=True,
            use_post_ffw_norm=True,
            sliding_window_size=4,
            vision_encoder=None,
            attention_types=(_modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL),
            **settings,
        )
        model = gm.nn.Transformer(config=config, dtype="float32")
        tokens = _tokens()
        params = jax.jit(model.init)(_key(), tokens)["params"]
        return (
            lambda p, tokens: _next_token(model.apply({"params": p}, tokens).logits, tokens),
            params,
            tokens,
        )

    return made


PROGRAMS.update({f"language.{name}": _gemma(settings) for name, settings in _GEMMAS.items()})


@program
def griffin() -> LibraryProgram:
    """RecurrentGemma: gated linear recurrences and local attention."""
    import jax
    import typeguard

    with patch.object(
        typeguard, "typechecked", lambda f: f
    ):  # Gemma needs a newer version, which cannot read its types
        from recurrentgemma import common
        from recurrentgemma.jax import griffin

    kinds = common.TemporalBlockType
    config = common.GriffinConfig(
        vocab_size=_VOCABULARY,
        width=32,
        mlp_expanded_width=64,
        num_heads=4,
        block_types=(kinds.RECURRENT, kinds.ATTENTION),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=8,
        logits_soft_cap=30.0,
    )
    model, tokens, places = griffin.Griffin(config), _tokens(), _places()
    params = jax.jit(model.init)(_key(), tokens, places)["params"]

    def loss(p: Any, tokens: Any, places: Any) -> Any:
        return _next_token(model.apply({"params": p}, tokens, places)[0], tokens)

    return loss, params, tokens, places


_TUNIX: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama3": ("Llama3", {}),
    "qwen2": ("Qwen2", {"use_tied_embedding": True}),
    "qwen3": ("Qwen3", {}),
}


def _tunix(name: str, model: str, settings: Mapping[str, Any]) -> Callable[[], LibraryProgram]:
    """Returns a program of a model of Google's Tunix, in nnx."""

    def made() -> LibraryProgram:
        import importlib

        from flax import nnx

        module = importlib.import_module(f"tunix.models.{name}.model")
        config = module.ModelConfig(
            num_layers=2,
            vocab_size=_VOCABULARY,
            embed_dim=32,
            hidden_dim=64,
            num_heads=4,
            head_dim=8,
            num_kv_heads=2,
            rope_theta=10_000,
            norm_eps=1e-6,
            **settings,
        )
        graphdef, state = nnx.split(getattr(module, model)(config, rngs=nnx.Rngs(0)))

        def loss(state: Any, tokens: Any, places: Any, mask: Any) -> Any:
            logits, _ = nnx.merge(graphdef, state, copy=True)(tokens, places, None, mask)
            return _next_token(logits, tokens)

        return loss, state, _tokens(), _places(), _causal()

    return made


PROGRAMS.update({f"language.tunix_{name}": _tunix(name, *of) for name, of in _TUNIX.items()})


@program
def mamba2() -> LibraryProgram:
    import mamba2_jax
    from flax import nnx

    config = mamba2_jax.Mamba2Config(
        vocab_size=_VOCABULARY, hidden_size=32, state_size=8, head_dim=8, chunk_size=8, num_hidden_layers=2
    )
    graphdef, state = nnx.split(mamba2_jax.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)))

    def loss(state: Any, tokens: Any) -> Any:
        return _next_token(nnx.merge(graphdef, state, copy=True)(tokens)["logits"], tokens)

    return loss, state, _tokens()
