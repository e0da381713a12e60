"""Attention for which a JAX program requests a fused kernel, kept as one op.

While a model is traced, cuDNN's implementation of ``jax.nn.dot_product_attention`` is replaced by XLA's in a jitted
function whose name says so (`named`). This makes it traceable without a GPU. Attention without a kernel is read and
priced as written, with its scores in memory. XLA's own implementation, which is JAX's default, is two products and a
softmax on every device.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pase.frontends.jax.types import Eqn
from pase.frontends.jax.versions import attention_by, jaxprs_inside, static_arguments
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes

__all__ = ["Asked", "AttentionCall", "call_of", "is_differentiated", "named"]

Asked = Literal["cudnn", "flash", "fused"]
"""Whose kernel a program requests: cuDNN's, Pallas' flash attention for TPUs, or that of the device, if it has one
(the zoo's models)."""

_NAME = re.compile(r"(?P<causal>causal_)?(?P<asked>cudnn|fused)_attention_scaled_(?P<scale>\S+)")
_FLASH = "flash_attention"
"""The name of Pallas' kernel for TPUs, whose arrays have heads before positions."""
_lock = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One call of attention in a jaxpr.

    order: the order of batch, positions, heads and width in queries, keys, values and result.
    causal: whether a query ignores the keys after its own position.
    scale: the factor on the scores.
    asked: whose kernel the program requests.
    blocks: the block sizes of Pallas' kernel, in its own form.
    """

    order: tuple[int, int, int, int] = (0, 1, 2, 3)
    causal: bool
    scale: float
    asked: Asked
    blocks: BlockSizes | None = None

    @property
    def name(self) -> str:
        """The name of a jitted function that does this. The name is all that JAX keeps of a call in a jaxpr."""
        return f"{'causal_' if self.causal else ''}{self.asked}_attention_scaled_{self.scale!r}"


def call_of(eqn: Eqn) -> AttentionCall | None:
    """The attention that an equation calls, or None if it is no such call on (batch, positions, heads, width) arrays.

    A bias or a mask may follow queries, keys and values. Calls with lengths or batched by ``vmap`` are not recognized.
    """
    name = _called(eqn)
    if name is None or len(eqn.outvars) != 1:
        return None
    shapes = [v.aval.shape for v in eqn.invars]
    if len(shapes) not in (3, 4) or any(len(s) != 4 for s in shapes):
        return None
    if name == _FLASH:
        return _flash(eqn)
    if (words := _NAME.fullmatch(name)) is None:
        return None
    asked: Asked = "cudnn" if words["asked"] == "cudnn" else "fused"
    return AttentionCall(causal=words["causal"] is not None, scale=float(words["scale"]), asked=asked)


def is_differentiated(eqns: Iterable[Eqn]) -> bool:
    """Whether the program itself differentiates an attention that it calls by name.

    JAX then writes the attention out, forward and backward, as products and a softmax in functions of the same name
    with other results.
    """
    for eqn in eqns:
        name = _called(eqn)
        if name is not None and _NAME.fullmatch(name):
            if call_of(eqn) is None:
                return True
        elif any(is_differentiated(inner.eqns) for inner in jaxprs_inside(eqn)):
            return True
    return False


def _called(eqn: Eqn) -> str | None:
    """The name of the jitted function that an equation calls; None for other equations."""
    return eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None


def _flash(eqn: Eqn) -> AttentionCall | None:
    """Pallas' flash attention. Its settings are stored only with its derivative rule."""
    inner = eqn.params["jaxpr"].eqns
    given = static_arguments(inner[-1]) if inner and inner[-1].primitive.name == "custom_vjp_call" else None
    if given is None or len(given) != 5:
        return None
    _, causal, scale, blocks, _ = given
    return AttentionCall(order=(0, 2, 1, 3), causal=causal, scale=float(scale), asked="flash", blocks=blocks)


@contextmanager
def named() -> Iterator[None]:
    """Gives cuDNN's attention a name while this thread traces a model; other threads are not affected."""
    thread = threading.get_ident()

    def stand_in(theirs: Callable[..., Array], xla: Callable[..., Array]) -> _Named:
        return _Named(theirs=theirs, plain=xla, thread=thread)

    with _lock, attention_by(stand_in, __file__):
        yield


@dataclass(frozen=True, kw_only=True)
class _Named:
    """Replaces cuDNN's implementation. plain: XLA's implementation, which can be traced for any device."""

    theirs: Callable[..., Array]
    plain: Callable[..., Array]
    thread: int

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        bias: Array | None,
        mask: Array | None,
        *lengths: Array | None,
        **settings: Tree,
    ) -> Array:
        special = settings.get("return_residual") or settings.get("dropout_rate")
        if threading.get_ident() != self.thread or special:
            return self.theirs(q, k, v, bias, mask, *lengths, **settings)
        window = settings.get("sliding_window_length")
        as_xlas = {
            "is_causal": "CAUSAL" in settings["mask_type"].name,
            "scale": settings["scale"],
            "q_seqlen": lengths[0],
            "kv_seqlen": lengths[1],
            "local_window_size": None if window is None else (window - 1, 0),
        }
        return _jitted(self.plain, (q, k, v), (bias, mask), as_xlas)


def _jitted(
    plain: Callable[..., Array],
    qkv: Sequence[Array],
    extra: Sequence[Array | None],
    settings: dict[str, Tree],
) -> Array:
    """A call of ``plain`` under a name that describes it. Calls with lengths, windows, or scales that are not numbers
    have no such name and stay inlined."""
    import jax

    def attention(qkv: Sequence[Array], extra: Sequence[Array | None]) -> Array:
        return plain(*qkv, *extra, **settings)

    unnamed = any(settings.get(name) is not None for name in ("q_seqlen", "kv_seqlen", "local_window_size"))
    if unnamed or isinstance(settings["scale"], jax.Array):
        return attention(qkv, extra)
    call = AttentionCall(causal=bool(settings["is_causal"]), scale=float(settings["scale"]), asked="cudnn")
    attention.__name__ = call.name
    return jax.jit(attention)(qkv, extra)
