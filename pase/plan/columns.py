"""The tables that the program prints: no frame, a bold line of names."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["columns"]


def columns(
    *names: str, left: Container[str] = (), overflow: Literal["ellipsis", "fold"] = "ellipsis"
) -> Table:
    """A table of these columns; those named in ``left`` hold words, the others numbers, aligned to the right."""
    from rich.table import Table

    out = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        out.add_column(name, justify="left" if name in left else "right", overflow=overflow)
    return out
