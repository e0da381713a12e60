"""Writes docs/accuracy.md from the result files: how far predictions are from what others measured.

    python -m bench pages.accuracy [--since COMMIT]

Without --since, the page is compared with the last tag, if there is one. It measures nothing: ``SOURCES`` has the bench
that makes each result file.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.runner import RESULTS, option, parser
from pase.files.atomic import write_atomically

__all__ = ["SOURCES", "AccuracyRow", "figures", "main", "page", "results"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "accuracy.md"


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    """A median error. what: rows of what kind. rows: their number. error: relative, absolute. bias: with its sign."""

    what: str
    rows: int
    error: float
    bias: float | None


SOURCES: Mapping[str, tuple[str, str]] = {
    "kernels": ("Kernels", "python -m bench kernels"),
    "links": ("Collectives", "python -m bench links"),
    "published_steps": ("Published training steps", "python -m bench published.steps -o ..."),
    "published_steps_blackwell": (
        "Published steps on Blackwell",
        "python -m bench published.steps BLACKWELL -o ...",
    ),
    "mlperf": ("MLPerf training", "python -m bench published.mlperf -o ..."),
    "simumax": ("SimuMax's runs on 8 B200", "python -m bench published.simumax -o ..."),
    "simumax_calibrated": ("The same, on a machine of that node's ops", "the same, with --machine FILE"),
    "megatron_golden": ("Peaks of memory in Megatron's tests", "python -m bench published.megatron_golden"),
}
"""Result file -> what it is about, and the command that makes it."""


def figures(name: str, result: Mapping[str, Any]) -> list[AccuracyRow]:
    """Returns a result file's figures, the one of all rows first."""
    if "by" in result:
        whole = AccuracyRow(what="all", rows=result["rows"], error=result["median_error"], bias=None)
        return [whole] + [
            AccuracyRow(what=what, rows=e["rows"], error=e["median_error"], bias=e["bias"])
            for what, e in result["by"].items()
        ]
    return [
        AccuracyRow(what=what, rows=g["rows"], error=g["median_error"], bias=g["mean_error"])
        for what, g in result["groups"].items()
        if what in ("all", "without pipeline", "with pipeline")
    ]


def page(now: Mapping[str, Any], before: Mapping[str, Any], since: str) -> str:
    """Returns the page's text. now, before: result files by name. since: the commit of those before; empty if none."""
    out = [
        "# Accuracy",
        "",
        "How far are predictions from what others measured? Made by `python -m bench pages.accuracy` from",
        "`bench/results`; the command of each table makes its file again. Errors are relative to what was measured:",
        "the median of their size, and their median (kernels) or mean (steps) with its sign. How far a single step",
        "may be off is its [error bar](explanation/cost-model.md).",
        "",
    ]
    if since:
        out += [f'"Before" is commit {since}.', ""]
    for name, (title, command) in SOURCES.items():
        if name not in now:
            continue
        old = {f.what: f for f in figures(name, before[name])} if name in before else {}
        out += [
            f"## {title}",
            "",
            f"`{command}`",
            "",
            "| rows | | error | sign | before |",
            "|---|--:|--:|--:|--:|",
        ]
        for f in figures(name, now[name]):
            sign = "" if f.bias is None else f"{f.bias:+.1%}"
            had = f"{old[f.what].error:.1%}" if f.what in old else ""
            out.append(f"| {f.what} | {f.rows:,} | {f.error:.1%} | {sign} | {had} |")
        out.append("")
    return "\n".join(out)


def _read(text: Callable[[str], str | None]) -> dict[str, Any]:
    found = {name: text(name) for name in SOURCES}
    return {name: json.loads(t) for name, t in found.items() if t is not None}


def results() -> dict[str, Any]:
    """Returns the result files by name, without those that are not there."""

    def text(name: str) -> str | None:
        file = RESULTS / f"{name}.json"
        return file.read_text(encoding="utf-8") if file.exists() else None

    return _read(text)


def _git(*args: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def main() -> None:
    """Writes the page."""
    args = parser(__doc__, "", option("--since", default="", help="the commit to compare with")).parse_args()
    since = args.since or (_git("describe", "--tags", "--abbrev=0") or "").strip()
    short = (_git("rev-parse", "--short=8", since) or "").strip() if since else ""
    if since and not short:
        raise SystemExit(f"Error: '{since}' is no commit of this repository")
    before = _read(lambda name: _git("show", f"{short}:bench/results/{name}.json")) if short else {}
    write_atomically(PAGE, page(results(), before, short))
    print(f"wrote {PAGE.relative_to(ROOT)}")
