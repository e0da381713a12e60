"""Pages are text without scripts of others: what comes from a file stays text, and colours can be told apart."""

from __future__ import annotations

import json
import re
from importlib import resources

from pase.pages.parts import table
from pase.pages.shell import Section, page
from tests.pages.elements import Elements


def test_what_comes_from_a_file_is_text() -> None:
    bad = "</script><script>alert(1)</script><b>"
    made = page(
        title=bad,
        lead="",
        sections=[Section(anchor="a", title=bad, body=table(bad, [bad], []))],
        data={"name": bad},
    )
    elements = Elements(made)
    assert [t for t, _ in elements.found].count("script") == 2
    held = made.partition("id='data'>")[2].partition("</script>")[0]
    assert json.loads(held) == {"name": bad}


def test_a_page_that_is_printed_commands_no_terminal() -> None:
    bad = "k\x1b[2J\x9b2J\x07"
    made = page(
        title=bad,
        lead="",
        sections=[Section(anchor="a", title=bad, body=bad)],
        data={"name": "a\tb", "k": bad},
    )
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", made) and made.count("\ufffd[2J") >= 3


def contrast(a: str, b: str) -> float:
    """The contrast of two colours #rrggbb by WCAG 2.1, from 1 to 21."""

    def luminance(colour: str) -> float:
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_from_what_is_behind_them() -> None:
    """WCAG AA asks for a contrast of 4.5 for text, in light and in dark."""
    sheet = resources.files("pase.pages").joinpath("page.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--(\w+): light-dark\((#\w{6}, #\w{6})\)", sheet))
    assert len(colours) > 10
    for side in (0, 1):
        of = {name: pair.split(", ")[side] for name, pair in colours.items()}
        for ground in ("bg", "panel"):
            low = {
                n: round(contrast(c, of[ground]), 2)
                for n, c in of.items()
                if n not in ("bg", "panel", "line")
            }
            assert all(c >= 4.5 for c in low.values()), (side, ground, low)
