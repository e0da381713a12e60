"""Parts of a page without scripts: tables with bars, key figures and legends. Cells and values must be escaped HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["bar", "cards", "in_notebook", "key", "table"]


def bar(parts: Iterable[tuple[str, float]], whole: float) -> str:
    """One bar of several parts. parts: (colour of the style sheet, value). whole: the value of the full width."""
    return "".join(
        f"<span class='bar f-{kind}' style='width:{100 * value / whole:.2f}%'></span>"
        for kind, value in parts
        if whole > 0 and value > 0
    )


def table(label: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, searched: bool = False) -> str:
    """A table that scrolls if it is too wide. A title that ends in '>' marks a column of numbers, '|' one of bars.

    A column in which no row says anything is left out.

    searched: whether readers can search and sort it. The page then needs the widget "tables".
    """
    given = [tuple(row) for row in rows]
    used = [not given or any(row[k] for row in given) for k in range(len(head))]
    head = [h for h, u in zip(head, used, strict=True) if u]
    kinds = ["n" if h.endswith(">") else "b" if h.endswith("|") else "" for h in head]
    titles = (h.rstrip(">|") for h in head)
    out = [
        f"<div class='scroll' tabindex='0' role='region' aria-label='{escape(label, quote=True)}'"
        f"{' data-searched' if searched else ''}><table><thead><tr>",
        *(
            f"<th scope='col' class='{k}'>{escape(t) or '<span hidden>bar</span>'}"
            for t, k in zip(titles, kinds, strict=True)
        ),
        "</thead><tbody>",
    ]
    for row in given:
        cells = (c for c, u in zip(row, used, strict=True) if u)
        out.append("<tr>" + "".join(f"<td class='{k}'>{c}" for c, k in zip(cells, kinds, strict=True)))
    return "\n".join([*out, "</tbody></table></div>"])


def in_notebook(line: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A line of plain text and a table for a notebook, which has its own style sheet."""
    style = "<style>.pase td.n,.pase th.n{text-align:right}.pase td,.pase th{text-align:left}</style>"
    return f"<div class='pase'>{style}<p>{escape(line)}</p>{table(line, head, rows)}</div>"


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """Key figures. figures: (what, value, a remark in small print)."""
    inside = (
        f"<div><dt>{what}</dt><dd>{value}{f'<small>{remark}</small>' if remark else ''}</dd></div>"
        for what, value, remark in figures
    )
    return f"<dl class='cards'>{''.join(inside)}</dl>"


def key(names: Iterable[tuple[str, str]]) -> str:
    """A legend. names: (colour of the style sheet, name)."""
    return (
        "<ul class='key'>"
        + "".join(f"<li><i class='f-{c}'></i>{escape(name)}" for c, name in names)
        + "</ul>"
    )
