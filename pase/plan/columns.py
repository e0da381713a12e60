"""The tables that the commands print: no frame, and a bold header line."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["columns"]


def columns(
    *names: str, left: Container[str] = (), overflow: Literal["ellipsis", "fold"] = "ellipsis"
) -> Table:
    """Return a table with these columns. Those in ``left`` hold text; the others hold numbers, right-aligned."""
    from rich.table import Table

    out = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        out.add_column(name, justify="left" if name in left else "right", overflow=overflow)
    return out
