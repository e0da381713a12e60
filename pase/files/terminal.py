"""What people read on a terminal: lines and tables, in which a name from a file is text, whatever it holds."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from pase.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["UNWRAPPED", "console", "printable"]

UNWRAPPED = 2000
"""Columns of what is not wrapped: more than any line has."""


def console(*, err: bool = False, **how: Any) -> Console:
    """A rich Console on standard output or error. It prints brackets literally and never prints control characters.

    Where it is no terminal, and neither ``how`` (as rich's own Console takes it) nor COLUMNS says how wide to print,
    nothing is wrapped.
    """
    made = _kind()(stderr=err, markup=False, highlight=False, emoji=False, **how)
    if not (made.is_terminal or "width" in how or "COLUMNS" in os.environ):
        made.width = UNWRAPPED
    return made


@cache
def _kind() -> type[Console]:
    """rich is imported when something is printed."""
    from rich.console import Console
    from rich.text import Text

    class Terminal(Console):
        """Every string that is printed, in a line or in a table, comes through here."""

        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(printable(text), **how)

        def print(self, *objects: Any, **how: Any) -> None:
            """As rich prints; into a file or a pipe without the blanks that fill a table's last column."""
            if self.is_terminal or self.record:
                super().print(*objects, **how)
                return
            with self.capture() as printed:
                super().print(*objects, **how)
            self.file.write(re.sub(r" +$", "", printed.get(), flags=re.MULTILINE))

    return Terminal
