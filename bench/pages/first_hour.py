"""Runs the commands of docs/start/first-hour.md in a new environment.

    python -m bench pages.first_hour [--page FILE] [-o FILE]

Clones this repository's last commit into an empty folder, makes an environment there and runs the page's sh blocks in
order, in a folder next to the clone: nothing is cached, and the project is not on the path. A block under ``<!-- saved
as: NAME -->`` is written to that file. The output of each block goes into the page below it. A comment ``<!-- shown: …
-->`` before a block selects lines: ``20 lines`` from the first, or ``layer 7 lines`` from the first line that starts
with "layer"; several selections are joined with ";". If a command fails, the exit status is 1 and the page stays as it
is. Writes bench/results/first_hour.json: seconds, CPU seconds and exit status of each command, and the size of the
environment's packages in bytes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.runner import BEGAN, ROOT, option, parser, save

PAGE = ROOT / "docs" / "start" / "first-hour.md"
COLUMNS = 100
BLOCK = re.compile(
    r"(?P<given>(?:^<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<kind>sh|python)\n(?P<body>.*?)^```\n)"
    r"(?P<made>\n```text\n.*?^```\n(?:\n\*[^\n]*\*\n)?|\n\*[^\n]*\*\n)?",
    re.MULTILINE | re.DOTALL,
)
"""A block of the page, the note before it, and the text that this program wrote below it."""
LEAST_LINES = 12

SIZES = """
import json, re, sys
from importlib.metadata import PackageNotFoundError, distribution

