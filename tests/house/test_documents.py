"""The documents are correct: their Python runs, their commands parse, and the files that they name exist."""

from __future__ import annotations

import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest

from pase import cli
from tests import program

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / n for n in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
PRESENT = [d for d in DOCUMENTS if d.exists()]

# A fenced block, and the comment on the line before it, if there is one.
BLOCK = re.compile(r"(?:<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.M | re.S)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
# A path in code quotes that has a slash.
PATH = re.compile(r"`([\w.\-]+(?:/[\w.\-*<>]+)+/?)`")


@cache
def _every_block() -> list[tuple[str, str, str, str]]:
    """(kind, document, note, body) of the fenced blocks of all documents."""
    return [
        (m["kind"], d.name, m["note"] or "", m["body"])
        for d in PRESENT
        for m in BLOCK.finditer(d.read_text())
    ]


def blocks(kind: str) -> list[tuple[str, str, str]]:
    """(document, note, body) of the fenced blocks of a kind in all documents."""
    return [(name, note, body) for of, name, note, body in _every_block() if of == kind]


def test_there_are_documents_to_look_at():
    assert {d.name for d in PRESENT} >= {"README.md"}
    assert blocks("sh")


def python_of(document: Path) -> list[str]:
    return [
        body
        for name, note, body in blocks("python")
        if name == document.name and not note.startswith(("not run:", "saved as:"))
    ]


MARKS = {"torch.md": [pytest.mark.torch]}
"""Marks of documents whose framework is not installed by default."""


def documents_with_python() -> list[object]:
    return [pytest.param(d, id=d.name, marks=MARKS.get(d.name, ())) for d in PRESENT if python_of(d)]


@pytest.mark.parametrize("document", documents_with_python())
def test_python_in_documents_runs(document, tmp_path):
    """The blocks of a document run in order in one process.

    ``<!-- not run: why -->`` before a block skips it, and so does ``<!-- saved as: NAME -->``, which makes it a file
    for the document's commands. Blocks with prompts (``>>>``) are doctests.
    """
    bodies = python_of(document)
    for prompted, options in ((False, []), (True, ["-m", "doctest", "-o", "ELLIPSIS"])):
        if mine := [body for body in bodies if (">>> " in body) == prompted]:
            file = tmp_path / f"document.{'txt' if prompted else 'py'}"
            file.write_text("\n".join(mine))
            done = program.run("python", *options, file, folder=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr


def commands() -> list[str]:
    """The lines of sh blocks without comments and with continued lines joined."""
    lines = re.findall(r"^\t\$\(BIN\)/(pase .*)$", (ROOT / "Makefile").read_text(), re.M)
    for _, _, body in blocks("sh"):
        for line in body.replace("\\\n", " ").splitlines():
            bare = line.split("  #")[0].split(" # ")[0].strip().removeprefix("$ ")
            if bare and not bare.startswith("#"):
                lines.append(bare)
    return list(dict.fromkeys(lines))


@pytest.mark.parametrize("line", commands())
def test_commands_in_documents_exist(line):
    typed, *args = shlex.split(line)
    if typed == "make":
        assert {a for a in args if "=" not in a} <= TARGETS, f"no such target; there are {sorted(TARGETS)}"
        return
    if typed.removeprefix(".venv/bin/") != "pase":
        assert (
            typed in ("git", "cd", "pip", "python")
            or (Path(sys.executable).parent / Path(typed).name).exists()
        )
        return
    group = cli.command_group()
    context = group.make_context("pase", list(args))
    name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(name, rest, parent=context)  # parses and checks the options; runs nothing


def named() -> list[tuple[str, str]]:
    """(document, path), without patterns for names that contributors choose, and without paths of other projects."""
    found = {(d.name, path) for d in PRESENT for path in PATH.findall(d.read_text())}
    return sorted((d, path) for d, path in found if "<" not in path and (ROOT / path.split("/")[0]).exists())


@pytest.mark.parametrize(("document", "path"), named())
def test_files_named_in_documents_exist(document, path):
    assert list(ROOT.glob(path.rstrip("/"))), f"{document} names {path}"
