"""Loads a scheduling problem from a file: pase's JSON or a PipeDream-style profile."""

from __future__ import annotations

from pathlib import Path

from pase.errors import PaseError
from pase.files.codec import parse_json
from pase.files.quantities import parse_rate, parse_seconds
from pase.files.unreadable import unreadable
from pase.schedule.io import PROBLEM_SCHEMA, problem_from_json
from pase.schedule.pipedream import looks_like_pipedream, read_pipedream
from pase.schedule.types import Link, ScheduleProblem, SendTime

__all__ = ["load_problem", "parse_link"]

DEFAULT_LINKS = ("net:50us:5GB/s",)


def parse_link(text: str) -> Link:
    """The link that a text describes: "NAME:STARTUP:BANDWIDTH" or "NAME:FILE.csv".

    The CSV file has bytes and seconds in two columns.

    >>> parse_link("nccl:50us:5GB/s").curve.tail_s_per_byte
    2e-10
    """
    parts = text.split(":")
    if len(parts) == 2 and parts[1].endswith(".csv"):
        return Link(name=parts[0], curve=_curve_from_csv(Path(parts[1])))
    if len(parts) != 3 or not parts[0]:
        raise PaseError(
            f"'{text}' is not a link",
            where="--link",
            fix="write NAME:STARTUP:BANDWIDTH, as in nccl:50us:5GB/s, or NAME:FILE.csv",
        )
    startup_s, rate = parse_seconds(parts[1], "--link"), parse_rate(parts[2], "--link")
    return Link(name=parts[0], curve=SendTime.alpha_beta(alpha_s=startup_s, beta_s_per_byte=1.0 / rate))


def _curve_from_csv(path: Path) -> SendTime:
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        cells = line.split(",")
        try:
            rows.append((float(cells[0]), float(cells[1])))
        except (ValueError, IndexError):
            if number > 1:  # the first line may be a heading
                raise PaseError(
                    f"{line[:60]!r} is not two numbers",
                    where=f"{path}, line {number}",
                    fix="write bytes,seconds",
                ) from None
    if not rows:
        raise PaseError(
            "the file has no rows", where=str(path), fix="write bytes,seconds on each line, as two numbers"
        )
    return SendTime.table([r[0] for r in rows], [r[1] for r in rows])


def load_problem(path: Path, *, links: tuple[Link, ...] = (), dataflow: bool = False) -> ScheduleProblem:
    """Read the problem in a file of either format.

    links: the links of the problem. Profiles have no links of their own; a problem's links are replaced.
    dataflow: for profiles, whether compute may run in any order that the graph allows.

    Raises PaseError, which names the file and the place in it.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise unreadable(path, e, "a layout, a problem or a profile") from e
    given = links or tuple(parse_link(x) for x in DEFAULT_LINKS)
    if looks_like_pipedream(text):
        return read_pipedream(text, given, name=path.name, dataflow=dataflow)
    hint = f"give layout.json, a problem of schema '{PROBLEM_SCHEMA}', or a PipeDream-style profile"
    data = parse_json(text, str(path), hint)
    problem = problem_from_json(data, where=str(path))
    if links:
        from dataclasses import replace

        problem = replace(problem, links=links)
    return problem
