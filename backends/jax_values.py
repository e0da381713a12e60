"""Values on one device, which a walk over a jaxpr passes from equation to equation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pase.errors import PaseError
from pase.local.types import Layout

__all__ = ["Cache", "DeviceValue", "NotByHand", "packed", "unpacked"]

Cache = dict[int, Any]
"""Results of transfers so far in the body of this loop, branch or rematerialised region: number -> array."""


class NotByHand(PaseError):
    """A program that cannot be lowered by hand. why: which equation cannot, and for what reason."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}. Use lowering='annotated', which leaves it to XLA")
        self.why = why


@dataclass(frozen=True, kw_only=True)
class DeviceValue:
    """A value on one device. tensor: its name in the traced graph, None for a number.

    layout: None if all devices hold the whole value, which does not depend on data. shadow: the array that receives its
    gradient, if the gradient has another layout.
    """

    array: Any
    tensor: str | None = None
    layout: Layout | None = None
    shadow: Any = None


def packed(values: Sequence[DeviceValue]) -> list[Any]:
    """Their arrays, as a pytree."""
    return [(h.array, h.shadow) for h in values]


def unpacked(values: Sequence[DeviceValue], arrays: Sequence[Any]) -> list[DeviceValue]:
    """The values with these arrays."""
    return [replace(h, array=a, shadow=s) for h, (a, s) in zip(values, arrays, strict=True)]