def closure(name, extras, found):
    try:
        d = distribution(name)
    except PackageNotFoundError:
        return
    for asked in d.requires or ():
        word, _, marker = asked.partition(";")
        extra = re.search(r"extra *== *['\\"]([^'\\"]*)", marker)
        if extra is None or extra[1] in extras:
            m = re.match(r"([\\w.-]+)(?:\\[([^]]*)\\])?", word)
            key = m[1].lower().replace("_", "-")
            if key not in found:
                found[key] = 0
                closure(m[1], (m[2] or "").split(","), found)
    found[name] = sum(f.locate().stat().st_size for f in d.files or () if f.locate().is_file())

out = {}
for extras in ((), ("jax", "traces")):
    found = {}
    closure("pase-parallel", extras, found)
    assert found, "pase is not installed under this name"
    out[",".join(extras)] = found
print(json.dumps(out))
"""
"""A program that prints the bytes of pase and its required packages, without extras and with those of the page."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A command of the page. cpu_s: CPU seconds of all its processes, user and system."""

    command: str
    seconds: float
    cpu_s: float
    status: int
    printed: str


def cpu_s() -> float:
    """Returns the CPU seconds of all processes that this one has waited for."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


class FreshPlace:
    """A clone, and a folder next to it in which commands run as in a newcomer's shell."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.work = folder / "pase", folder / "first-hour"
        subprocess.run(["git", "clone", "-q", ROOT, self.clone], check=True)
        self.work.mkdir()
        self.environment = {
            k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_")) or k in ("LANG", "LC_ALL")
        }
        self.environment |= {"HOME": str(folder), "COLUMNS": str(COLUMNS), "PIP_NO_CACHE_DIR": "1"}
        self.environment["PATH"] = f"{self.work / 'env' / 'bin'}:/usr/local/bin:/usr/bin:/bin"

    def run(self, command: str, at: Path) -> Ran:
        """Runs one command; its messages are part of its output."""
        began, before = time.perf_counter(), cpu_s()
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=at,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Ran(
            command=command,
            seconds=round(time.perf_counter() - began, 1),
            cpu_s=round(cpu_s() - before, 1),
            status=done.returncode,
            printed=done.stdout,
        )

    def block(self, body: str, installs: bool) -> Iterator[Ran]:
        """Runs the commands of a block, in order. The command that installs runs in the clone, with this Python."""
        for line in body.replace("\\\n", " ").splitlines():
            if installs and line.startswith(("cd ", ". ")):
                continue  # every command runs in its own shell
            typed = line.replace("python3 ", f"{sys.executable} ", 1) if installs else line
            yield replace(self.run(typed, self.clone if installs else self.work), command=line)


def shown(printed: str, wanted: str) -> list[str]:
    """Returns the lines that a note selects, with "…" for those between; see the module's docstring.

    >>> shown("a\\nb\\nc\\nd", "1 lines; c 1 lines")
    ['a', '…', 'c', '…']
    """
    lines = [line.rstrip() for line in printed.rstrip().splitlines()]
    out: list[str] = []
    at = 0
    for part in wanted.split(";"):
        begins, _, number = part.strip().removesuffix(" lines").rpartition(" ")
        start = next((i for i, line in enumerate(lines) if i >= at and line.startswith(begins)), at)
        out += ["…"] * (start > at)
        at = min(start + int(number), len(lines))
        out += lines[start:at]
    return out + ["…"] * (at < len(lines))


def _below(ran: list[Ran], note: str, quiet: bool) -> str:
    """Returns the text below a block: its output, unless quiet, and its time."""
    wanted = note.removeprefix("shown: ") if note.startswith("shown: ") else f"{LEAST_LINES} lines"
    lines = []
    for r in ran:
        lines += [f"$ {r.command}"] * (len(ran) > 1) + shown(r.printed, wanted)
    *most, last = (f"{r.cpu_s:.1f} s" for r in ran)
    took = f"\n*{', '.join(most)}{' and ' if most else ''}{last}*\n"
    return f"\n```text\n{chr(10).join(lines)}\n```\n{took}" if any(lines) and not quiet else took


def placed(text: str, name: str, said: str) -> str:
    """Returns the page with this text below the comment of this name, in place of the earlier one.

    >>> placed("a\\n<!-- x -->\\nold\\n\\nb", "x", "new")
    'a\\n<!-- x -->\\nnew\\n\\nb'
    """
    return re.sub(rf"(<!-- {name} -->)(\n[^\n]+)*", lambda m: f"{m[1]}\n{said}", text)


def megabytes(packages: dict[str, int]) -> int:
    """Returns the sum of the packages' bytes, in MB."""
    return round(sum(packages.values()) / 1e6)


def hour(page: str, place: FreshPlace) -> tuple[str, list[Ran]]:
    """Runs the page's commands; returns the page with new outputs, and the commands. SystemExit if one fails."""
    ran: list[Ran] = []

    def again(m: re.Match[str]) -> str:
        note = m["note"] or ""
        if m["kind"] == "python":
            if note.startswith("saved as: "):
                (place.work / note.removeprefix("saved as: ")).write_text(m["body"])
            return m["given"]
        installs = note.startswith("not run:")
        done = []
        for r in place.block(m["body"], installs):
            print(f"{r.cpu_s:6.1f} s  {r.command}", flush=True)
            if r.status:
                raise SystemExit(f"{r.command}: exit status {r.status}\n{r.printed[-3000:]}")
            done.append(r)
        ran.extend(done)
        return m["given"] + _below(done, note, quiet=installs)

    return BLOCK.sub(again, page), ran


def main() -> None:
    """Writes bench/results/first_hour.json, and the page's outputs."""
    page = option("--page", type=Path, default=PAGE, help="the page whose commands are run")
    args = parser(__doc__, "first_hour", page).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = FreshPlace(Path(folder))
        text, ran = hour(args.page.read_text(encoding="utf-8"), place)
        (place.work / "sizes.py").write_text(SIZES)
        sizes: dict[str, dict[str, int]] = json.loads(place.run("python sizes.py", place.work).printed)
    bare, more = (megabytes(packages) for packages in sizes.values())
    largest = sorted(sizes[""].items(), key=lambda p: -p[1])[:4]
    said = ", ".join(f"{name} {nbytes / 1e6:.0f}" for name, nbytes in largest)
    text = placed(
        text,
        "sizes",
        f"This takes {more} MB on the disk. `pip install .` alone, the search engine without a framework, takes\n"
        f"{bare} MB (the largest: {said}).",
    )
    told = f"{BEGAN['date'][:10]}, {BEGAN['machine']}: {sum(r.cpu_s for r in ran):.0f} s in all, installation included."
    args.page.write_text(placed(text, "ran", told), encoding="utf-8")
    figures = [{k: v for k, v in vars(r).items() if k != "printed"} for r in ran]
    save({"commands": figures, "bytes": sizes}, args.out)
