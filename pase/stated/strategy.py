"""A strategy as users state it: ``fsdp=32,tp=8,sp,remat=full``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pase.errors import PaseError, did_you_mean
from pase.ir.precision import FP4, FP8

__all__ = ["PRODUCTS_IN", "Precision", "Remat", "ScheduleName", "Strategy", "parse"]

Remat = Literal["none", "selective", "full"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved"]
Precision = Literal["bf16", "fp8", "nvfp4"]


PRODUCTS_IN: Mapping[Precision, str | None] = {"bf16": None, "fp8": FP8, "nvfp4": FP4}
"""The dtype of products with weights; None: the model's own."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The degree of each kind of parallelism, and how the step is run.

    data: replicas of the parameters.
    shard: ways over which parameters, their gradients or the optimizer's state are sharded (``zero``) inside each
        replica.
    tensor: ways over which heads, hidden units and vocabulary are sharded.
    sequence: whether activations between products are sharded over the tensor ways, too.
    context: ways over which the sequence is sharded.
    heads: whether context parallelism shards heads in place of positions during attention, which all-to-alls exchange
        before and after it (DeepSpeed-Ulysses, arXiv 2309.14509; Megatron's ``--cp-comm-type a2a``). Otherwise each
        rank keeps its queries, and keys and values are sent.
    expert: ways over which experts are sharded, among data x shard.
    pipeline: the number of stages.
    chunks: the number of chunks of layers per stage.
    micro: examples of a micro-batch on one data-parallel rank; None: all examples of the rank, or one if there are
        stages.
    offload: the number of blocks whose activations wait for backward in the host's memory.
    remat: what backward recomputes; None: what the model marks.
    asynchronous: whether collectives of tensor parallelism overlap with the products that they feed, chunk by chunk.
    """

    data: int = 1
    shard: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    heads: bool = False
    expert: int = 1
    pipeline: int = 1
    chunks: int = 1
    micro: int | None = None
    offload: int = 0
    remat: Remat | None = None
    schedule: ScheduleName | None = None
    precision: Precision = "bf16"
    asynchronous: bool = False

    @property
    def ranks(self) -> int:
        """Data-parallel ranks, each of which has its own examples."""
        return self.data * self.shard

    @property
    def devices(self) -> int:
        return self.ranks * self.tensor * self.context * self.pipeline

    def __str__(self) -> str:
        """The text that ``parse`` reads."""
        names = {v: k for k, v in _DEGREES.items()}
        parts = [f"{names[f]}={getattr(self, f)}" for f in names if getattr(self, f) != _UNSTATED.get(f, 1)]
        parts += [f"zero={self.zero}"] if self.zero != (3 if self.shard > 1 else 0) else []
        parts += [word for word, f in _FLAGS.items() if getattr(self, f)]
        parts += [f"{k}={getattr(self, k)}" for k in ("remat", "schedule") if getattr(self, k) is not None]
        return (
            ",".join(parts + ([f"precision={self.precision}"] if self.precision != "bf16" else [])) or "dp=1"
        )


_DEGREES = {
    "dp": "data",
    "fsdp": "shard",
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "pp": "pipeline",
    "vp": "chunks",
    "micro": "micro",
    "offload": "offload",
}
_UNSTATED: Mapping[str, int | None] = {"micro": None, "offload": 0}
"""The values of degrees that are not stated, if they are not 1."""
_FLAGS = {"sp": "sequence", "async": "asynchronous", "a2a": "heads"}
_WORDS: Mapping[str, tuple[Any, ...]] = {
    "remat": get_args(Remat),
    "schedule": get_args(ScheduleName),
    "precision": get_args(Precision),
}
_KNOWN = f"{', '.join(f'{d}=N' for d in _DEGREES)}, zero=0..3, {', '.join(_FLAGS)}, " + ", ".join(
    f"{k}={'|'.join(v)}" for k, v in _WORDS.items()
)


def parse(text: str, devices: int) -> Strategy:
    """Read a stated strategy for this many devices. Devices left over are data parallel. Raises PaseError if invalid.

    ``zero=1`` and ``zero=2`` shard optimizer state (and gradients) over dp if no fsdp is stated.

    >>> s = parse("fsdp=4,tp=8,remat=full", 64)
    >>> s.data, s.shard, s.zero, str(s)
    (2, 4, 3, 'dp=2,fsdp=4,tp=8,remat=full')
    """
    given: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = part.partition("=")
        name = _FLAGS.get(key) or _DEGREES.get(key) or key
        if name in given:
            raise PaseError(f"'{key}' occurs twice", where=f"'{text}'", fix="leave out one of them")
        given[name] = _value(key, value if equals else None, text)
    zero = given.pop("zero", None)
    if zero is not None and zero > 0 and "shard" not in given and "data" in given:
        given["shard"] = given.pop("data")
    strategy = Strategy(**given)
    if "data" not in given:
        rest = strategy.devices
        if devices % rest:
            raise PaseError(
                f"it takes groups of {rest} devices, which do not divide {devices}",
                where=f"'{text}'",
                fix="use degrees whose product divides the number of devices",
            )
        wide = devices // rest
        if zero and strategy.shard == 1:
            strategy = replace(strategy, shard=wide)
        else:
            strategy = replace(strategy, data=wide)
    strategy = replace(strategy, zero=(3 if strategy.shard > 1 else 0) if zero is None else zero)
    _check(strategy, text, devices)
    return strategy


def _value(key: str, value: str | None, text: str) -> Any:
    if key in _FLAGS:
        if value not in (None, "1", "0"):
            raise PaseError(f"'{key}' takes no value", where=f"'{text}'", fix=f"write {key} alone")
        return value != "0"
    if key in _WORDS:
        if value not in _WORDS[key]:
            raise PaseError(
                f"'{key}' must be one of {', '.join(_WORDS[key])}, got {value!r}", where=f"'{text}'"
            )
        return value
    if key not in _DEGREES and key != "zero":
        hint = did_you_mean(key, [*_DEGREES, *_FLAGS, *_WORDS, "zero"])
        raise PaseError(f"'{key}' is not known{hint}", where=f"'{text}'", fix=f"state a strategy by {_KNOWN}")
    if value is None or not (value.isascii() and value.isdigit() and len(value) < 10):
        raise PaseError(f"'{key}' needs a whole number", where=f"'{text}'", fix=f"write it like {key}=8")
    low, high = (0, 3) if key == "zero" else (1, 10**9)
    if not low <= int(value) <= high:
        raise PaseError(f"'{key}={value}' is out of range, {low} to {high}", where=f"'{text}'")
    return int(value)


def _check(s: Strategy, text: str, devices: int) -> None:
    if s.devices != devices:
        raise PaseError(
            f"it is for {s.devices} devices, not {devices}",
            where=f"'{text}'",
            fix="leave out dp, or change the number of devices",
        )
    if s.zero and s.shard == 1 and s.ranks > 1:
        raise PaseError(
            f"zero={s.zero} needs ranks to split over",
            where=f"'{text}'",
            fix="add fsdp=N, or dp=N without fsdp",
        )
    if s.chunks > 1 and (s.pipeline == 1 or s.schedule in ("gpipe", "1f1b")):
        raise PaseError(
            f"vp={s.chunks} needs pp=N and the interleaved schedule", where=f"'{text}'", fix="add pp=N"
        )
    if s.asynchronous and not (s.sequence and s.tensor > 1):
        raise PaseError(
            "async needs tp=N and sp, because it runs gathers and scatters during products, not sums",
            where=f"'{text}'",
            fix="add tp=N,sp",
        )
    if s.offload and s.pipeline > 1:
        raise PaseError(
            "offload needs a model without stages, in which a stage's micro-batches would share the host's link",
            where=f"'{text}'",
            fix="leave out pp or offload",
        )
    if s.heads and s.context == 1:
        raise PaseError(
            "a2a needs cp=N, because it exchanges the positions of context parallelism for heads",
            where=f"'{text}'",
            fix="add cp=N",
        )
    if math.gcd(s.expert, s.ranks) != s.expert:
        raise PaseError(
            f"ep={s.expert} does not divide the {s.ranks} data-parallel ranks",
            where=f"'{text}'",
            fix=f"use a divisor of {s.ranks}",
        )
