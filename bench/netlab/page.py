"""Generates the tables of docs/evidence/measured.md from the result files, between markers in the text."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.netlab.steps import ALONE
from bench.netlab.strategies import summary

__all__ = ["render"]

_MARK = re.compile(r"(<!-- table: (?P<name>[\w ]+) -->\n).*?(<!-- end -->)", re.S)


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(r) + " |" for r in rows)]) + "\n"


def _about(d: Mapping[str, Any]) -> str:
    load = d.get("load_1min", d["load_average"][0])
    return (
        f"{d['machine']}; commit {d['commit']}; `{d['command']}`; {d['seconds'] / 60:.0f} minutes; "
        f"load average before it {load:.1f}.\n\n"
    )


def _cells(d: Mapping[str, Any]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """(network, model, batch) -> strategy -> row."""
    out: dict[tuple[str, str, int], dict[str, Any]] = defaultdict(dict)
    for r in d["rows"]:
        out[r["network"], r["model"], r["batch"]][r["strategy"]] = r
    return out


def _strategies(d: Mapping[str, Any]) -> str:
    rows = []
    for (network, model, batch), by in _cells(d).items():
        ran = {s: r for s, r in by.items() if "measured_s" in r}
        others = {s: r for s, r in ran.items() if s not in ("ours", ALONE)}
        if "ours" not in ran or not others:
            rows.append([network, model, str(batch), "ours failed" if "ours" not in ran else "", *[""] * 6])
            continue
        ours, alone = ran["ours"], ran.get(ALONE)
        best = min(others, key=lambda s: others[s]["measured_s"])
        worst = max(others, key=lambda s: others[s]["measured_s"])
        rows.append(
            [
                network,
                model,
                str(batch),
                f"{_ms(ours['measured_s'])} ({_ms(ours['predicted_s'])})",
                f"{_ms(alone['measured_s'])} ({_ms(alone['predicted_s'])})" if alone else "",
                f"{best} {_ms(others[best]['measured_s'])} ({_ms(others[best]['predicted_s'])})",
                f"{worst} {_ms(others[worst]['measured_s'])} ({_ms(others[worst]['predicted_s'])})",
                f"{others[best]['measured_s'] / ours['measured_s']:.2f}",
                f"{min(1.0, ours['predicted_compute_s'] / ours['measured_s']):.0%}",
                next((s for s, r in by.items() if r["same_as"] == "ours"), ours["same_as"] or ""),
            ]
        )
    head = [
        "network",
        "model",
        "batch",
        "ours, ms (predicted)",
        ALONE,
        "best other",
        "worst other",
        "best other / ours",
        "compute in ours",
        "ours is",
    ]
    return _about(d) + _table(head, rows)


def _pipelines(d: Mapping[str, Any]) -> str:
    """Returns a table of each cell's pipelines and the fastest strategy without stages, and one of all strategies."""
    head = ["network", "model", "batch", "pipeline", "best without", "times its speed, predicted", "measured"]
    rows = [
        [
            c["network"],
            c["model"],
            str(c["batch"]),
            c["pipeline"],
            c["best_without"],
            f"{c['predicted_speed_over_best_without']:.2f}",
            f"{c['measured_speed_over_best_without']:.2f}",
        ]
        for c in d["summary"]["cells"]
    ]
    each = [
        [network, str(batch), s, _ms(r["predicted_s"]), f"{_ms(r['measured_s'])} ± {r['spread'] / 2:.0%}"]
        for (network, _, batch), by in _cells(d).items()
        for s, r in sorted(by.items(), key=lambda x: x[1]["predicted_s"])
        if "measured_s" in r and not r["same_as"]
    ]
    times = ["network", "batch", "strategy", "predicted, ms", "measured"]
    return _about(d) + _table(head, rows) + "\n" + _table(times, each)


def _middle_and_most(xs: Sequence[float]) -> str:
    return f"{xs[len(xs) // 2]:.2f}; {xs[-1]:.2f} ({len(xs)} cells)" if xs else "in no cell"


def _quartiles(xs: Sequence[float]) -> str:
    return ", ".join(f"{min(1.0, xs[k * (len(xs) - 1) // 4]):.0%}" for k in (1, 2, 3)) if xs else ""


