"""Runs benches that measure rows: options, progress, and result files with their provenance.

A bench declares its rows and the function that measures one (``Benchmark``). The runner parses the command line,
measures the rows, prints a line for each and saves the result file after each. ``python -m bench`` lists all benches.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from bench.processes import forks_of, row_apart

__all__ = [
    "BEGAN",
    "RESULTS",
    "ROOT",
    "Benchmark",
    "OwnProcess",
    "benches",
    "numbers",
    "option",
    "parser",
    "save",
    "wanted",
]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
COLUMNS = 80
SAVE_EVERY_S = 2.0
"""Rows that take less time than this are saved together."""


def provenance() -> dict[str, Any]:
    """Returns the machine, commit, command and time of this run, and the load average before it.

    The commit ends in ``-dirty`` if there were uncommitted changes.
    """
    git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "commit": subprocess.run(git, capture_output=True, text=True, cwd=ROOT).stdout.strip() or None,
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_1min": round(os.getloadavg()[0], 2),
    }


# Taken when the bench starts: at its end, the load average includes the bench itself.
BEGAN = provenance()


def save(result: dict[str, Any], path: str | Path) -> Path:
    """Writes ``result`` with this run's provenance as JSON, atomically, and returns the path.

    A provenance in ``result`` (if it was read from a result file) is replaced.
    """
    from pase.files.atomic import write_atomically

    out = Path(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, json.dumps(BEGAN | result | BEGAN, indent=1) + "\n")
    return out


Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    """The arguments of ``argparse.ArgumentParser.add_argument``."""
    return names, settings


class _WholeResults(argparse.ArgumentParser):
    """Refuses to replace a result file of all rows by chosen ones."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = super().parse_args(args, namespace)
        file = getattr(given, "out", None)
        if (
            getattr(given, "only", None)
            and file == self.get_default("out")
            and file is not None
            and file.exists()
        ):
            self.error(f"{file} has the results of all rows; with --only, name another file (-o FILE)")
        return given


