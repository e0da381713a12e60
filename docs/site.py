"""What the site says that stands in no page: the options of ``pase.compile`` and ``pase.compare``, each stated once in
``CompileOptions``, and figures (``figures.py``). mkdocs.yml names this file as a hook."""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path

from pase.compiler.problem.options import CompileOptions

HERE = "<!-- options -->"
FIGURE = re.compile(r"^<!-- figure: ([\w-]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """The list of options, and figures, in the pages that ask for them."""
    markdown = FIGURE.sub(_figure, markdown)
    if HERE not in markdown:
        return markdown
    rows = []
    for f in fields(CompileOptions):
        default = "" if f.default is MISSING else f" (default `{f.default!r}`)"
        rows.append(f"- `{f.name}`{default}: {f.metadata['help']}")
    return markdown.replace(HERE, "\n".join(rows))


def _figure(found: re.Match[str]) -> str:
    """A hook is loaded as a file, without its folder on the path."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        from figures import drawn
    finally:
        sys.path.pop(0)
    return drawn(found[1])


def on_page_content(html: str, **_: object) -> str:
    """Where a docstring stands for all options, where they are listed."""
    return html.replace("{options}", "<a href='#options'>Options</a>, each by keyword.")