def _summary(d: Mapping[str, Any]) -> str:
    """Returns the outcome of all cells, and by the number of hosts: more than two share this machine's two cores."""
    sizes = sorted({r["hosts"] for r in d["rows"]})
    parts = [(f"{n} hosts", [r for r in d["rows"] if r["hosts"] == n]) for n in sizes]
    parts = [*parts, ("all", d["rows"])] if len(parts) > 1 else parts
    columns = [_outcome(rows) for _, rows in parts]
    rows = [[name, *(c[name] for c in columns), goal] for name, goal in _GOALS]
    return _table(["", *(name for name, _ in parts), "goal"], rows)


_GOALS = (
    ("strategies measured", ""),
    ("ours the fastest, or within the noise of the fastest", "all"),
    ("ours moves nothing: every host does the whole step", ""),
    ("where ours splits: times the speed of no split, median; most", ""),
    ("compute's part of our step, quartiles", ""),
    ("ours beyond the fastest, median; worst", "0"),
    ("Kendall τ, predicted against measured", "≥ 0.9"),
    ("error of the step time, median", "< 15%"),
    ("errors below 15%", "100%"),
    ("predicted / measured, median", "1"),
)


def _outcome(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the values of ``_GOALS`` for these rows."""
    s = summary(rows)
    cells = [
        by
        for by in _cells({"rows": rows}).values()
        if {"ours", ALONE} <= {k for k, r in by.items() if "measured_s" in r}
    ]
    gains = sorted(
        by[ALONE]["measured_s"] / by["ours"]["measured_s"]
        for by in cells
        if not by[ALONE]["same_as"] and not by["ours"]["same_as"]
    )
    compute = sorted(by["ours"]["predicted_compute_s"] / by["ours"]["measured_s"] for by in cells)
    found = (
        f"{s['rows']}",
        f"{s['ours_fastest_or_within_noise']} of {s['groups']} cells",
        f"{s['ours_without_communication']} of {s['groups']}",
        _middle_and_most(gains),
        _quartiles(compute),
        f"{s['ours_median_regret']:.1%}; {s['ours_worst_regret']:.0%}",
        f"{s['kendall_tau_over_all']:.3f}",
        f"{s['median_error']:.1%}",
        f"{s['errors_below_15_percent']:.0%}",
        f"{s['median_predicted_over_measured']:.2f}",
    )
    return dict(zip((name for name, _ in _GOALS), found, strict=True))


def _by_strategy(d: Mapping[str, Any]) -> str:
    """Returns the errors by strategy."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for r in d["rows"]:
        if "measured_s" in r and not r["same_as"]:
            ratios[r["strategy"]].append(r["predicted_s"] / r["measured_s"])
            ratios[r["model"]].append(r["predicted_s"] / r["measured_s"])
            ratios[r["network"]].append(r["predicted_s"] / r["measured_s"])
    rows = []
    for name, xs in ratios.items():
        xs = sorted(xs)
        quarter = len(xs) // 4
        rows.append(
            [name, str(len(xs)), f"{xs[quarter]:.2f}", f"{xs[len(xs) // 2]:.2f}", f"{xs[-1 - quarter]:.2f}"]
        )
    return _table(["predicted / measured over", "cells", "lower quartile", "median", "upper quartile"], rows)


def _buckets(d: Mapping[str, Any]) -> str:
    rows = []
    for r in sorted(
        (r for r in d["rows"] if "measured_s" in r), key=lambda r: (r["coverage"], r["measured_s"])
    ):
        ddp = next(
            (
                x["measured_s"]
                for x in d["rows"]
                if x.get("policy") == "ddp" and x["coverage"] == r["coverage"]
            ),
            None,
        )
        rows.append(
            [
                f"{r['coverage']:g}",
                r["policy"],
                str(r["messages"]),
                _ms(r["predicted_s"]) if r["predicted_s"] else "",
                f"{_ms(r['measured_s'])} ± {r['spread'] / 2:.0%}",
                _ms(max(0.0, r["exposed_s"])),
                f"{r['updates_per_iteration']:.2f}",
                str(r["staleness"]),
                f"{ddp / r['measured_s']:.2f}" if ddp else "",
            ]
        )
    head = [
        "coverage",
        "policy",
        "messages",
        "predicted, ms",
        "measured",
        "exposed",
        "updates an iteration",
        "staleness",
        "times DDP's speed",
    ]
    sizes = f"gradients {d['gradient_bytes'] / 1e6:.1f} MB; {d['hosts']} hosts.\n\n"
    compute = f"Compute alone: {_ms(d['compute_s'])} ms; {sizes}"
    return _about(d) + compute + _table(head, rows)


_PASS = 8
"""Batches in one pass over the data."""


def _passes(losses: Sequence[float]) -> list[float]:
    """Returns the mean loss of the pass that ends at each iteration, from the first whole pass on."""
    return [sum(losses[i - _PASS : i]) / _PASS for i in range(_PASS, len(losses) + 1)]


def _losses(d: Mapping[str, Any]) -> str:
    """Returns the seconds to the loss of plain DDP after three quarters of its run, in the longer training if there is
    one, otherwise in the timed iterations."""
    rows = []
    trained = d.get("training") or d["rows"]
    for rate in sorted({r["coverage"] for r in trained}):
        mine = [r for r in trained if r["coverage"] == rate and r.get("losses")]
        plain = next((r for r in mine if r["policy"] == "ddp"), None)
        if plain is None:
            continue
        passes = _passes(plain["losses"])
        target = passes[len(passes) * 3 // 4 - 1 if len(passes) > 3 else -1]
        for r in mine:
            at = next((i for i, x in enumerate(_passes(r["losses"]), _PASS) if x <= target), None)
            seconds = f"{at * r['measured_s']:.2f}" if at else "not reached"
            count = f"{at or ''}"
            last = f"{_passes(r['losses'])[-1]:.4f} after {len(r['losses'])}"
            rows.append([f"{rate:g}", r["policy"], f"{target:.4f}", count, seconds, last])
    head = ["coverage", "policy", "loss", "iterations to it", "seconds to it", "loss at the end"]
    return _table(head, rows)


def _replay(d: Mapping[str, Any]) -> str:
    rows, changes = [], []
    for r in d["rows"]:
        said = r.get("failed") or r.get("refused")
        if said:
            rows.append([r["run"], said, "", ""])
            continue
        worst = max(r["errors_by_rank"], key=abs, default=None)
        times = [_ms(r[k]) if k in r else "" for k in ("bare_s", "traced_s")]
        rows.append([r["run"], *times, "" if worst is None else f"{worst:+.1%}"])
        for c in r.get("changes") or _before(r):
            changes.append([r["run"], c["what_if"], *_changed(c)])
    head = ["run", "step, ms", "while traced", "replay's worst error by rank"]
    asked = ["run", "what if", "traced, ms", "predicted", "measured", "error", "pase says"]
    return _about(d) + _table(head, rows) + "\n" + _table(asked, changes)


def _before(r: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the one what-if of older result files, which had no list."""
    if "what_if_s" not in r:
        return []
    said = {"now_s": r["traced_s"], "predicted_s": r["what_if_s"], "measured_s": r["faster_traced_s"]}
    return [{"what_if": "bandwidth=2", **said, "error": r["what_if_error"], "believable": True}]


def _changed(c: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a what-if: now, predicted, measured, error, and pase's own remarks."""
    if "error" not in c:
        return ["", "", "", "", str(c.get("refused") or c.get("failed"))]
    trusted = "" if c["believable"] else "not to be relied on"
    return [*(_ms(c[k]) for k in ("now_s", "predicted_s", "measured_s")), f"{c['error']:+.1%}", trusted]


_TABLES: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "strategies": ("strategies", _strategies),
    "racks": ("racks", _strategies),
    "pipelines": ("pipelines", _pipelines),
    "summary": ("strategies", _summary),
    "errors": ("strategies", _by_strategy),
    "buckets": ("buckets", _buckets),
    "torch": ("torch", _buckets),
    "losses": ("buckets", _losses),
    "replay": ("replay", _replay),
}


def render(page: Path, results: Path) -> None:
    """Fills every marked place of the page whose result file exists."""

    def filled(m: re.Match[str]) -> str:
        part, make = _TABLES[m["name"]]
        file = results / f"netlab_{part}.json"
        return m[1] + make(json.loads(file.read_text())) + m[3] if file.exists() else m[0]

    page.write_text(_MARK.sub(filled, page.read_text()))