def parser(
    doc: str | None, result: str, *options: Option, of: type[argparse.ArgumentParser] = _WholeResults
) -> argparse.ArgumentParser:
    """Returns a parser with these options and ``-o FILE``; ``result`` names the default file in bench/results.

    of: the class of the parser. By default, one that refuses ``--only`` if it would replace the default file.
    """
    made = of(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    file = RESULTS / f"{result}.json"
    if result:
        made.add_argument("-o", "--out", type=Path, default=file, metavar="FILE", help="the result file")
    for names, settings in options:
        made.add_argument(*names, **settings)
    return made


def wanted(names: Iterable[str], texts: Sequence[str]) -> list[str]:
    """Returns the names that contain one of the texts, or all names without texts. Raises SystemExit if none does.

    >>> wanted(["bert 32", "vgg16"], ["bert"])
    ['bert 32']
    """
    every = list(names)
    chosen = [name for name in every if not texts or any(text in name for text in texts)]
    if not chosen:
        raise SystemExit(f"no row has {' or '.join(texts)} in its name; there are: {', '.join(every)}")
    return chosen


def numbers(text: str) -> list[int]:
    """Parses a list of numbers and ranges.

    >>> numbers("3,7-9")
    [3, 7, 8, 9]
    """
    parts = [part.partition("-") for part in text.split(",")]
    return [n for first, _, last in parts for n in range(int(first), int(last or first) + 1)]


def benches() -> dict[str, tuple[str, str]]:
    """Returns each bench's module, which has BENCH or ``main``, and the first line of its docstring, by its name as in
    ``python -m bench NAME``."""
    found = {}
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        path = file.relative_to(Path(__file__).parent).with_suffix("")
        parts = path.parts[:-1] if path.name == "__main__" else path.parts
        if parts and re.search(r"^(BENCH = |def main\(\))", text, re.M):
            first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            found[".".join(parts)] = ".".join(("bench", *path.parts)), first
    return found


def _refuse_as_script() -> None:
    """Ends ``python -m bench.search.memory``, which would define the bench and measure nothing."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or not spec.name.startswith("bench.") or spec.name == "bench.__main__":
        return
    for name, (module, _) in benches().items():
        if module == spec.name and '__name__ == "__main__"' not in Path(spec.origin).read_text(
            encoding="utf-8"
        ):
            raise SystemExit(
                f"a bench is run by its name: python -m bench {name} {' '.join(sys.argv[1:])}".rstrip()
            )


_refuse_as_script()

COMMON = (
    option("texts", nargs="*", metavar="TEXT", help="as --only"),
    option("--only", action="append", default=[], metavar="TEXT", help="the rows with this in their name"),
    option("--resume", action="store_true", help="keep the rows that the result file has"),
    option("--again", action="store_false", dest="resume", help="measure those rows again"),
    option("--minutes", type=float, metavar="M", help="start no row after this many CPU minutes"),
    option("--json", action="store_true", help="print the result file"),
)
NamedRows = Mapping[str, Any]
"""The arguments with which each row is measured, by its name."""
DONE = object()
"""Follows the rows of a name: all have been measured."""


def _bound(function: Callable[..., Any], given: argparse.Namespace) -> Callable[..., Any]:
    """Returns the function, with ``given`` if it has such a parameter."""
    return partial(function, given=given) if "given" in signature(function).parameters else function


def _called(function: Any, *arguments: Any, given: argparse.Namespace) -> Any:
    """Calls the function, with ``given`` if it has such a parameter; returns anything else as it is."""
    return _bound(function, given)(*arguments) if callable(function) else function


@dataclass(frozen=True, kw_only=True)
class OwnProcess:
    """Each row is measured in a process of its own, whose failure is an error in the row (``row_apart``).

    preloaded: the modules that are imported once, before the processes are forked. cpu_s, memory: their limits.
    """

    preloaded: Sequence[str] = ()
    cpu_s: int
    memory: int | None = None


@dataclass(frozen=True)
class Benchmark:
    """A bench that measures rows. A function in it that has a parameter ``given`` gets the options.

    result: the name of the result file in bench/results.
    rows: the arguments with which each row is measured (a tuple for several), by its name; or only names.
    measure: measures a row from its arguments. Returns the row, several rows, or None for no row.
    named: the format of a row's name from the row's fields, or a function. Fields that a row lacks are added: the
        arguments, or the name for a field alone. If empty, the file has rows by name, not in a list.
    apart: how each row is measured in a process of its own.
    stream: in place of ``measure``: measures many rows together, from ``rows``, and yields (name, row).
    at: the key of the rows in the result file. If empty, the result is ``head`` alone (or the rows by name, if there is
        no head), and no row can be kept.
    head: the other entries of the result file, from all rows (as the file has them).
    order: the key by which rows are sorted, from a row's name and the row; by default the order of ``rows``.
    line: what is printed about a row, from its name and the row; by default its fields.
    options: the bench's own options.
    prepare: runs before the first row.
    environment: variables that are set before the other functions (which import jax) run.
    page: makes something else from the whole result, after all rows. ``--page`` does this alone. It is not made of the
        rows that ``--only`` chose if the result file had no others: it would replace the page of all rows.
    resumes: rows that the result file has are not measured again by default. New rows have the commit.
    current: whether ``--resume`` may keep this row of the result file.
    instead: does something else than to measure, and returns whether it did.
    """

    result: str | Callable[..., str]
    rows: NamedRows | Sequence[str] | Callable[..., NamedRows | Sequence[str]]
    measure: Callable[..., dict[str, Any] | Iterable[dict[str, Any]] | None] | None = None
    named: str | Callable[[dict[str, Any]], str] = ""
    _: KW_ONLY
    apart: OwnProcess | None = None
    stream: Callable[..., Iterable[tuple[str, Any]]] | None = None
    at: str = "rows"
    head: Mapping[str, Any] | Callable[..., dict[str, Any]] = field(default_factory=dict)
    order: Callable[[str, Any], Any] | None = None
    line: Callable[[str, Any], str] | None = None
    options: Sequence[Option] = ()
    prepare: Callable[..., object] = lambda: None
    environment: Mapping[str, str] | Callable[..., Mapping[str, str]] = field(default_factory=dict)
    page: Callable[..., object] | None = None
    resumes: bool = False
    current: Callable[[Any], bool] = lambda row: True
    instead: Callable[..., bool] = lambda: False

    def parser(self, doc: str | None = None) -> argparse.ArgumentParser:
        """Returns the parser of the common options and of the bench's own. doc: its help."""
        page = [option("--page", "--render", action="store_true", help="make the page, measure nothing")]
        of = self.result if isinstance(self.result, str) else "NAME"
        made = parser(
            doc,
            of,
            *self.options,
            *COMMON,
            *(page if self.page else ()),
            of=argparse.ArgumentParser,  # chosen rows are saved with the others of the file
        )
        made.set_defaults(resume=self.resumes)
        return made

    def run(self, arguments: Sequence[str] | None = None, *, doc: str | None = None) -> None:
        """Runs the bench by its command line: measures rows, prints them, and saves them. doc: its help."""
        given = self.parser(doc).parse_args(arguments)
        if not isinstance(self.result, str) and given.out == RESULTS / "NAME.json":
            given.out = RESULTS / f"{_called(self.result, given=given)}.json"
        given.only = [*given.only, *given.texts]
        if self.page and given.page:
            _called(self.page, json.loads(given.out.read_text(encoding="utf-8")), given=given)
            return
        os.environ.update(_called(self.environment, given=given))
        if _called(self.instead, given=given):
            return
        rows = _called(self.rows, given=given)
        cases = dict(rows) if isinstance(rows, Mapping) else {name: name for name in rows}
        chosen = wanted(cases, given.only)
        found = self._before(given.out, None if callable(self.rows) else cases)
        if found:  # if the rows are from another version, this raises now and not after hours
            self._result(found, cases, given)
        if given.resume:
            chosen = [n for n in chosen if n not in found or not all(map(self.current, found[n]))]
        others = found.keys() - set(chosen)
        if chosen:
            _called(self.prepare, given=given)
        said = sys.stderr if given.json else sys.stdout
        result = self._measured({name: cases[name] for name in chosen}, cases, found, given, said)
        if given.json:
            print(json.dumps(result, indent=1))
        else:
            for text in _lines({k: v for k, v in result.items() if k != self.at}):
                print(text)
            print(f"wrote {given.out}" if chosen else f"{given.out} has all rows")
        if self.page and len(chosen) < len(cases) and given.only and not others:
            print(
                f"no page is made, because {given.out} had no other rows; --page makes one of these",
                file=said,
            )
        elif self.page:
            _called(self.page, result, given=given)

    def _name(self, row: dict[str, Any]) -> str:
        return self.named.format_map(row) if isinstance(self.named, str) else self.named(row)

    def _before(self, file: Path, cases: NamedRows | None) -> dict[str, list[Any]]:
        """The rows that the file has, by name; those of another commit name it. cases: the rows that may be there."""
        if not self.at or not file.exists():
            return {}
        result = json.loads(file.read_text(encoding="utf-8"))
        rows = result.get(self.at, ())
        commit = {"commit": result.get("commit")} if result.get("commit") != BEGAN["commit"] else {}
        found: dict[str, list[Any]] = {}
        for name, row in [(self._name(r), r) for r in rows] if self.named else rows.items():
            if cases is None or name in cases:
                found.setdefault(name, []).append(commit | row if isinstance(row, dict) else row)
        return found

    def _result(
        self, found: Mapping[str, list[Any]], cases: NamedRows, given: argparse.Namespace
    ) -> dict[str, Any]:
        names = [n for n in [*cases, *(n for n in found if n not in cases)] if n in found]
        pairs = [(n, row) for n in names for row in found[n]]
        if self.order:
            pairs.sort(key=lambda pair: self.order(*pair))
        rows = [row for _, row in pairs] if self.named else dict(pairs)
        head: dict[str, Any] = dict(_called(self.head, rows, given=given))
        return head | {self.at: rows} if self.at else head or dict(rows)

    def _measured(
        self,
        chosen: dict[str, Any],
        cases: NamedRows,
        found: dict[str, list[Any]],
        given: argparse.Namespace,
        said: Any,
    ) -> dict[str, Any]:
        """Measures the chosen rows and saves them with those that were found; returns the whole result."""
        began = saved = time.monotonic()
        new: dict[str, list[Any]] = {}
        unsaved = False
        try:
            for name, row in self._stream(chosen, given):
                now = time.monotonic()
                if row is not DONE:
                    new.setdefault(name, []).append(self._stamped(name, chosen.get(name), row))
                    left = (now - began) / len(new) * (len(chosen) - len(new))
                    done = f"{len(new):{len(str(len(chosen)))}}/{len(chosen)} {_left(left)}"
                    text = self.line(name, row) if self.line else _fields(name, row)
                    print(_cut(f"{done} {text}"), file=said, flush=True)
                elif name in new:
                    found[name], unsaved = new[name], True
                    if now - saved > SAVE_EVERY_S:
                        save(self._result(found, cases, given), given.out)
                        unsaved, saved = False, time.monotonic()
        finally:
            if unsaved:
                save(self._result(found, cases, given), given.out)
        return self._result(found, cases, given) if found else {}

    def _stamped(self, name: str, case: Any, row: Any) -> Any:
        """The row with the fields of its name that it lacks, and with the commit."""
        named = self.named if isinstance(self.named, str) else ""
        fields, values = re.findall(r"\{(\w+)", named), case if isinstance(case, tuple) else (case,)
        if named == f"{{{''.join(fields)}}}":
            row = {named[1:-1]: name} | row
        elif len(fields) == len(values):
            row = dict(zip(fields, values, strict=True)) | row
        return {"commit": BEGAN["commit"]} | row if self.resumes and isinstance(row, dict) else row

    def _stream(self, chosen: dict[str, Any], given: argparse.Namespace) -> Iterator[tuple[str, Any]]:
        """Yields (name, row) of the chosen rows, and (name, DONE) after the rows of each name, while there is time."""
        for name, row in _called(self.stream, chosen, given=given) or ():
            yield from ((name, row), (name, DONE))
        for name, case in chosen.items() if self.measure else ():
            if given.minutes is not None and time.process_time() > 60 * given.minutes:
                return
            arguments = case if isinstance(case, tuple) else (case,)
            if self.apart is None:
                rows = _called(self.measure, *arguments, given=given)
            else:
                a, measure = self.apart, _bound(self.measure, given)
                rows = row_apart(forks_of(a.preloaded), measure, *arguments, cpu_s=a.cpu_s, memory=a.memory)
            for row in [rows] if isinstance(rows, dict) else rows or ():
                yield name, row
            yield name, DONE


def _fields(name: str, row: Any) -> str:
    """A row's name and its plain values."""
    if not isinstance(row, dict):
        return f"{name}: {row}"
    plain = {k: v for k, v in row.items() if isinstance(v, int | float | str) and str(v) not in name}
    return ", ".join([name, *(f"{k} {_short(v)}" for k, v in plain.items())])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _left(seconds: float) -> str:
    """
    >>> _left(40), _left(4000), _left(40000)
    (' 40s', ' 67m', ' 11h')
    """
    size, unit = next(u for u in ((1, "s"), (60, "m"), (3600, "h")) if seconds < 100 * u[0] or u[1] == "h")
    return f"{seconds / size:3.0f}{unit}"


def _cut(text: str) -> str:
    text = " ".join(text.split("\n"))
    return text if len(text) <= COLUMNS else text[: COLUMNS - 1] + "…"


def _lines(result: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A summary's values, one per line."""
    for key, value in result.items():
        if isinstance(value, dict) and len(str(value)) > COLUMNS - 20:
            yield _cut(f"{indent}{key}:")
            yield from _lines(value, indent + "  ")
        else:
            yield _cut(f"{indent}{key}: {value if isinstance(value, str) else _short(value)}")
