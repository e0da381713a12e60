"""The figures of docs/: drawn as SVG when the site is built, from bench/results or by running the code that a page is
about. A page asks for one with a comment, ``<!-- figure: NAME -->``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from pase.registry import Registry
from pase.schedule.registry import Options, get_policy
from pase.schedule.simulate import evaluate
from pase.schedule.types import Link, ScheduleProblem, SendTime, problem_from_times

__all__ = ["FIGURES", "drawn"]

RESULTS = Path(__file__).parents[1] / "bench" / "results"
OURS, OTHERS, FORWARD, BACKWARD, MESSAGE = "#b3225e", "#7a8794", "#2f6db3", "#6aa9f0", "#d9822b"

FIGURES: Registry[Callable[[], str]] = Registry("figure")


def drawn(name: str) -> str:
    """The figure as HTML. PaseError for an unknown name."""
    return f"<figure>{FIGURES[name]()}</figure>"


def _svg(width: float, height: float, label: str, inside: Sequence[str]) -> str:
    return (
        f"<svg width='{width:g}' viewBox='0 0 {width:g} {height:g}' role='img' "
        f"aria-label='{escape(label, quote=True)}' "
        f"style='max-width:100%;height:auto;font:14px system-ui,sans-serif' fill='currentColor'>"
        + "".join(inside)
        + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(text)}</text>"


def _bars(label: str, rows: Sequence[tuple[str, float, str, bool]], log: bool = False) -> str:
    """A bar for each row: (name, value, the value in words, whether it is pase's). log: lengths are logarithms."""
    least, most = min(v for _, v, *_ in rows), max(v for _, v, *_ in rows)

    def length(v: float) -> float:
        return 12 + 380 * math.log(v / least) / math.log(most / least) if log else 392 * v / most

    inside = []
    for k, (name, value, words, ours) in enumerate(rows):
        y = 22 * k
        inside += [
            _text(300, y + 14, name, "end"),
            f"<rect x='308' y='{y + 3}' width='{length(value):.1f}' height='15' fill='{OURS if ours else OTHERS}'/>",
            _text(316 + length(value), y + 14, words),
        ]
    return _svg(900, 22 * len(rows), label, inside)


def _seconds(s: float) -> str:
    """
    >>> _seconds(0.0063), _seconds(0.475), _seconds(1883.2)
    ('6.3 ms', '475 ms', '1883 s')
    """
    return f"{s * 1e3:.3g} ms" if s < 1 else f"{s:.0f} s"


def _result(name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _search_times() -> str:
    rows = []
    every = _result("paper_table1")["rows"]
    assert isinstance(every, list)
    for r in every:
        if r["p"] == 64 and "?" not in r["model"]:
            took = r["tables_s"] + r["search_s"]
            rows.append((f"{r['model']}: tables and search here", took, _seconds(took), True))
            rows.append((f"{r['model']}: the paper", r["paper_s"], _seconds(r["paper_s"]), False))
    return _bars("Seconds to find a strategy for 64 devices, by model", rows, log=True)


def _elimination() -> str:
    """A chain with a branch, before and after one vertex is eliminated."""
    places = {"a": (60, 60), "b": (160, 60), "c": (260, 20), "d": (260, 100), "e": (360, 60)}
    edges = ["ab", "bc", "bd", "ce", "de"]

    def graph(x: float, shown: Sequence[str], lines: Sequence[str], near: str) -> list[str]:
        out = []
        for pair in lines:
            (x0, y0), (x1, y1) = (places[v] for v in pair)
            new = pair == "be"
            line = f"<path d='M{x + x0} {y0}L{x + x1} {y1}' stroke='{OURS if new else 'currentColor'}' "
            out.append(f"{line}stroke-width='{3 if new else 1.5}'/>")
        for v in shown:
            px, py = places[v]
            dot = f"<circle cx='{x + px}' cy='{py}' r='17' fill='{MESSAGE if v == near else FORWARD}'/>"
            out.append(f"{dot}<g fill='#fff'>{_text(x + px, py + 4, v, 'middle')}</g>")
        return out

    inside = [
        *graph(0, "abcde", edges, "c"),
        _text(60, 145, "c is next: only b and e see it"),
        *graph(420, "abde", ["ab", "bd", "de", "be"], ""),
        _text(480, 145, "its best config becomes a table between b and e"),
    ]
    return _svg(960, 155, "Eliminating one vertex of a graph", inside)


def toy() -> ScheduleProblem:
    """Four layers, whose gradients are ready from the last to the first, and are needed from the first to the last."""
    sizes, at = (2, 2, 6, 8), (9.0, 8.0, 7.0, 5.5)
    tensors = [
        (f"layer {k + 1}", nbytes, ready, float(k))
        for k, (nbytes, ready) in enumerate(zip(sizes, at, strict=True))
    ]
    curve = SendTime.alpha_beta(alpha_s=0.15, beta_s_per_byte=0.45)
    return problem_from_times(
        name="four layers",
        forward_s=4.0,
        backward_s=5.0,
        tensors=tensors,
        links=[Link(name="network", curve=curve)],
    )


def _orders() -> str:
    """The steady iteration of the toy under three policies."""
    problem = toy()
    phases = {b.name: b.phase for b in problem.blocks}
    found = [(n, evaluate(problem, get_policy(n).make(problem, Options()))) for n in ("fifo", "tac", "ours")]
    scale = 620 / max(max(i.end_s for i in e.timeline) for _, e in found)
    inside = []
    for k, (name, e) in enumerate(found):
        y = 72 * k
        inside += [_text(0, y + 30, name), _text(60, y + 22, "compute"), _text(60, y + 46, "network")]
        for i in e.timeline:
            sent = i.message is not None
            fill = MESSAGE if sent else FORWARD if phases[i.name] == "forward" else BACKWARD
            start, long = max(i.start_s, 0.0), i.end_s - max(i.start_s, 0.0)
            if long <= 0:
                continue
            x, top = 120 + scale * start, y + (34 if sent else 10)
            inside.append(
                f"<rect x='{x:.1f}' y='{top}' width='{max(scale * long - 1.5, 1):.1f}' height='18' fill='{fill}'>"
                f"<title>{escape(i.name)}</title></rect>"
            )
        inside.append(
            _text(120 + scale * e.iteration_s, y + 66, f"{e.iteration_s:.3g} s an iteration", "end")
        )
    return _svg(
        800, 72 * len(found), "One iteration of four layers under three orders of their gradients", inside
    )


def _delays() -> str:
    found = _result("schedule_policies")["vgg19_deft"]
    assert isinstance(found, dict)
    rows = [
        (name.replace(", staleness 0", ""), r["iteration_ms"], _merged(r), "ours" in name)
        for name, r in found.items()
        if name.startswith("two links") and "us_byte" not in name
    ]
    return _bars("Milliseconds an iteration of VGG-19 over two links, by policy", rows)


def _merged(r: dict[str, float]) -> str:
    rate = r["updates_per_iteration"]
    return f"{r['iteration_ms']:.0f} ms" + ("" if rate == 1 else f", {rate:.2g} updates an iteration")


def _replayed() -> str:
    runs = _result("replay_traces")["runs"]
    assert isinstance(runs, dict)
    rows = []
    for name, r in runs.items():
        short = name.partition(" (")[0].partition(",")[0]
        rows.append((f"{short}: measured", r["measured_ms"], f"{r['measured_ms']:.1f} ms", False))
        off = r["replayed_ms"] / r["measured_ms"] - 1
        rows.append((f"{short}: replayed", r["replayed_ms"], f"{r['replayed_ms']:.1f} ms ({off:+.1%})", True))
    return _bars("Iterations of recorded runs, measured and replayed", rows)


for _name, _draw in {
    "search-times": _search_times,
    "elimination": _elimination,
    "orders": _orders,
    "delays": _delays,
    "replayed": _replayed,
}.items():
    FIGURES.add(_name, _draw)
