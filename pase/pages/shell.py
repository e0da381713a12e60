"""Assembles a page in one file: head, list of sections, content, style sheet and scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from typing import Literal

from pase.files.json_values import JsonObject

__all__ = ["Section", "Widget", "page"]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

Widget = Literal["timeline", "explorer", "tables"]
"""A script of this package that draws elements of the page."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page: its anchor, its title, and its body as HTML. on_paper: whether it is printed."""

    anchor: str
    title: str
    body: str
    on_paper: bool = True


def page(
    *,
    title: str,
    lead: str,
    sections: Sequence[Section],
    foot: str = "",
    widgets: Sequence[Widget] = (),
    data: JsonObject | None = None,
) -> str:
    """The page as text.

    title: plain text. lead, foot and the sections' bodies: HTML, in which text from files must already be escaped.
    widgets: the scripts that the page needs. data: what the widgets draw, as JSON.

    The page's Content-Security-Policy forbids it to load anything or to run any script but its own. Control characters
    are replaced, so that printing the page cannot control a terminal.
    """
    script = "\n".join(_asset(f"{name}.js") for name in ("common", *widgets))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    links = "".join(f"<li><a href='#{s.anchor}'>{escape(s.title)}</a>" for s in sections)
    text = "\n".join(
        [
            "<!doctype html>",
            "<html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<link rel='icon' href='data:,'><title>{escape(title)}</title>",
            f"<style>{_asset('page.css')}</style></head><body>",
            "<a class='skip' href='#main'>Skip to the content</a>",
            f"<header><h1>{escape(title)}</h1>"
            "<button type='button' id='theme' aria-label='Change between light and dark'>Dark</button></header>",
            f"<nav aria-label='Sections'><ul>{links}</ul></nav>",
            f"<main id='main'>{lead}",
            *(
                f"<section id='{s.anchor}'{'' if s.on_paper else ' class=screen'} aria-labelledby='{s.anchor}-title'>"
                f"<h2 id='{s.anchor}-title'>{escape(s.title)}</h2>{s.body}</section>"
                for s in sections
            ),
            f"</main><footer>{foot}</footer>",
            f"<script type='application/json' id='data'>{_json(data or {})}</script>",
            f"<script>{script}</script></body></html>",
            "",
        ]
    )
    return _CONTROL.sub("\ufffd", text)


@cache
def _asset(name: str) -> str:
    return resources.files("pase.pages").joinpath(name).read_text(encoding="utf-8")


def _json(data: JsonObject) -> str:
    """JSON that is safe inside a script element: no text in it can close the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
