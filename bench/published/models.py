"""The model of a published run, from its public shape and the zoo's parts: a GPT (two matrices per feed-forward), a
Llama (three, gated), or a mixture of experts with uniform routing."""

from __future__ import annotations

from functools import cache
from typing import Any

from bench.published.megatron_gpt import gpt
from bench.published.mixtures import DENSE, LATENT, Latent, mixture
from bench.published.rows import PublishedRow
from pase.errors import Infeasible
from pase.frontends.jax.frontend import trace
from pase.ir import Graph, named, simplify
from pase.zoo import layers as zoo_layers
from pase.zoo import llama, transformers

__all__ = ["graph_of", "head_width", "is_gated", "padded"]

_UNGATED = (
    "gpt ",
    "gpt-2",
    "gpt-3",
    "gpt-j",
    "gpt-neo",
    "mpt",
    "nemotron",
    "opt",
    "bloom",
    "falcon",
    "pythia",
    "starcoder",
    "megatron",
    "turing",
    "mt-nlg",
    "maxtext 22b",
    "maxtext 52b",
)
"""Prefixes of the names of models whose feed-forward has two matrices, from their public configs."""
_HEAD_DIM = {"qwen3": 128, "gpt-oss": 64, "maxtext 22b": 256, "maxtext 52b": 256, "maxtext": 128}
"""Width of a head if it is not hidden / heads, from the models' public configs (config.json) and MaxText's scripts."""


def padded(vocab: int, tensor: int) -> int:
    """Returns the size padded to a multiple of 128 x tensor parallelism, as Megatron does.

    >>> padded(50257, 8)
    51200
    """
    return -(-vocab // (128 * tensor)) * 128 * tensor


def head_width(row: PublishedRow) -> int:
    """Returns the elements of a head: hidden / heads, or the value of the model's public configuration."""
    name = (row.text("model") or "").lower()
    default = (row.whole("hidden") or 0) // (row.whole("heads") or 1)
    return next((v for k, v in _HEAD_DIM.items() if name.startswith(k)), default)


def is_gated(row: PublishedRow) -> bool:
    """Returns whether the feed-forward has three matrices."""
    name = (row.text("model") or "").lower()
    return not name.startswith(_UNGATED)


def _dense_layers(row: PublishedRow) -> tuple[int, int]:
    """Returns (how many first layers of a mixture have no experts, the width of their feed-forward)."""
    name = (row.text("model") or "").lower()
    many, wide = next((told for k, told in DENSE.items() if name.startswith(k)), (0, 0))
    told = row.whole("dense_layers")
    return (many if told is None else told), wide


def graph_of(row: PublishedRow, batch: int, tensor: int, *, written_out: bool = False) -> Graph:
    """Returns the simplified graph of the row's model for a batch. written_out: use Megatron's GPT of 2021, with
    dropout and scores in memory. Raises Infeasible with the reason if the shape is unknown."""
    name = (row.text("model") or "").lower()
    latent = next((ranks for k, ranks in LATENT.items() if name.startswith(k)), None)
    if latent is None and "deepseek" in name:
        raise Infeasible(f"'{name}': the ranks of its latent attention are not known here")
    sizes = {k: row.whole(k) for k in ("layers", "hidden", "heads", "seq")}
    for k, v in sizes.items():
        if not v:
            raise Infeasible(f"{k} is not told")
    d, heads = sizes["hidden"] or 0, sizes["heads"] or 0
    kv = row.whole("kv_heads") or heads
    if d % heads or heads % kv:
        raise Infeasible(f"{heads} heads and {kv} key-value heads do not divide a width of {d}")
    head_dim = head_width(row)
    vocab = padded(row.vocab or 51200, tensor)
    common = {"batch": batch, "seq": sizes["seq"], "layers": sizes["layers"], "vocab": vocab}
    ffn = row.whole("ffn") or (0 if row.whole("experts") else 4 * d)
    if latent is not None or (row.whole("experts") or 0) > 1:
        return _mixture(row, common, d, heads, head_dim, latent)
    gated = is_gated(row)
    if not gated and written_out and ffn == 4 * d:
        return _megatron(**common, d=d, heads=heads)
    if not gated and ffn == 4 * d and head_dim * heads == d and kv == heads:
        return _traced("gpt", **common, d=d, heads=heads, context=sizes["seq"])
    # An ungated model costs as much as a llama with two matrices of that size in place of three.
    wide = ffn if gated else ffn * 2 // 3
    return _traced(
        "llama", **common, d=d, ff=wide, kv_heads=kv, group=heads // kv, head_dim=head_dim, theta=1e4
    )


def _mixture(
    row: PublishedRow, common: dict[str, Any], d: int, heads: int, head_dim: int, latent: Latent | None
) -> Graph:
    ff, experts, chosen = row.whole("ffn_expert"), row.whole("experts"), row.whole("top_k")
    if not (ff and experts and chosen):
        raise Infeasible("the experts' shape is not told")
    kv = row.whole("kv_heads") or heads
    return _traced(
        "mixture",
        **common,
        d=d,
        ff=ff,
        experts=experts,
        chosen=chosen,
        kv_heads=kv,
        group=heads // kv,
        head_dim=head_dim,
        latent=latent,
        dense=_dense_layers(row),
    )


@cache
def _megatron(**shape: Any) -> Graph:
    return named(simplify(trace(*gpt(**shape)).graph))


@cache
def _traced(kind: str, **shape: Any) -> Graph:
    if kind == "mixture":
        built = mixture(**shape)
    else:
        how = {"dtype": "bfloat16", "attention": "fused", "scan": 1, "remat": 0}
        built = (transformers.gpt if kind == "gpt" else llama.llama)(**shape, **how)
    return named(
        simplify(trace(built.loss_fn, zoo_layers.shapes(built.params), zoo_layers.shapes(built.batch)).graph)
    )
