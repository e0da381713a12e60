"""Output on a terminal: lines and tables, in which a name from a file is printed as text, whatever it contains."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from pase.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["UNWRAPPED", "console", "printable", "text_of"]

UNWRAPPED = 2000
"""The width, in columns, of output that is not wrapped: longer than any line."""


def console(*, err: bool = False, **how: Any) -> Console:
    """A rich Console on standard output or error. It prints brackets literally and never prints control characters.

    how: options of rich's own Console. If the output is no terminal, and neither ``how`` nor COLUMNS gives a width,
        nothing is wrapped.
    """
    made = _kind()(stderr=err, markup=False, highlight=False, emoji=False, **how)
    if not (made.is_terminal or "width" in how or "COLUMNS" in os.environ):
        made.width = UNWRAPPED
    return made


def text_of(parts: Iterable[Any], width: int = 80) -> str:
    """Return tables and lines as text of at most this many columns, without a last line break."""
    text = io.StringIO()
    out = console(file=text, width=width)
    for part in parts:
        out.print(part, highlight=False)
    return text.getvalue().rstrip()


@cache
def _kind() -> type[Console]:
    """The class of consoles. rich is imported only when something is printed."""
    from rich.console import Console
    from rich.text import Text

    class Terminal(Console):
        """A console that makes every string printable, in a line or in a table."""

        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(printable(text), **how)

        def print(self, *objects: Any, **how: Any) -> None:
            """Prints as rich does. Into a file or a pipe, it omits the blanks that pad a table's last column."""
            if self.is_terminal or self.record:
                super().print(*objects, **how)
                return
            with self.capture() as printed:
                super().print(*objects, **how)
            self.file.write(re.sub(r" +$", "", printed.get(), flags=re.MULTILINE))

    return Terminal
