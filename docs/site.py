"""What the site says that stands in no page: the options of ``pase.compile`` and ``pase.compare``, each stated once in
``CompileOptions``. mkdocs.yml names this file as a hook."""

from __future__ import annotations

from dataclasses import MISSING, fields

from pase.compiler.options import CompileOptions

HERE = "<!-- options -->"


def on_page_markdown(markdown: str, **_: object) -> str:
    """The list of options, in the page that asks for it."""
    if HERE not in markdown:
        return markdown
    rows = []
    for f in fields(CompileOptions):
        default = "" if f.default is MISSING else f" (default `{f.default!r}`)"
        rows.append(f"- `{f.name}`{default}: {f.metadata['help']}")
    return markdown.replace(HERE, "\n".join(rows))


def on_page_content(html: str, **_: object) -> str:
    """Where a docstring stands for all options, where they are listed."""
    return html.replace("{options}", "<a href='#options'>Options</a>, each by keyword.")
