"""Runs ``pase`` commands as a user types them, within this process."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest

from pase.cli import main


def run(*words: object) -> tuple[int, str, str]:
    """Run ``pase WORDS``. Returns (exit status, standard output, standard error)."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        main([str(w) for w in words])
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


def printed(*words: object) -> str:
    """The standard output of ``pase WORDS``, which must succeed."""
    code, out, err = run(*words)
    assert code == 0, err
    return out


def reported(*words: object) -> Any:
    """The parsed JSON that ``pase WORDS --json`` prints."""
    return json.loads(printed(*words, "--json"))
