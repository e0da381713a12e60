"""Attention that a JAX program asks for by name, kept as one op: ``jax.nn.dot_product_attention`` and fused kernels.

JAX inlines its own attention, so that nothing in the jaxpr says what the two products and the softmax between them
are. While a model is traced, both of JAX's implementations stand behind a jitted function whose name says it
(`named`); cuDNN's is then traceable without a GPU, too. A model that writes the products and the softmax itself is
read, and priced, as it stands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pase.frontends.jax_versions import attention_by

__all__ = ["CAUSAL", "WHOLE", "Call", "call_of", "named"]

WHOLE = "dot_product_attention"
CAUSAL = f"causal_{WHOLE}"
_FLASH = "flash_attention"
"""Pallas' kernel for TPUs: heads before positions."""
_lock = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of attention in a jaxpr.

    order: where batch, positions, heads and width stand in queries, keys, values and result.
    causal: a query sees no key behind its own position.
    """

    order: tuple[int, int, int, int]
    causal: bool


def call_of(eqn: Any) -> Call | None:
    """What an equation asks for, where it is a call of attention on (batch, positions, heads, width) arrays.

    A bias or a mask may follow queries, keys and values; lengths and batches by ``vmap`` are not read (None).
    """
    name = eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None
    if name not in (WHOLE, CAUSAL, _FLASH) or len(eqn.outvars) != 1:
        return None
    order = (0, 2, 1, 3) if name == _FLASH else (0, 1, 2, 3)
    shapes = [v.aval.shape for v in eqn.invars]
    if len(shapes) not in (3, 4) or any(len(s) != 4 for s in shapes):
        return None
    return Call(order=order, causal=name == CAUSAL or (name == _FLASH and _compares_positions(eqn)))


def _compares_positions(eqn: Any) -> bool:
    """Does the kernel compare positions of queries and keys? (Nothing outside it says whether it is causal.)"""
    return " iota" in str(eqn.params["jaxpr"])


@contextmanager
def named() -> Iterator[None]:
    """JAX's own attention behind a name while a model is traced in this thread; other threads are left alone.

    Where a version of JAX has no such functions, its attention is read as what it is made of.
    """
    thread = threading.get_ident()

    def stand_in(theirs: Callable[..., Any], xla: Callable[..., Any]) -> _Named:
        return _Named(theirs=theirs, plain=xla, thread=thread)

    with _lock, attention_by(stand_in, __file__):
        yield


@dataclass(frozen=True, kw_only=True)
class _Named:
    """Stands for one of JAX's implementations. plain: the one of XLA, which any device can be traced for."""

    theirs: Callable[..., Any]
    plain: Callable[..., Any]
    thread: int

    def __call__(self, q: Any, k: Any, v: Any, bias: Any, mask: Any, *lengths: Any, **settings: Any) -> Any:
        special = settings.get("return_residual") or settings.get("dropout_rate")
        if threading.get_ident() != self.thread or special:
            return self.theirs(q, k, v, bias, mask, *lengths, **settings)
        if "mask_type" in settings:  # cuDNN's words
            window = settings.get("sliding_window_length")
            settings = {
                "is_causal": "CAUSAL" in settings["mask_type"].name, "scale": settings["scale"],
                "q_seqlen": lengths[0], "kv_seqlen": lengths[1],
                "local_window_size": None if window is None else (window - 1, 0),
            }  # fmt: skip
        return _jitted(self.plain, (q, k, v), (bias, mask), settings)


def _jitted(plain: Callable[..., Any], qkv: Any, beside: Any, settings: dict[str, Any]) -> Any:
    """A call of ``plain`` under a name that says what it is; lengths and windows have none, and stay inlined."""
    import jax

    def attention(qkv: Any, beside: Any) -> Any:
        return plain(*qkv, *beside, **settings)

    if any(settings.get(name) is not None for name in ("q_seqlen", "kv_seqlen", "local_window_size")):
        return attention(qkv, beside)
    attention.__name__ = CAUSAL if settings["is_causal"] else WHOLE
    return jax.jit(attention)(qkv, beside)
