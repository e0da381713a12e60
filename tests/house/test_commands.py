"""Runs every command of the README and of the pages in docs/ that needs no files of the reader, in order.

The commands of a document run in one folder, so a command may read what an earlier one has written. Comments before a
block change how it runs:
- ``<!-- run with: COMMAND OPTIONS; … -->`` adds options to a command that would take minutes. Options after ``--`` go
  to the program that the command starts.
- ``<!-- not run: why -->`` leaves the block out.
- ``<!-- saved as: NAME -->`` before a Python block writes it to a file in the folder.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests import program
from tests.house.test_documents import DOCUMENTS, MARKS, ROOT, blocks

SHELL = ("pase", "python")
LEFT_OUT = ("make", "pip", ".venv/bin/python", ".venv/bin/pre-commit")
"""Not run here: CI runs make, make test-wheel runs pip, and the others are benches that write results."""


def lines(document: str) -> list[str]:
    """The commands of a document's sh blocks, in order, with the options that its comments add."""
    out = []
    for name, note, body in blocks("sh"):
        if name != document or note.startswith("not run:"):
            continue
        asked = note.removeprefix("run with:").split(";") if note.startswith("run with:") else []
        more = dict(part.split(maxsplit=1) for part in asked)
        for line in body.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] in SHELL:
                command, separator, rest = shlex.join(words).partition(" -- ")
                note_says = more.pop(words[1], "") if words[0] == "pase" else ""
                added, _, behind = note_says.partition("-- ")
                out.append(
                    " ".join(filter(None, (command, added.strip())))
                    + separator
                    + " ".join(filter(None, (rest, behind)))
                )
            else:
                assert not words or words[0] in LEFT_OUT, f"{document}: say 'not run: why' before {line}"
        assert not more, f"{document}: its note names {sorted(more)}, which the block does not run"
    return out


def test_notes_add_options_to_the_commands_they_name():
    found = lines("command-line.md")
    assert sum("--budget" in line for line in found) == 1
    assert "pase profile -o traces -- python examples/train.py --steps 8" in found
    assert sum(line.startswith("pase ") for line in found) >= 15


def left_to_run(document: str) -> list[str]:
    """The lines of a document without those that the README runs too, unless a later line reads what they write."""
    mine = lines(document)
    shared = set() if document == "README.md" else set(lines("README.md"))

    def read_later(i: int) -> bool:
        words = shlex.split(mine[i])
        written = [words[j + 1] for j, word in enumerate(words[:-1]) if word == "-o"]
        return any(name in shlex.split(later) for name in written for later in mine[i + 1 :])

    return [line for i, line in enumerate(mine) if line not in shared or read_later(i)]


def test_what_the_readme_runs_is_not_run_again():
    left = left_to_run("command-line.md")
    assert left_to_run("README.md") == lines("README.md")
    assert "pase compile zoo:gpt2 --devices 32 -o layout.json" in left
    assert "pase explain layout.json" in {*lines("command-line.md")} - {*left}


WHEN = {name: [pytest.mark.minutes] for name in ("README.md", "torch.md")}
"""Document -> when its commands run; of any other, before a release. What commands do is tested in tests/commands, too,
without starting them."""


def documents_with_commands():
    for d in DOCUMENTS:
        if d.exists() and lines(d.name):
            marks = WHEN.get(d.name, [pytest.mark.release])
            yield pytest.param(d.name, marks=marks + MARKS.get(d.name, []))


@pytest.mark.parametrize("document", [*documents_with_commands()])
def test_commands_of_a_document_run_in_order(document, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for name, note, body in blocks("python"):
        if name == document and note.startswith("saved as:"):
            (tmp_path / note.removeprefix("saved as:").strip()).write_text(body)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # Without forced devices, as in a reader's shell.
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "XLA_FLAGS": program.COMPILED_QUICKLY}
    for line in left_to_run(document):
        done = program.run(*shlex.split(line), folder=tmp_path, environment=env)
        assert done.returncode == 0, f"{line}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
        assert done.stdout.strip() or done.stderr.strip() or line.startswith("python"), line
