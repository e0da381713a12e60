"""The glossary: each name in it exists, and each term and class is in it once."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "glossary.md"
NAMES = re.findall(r"`(pase(?:\.\w+)+)`", PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_there(name: str) -> None:
    module, _, member = name.rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), member), type)


def test_a_term_and_a_class_are_given_once() -> None:
    terms = re.findall(
        r"^\| (?!name )([\w -]+?)(?: \(`.*)? \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(terms) == len(set(terms)) > 30
    assert len(NAMES) == len(set(NAMES)) > 25
