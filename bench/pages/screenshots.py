"""Opens every generated page in a real browser and looks for faults.

    pip install playwright     # with a Chromium of the system: apt install chromium
    python -m bench pages.screenshots [--only gpt2] [--pictures FOLDER]

Pages of ``pase report`` (GPT-2 on 8 devices, and in 2 stages; Llama-3 405B on 16,384, and in 16 stages), of
``pase schedule --gantt``, of ``pase scale -o`` and of ``pase diagnose -o`` are opened on a phone, a laptop and a wide
screen, light and dark. Faults are: a message on the console, a request, a page wider than its screen, a control
without a name, a widget that the keyboard does not move, a table that is not searched or sorted. Writes
bench/results/screenshots.json (bytes, seconds until the page is drawn, faults), and pictures of each page and of tables
at each width of a terminal into a folder outside of the repository. The exit status is 1 if there is a fault.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from bench.cases.timelines import ImaginedRun, simulate, write
from bench.runner import option, parser, save

SCREENS = {"phone": (390, 844), "laptop": (1280, 850), "wide": (1920, 1200)}
LOOKS = ("light", "dark")
UNNAMED = """() => [...document.querySelectorAll('button, input, select, canvas, [role]')]
  .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length || e.closest('label')))
  .map(e => e.outerHTML.slice(0, 80))"""
TOO_WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


def pase(*words: object) -> None:
    """Runs ``pase WORDS`` in this process, which writes the command's files. Raises RuntimeError if it fails."""
    from pase.cli import main

    said = io.StringIO()
    with redirect_stdout(said):
        try:
            main([str(w) for w in words])
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"pase {' '.join(map(str, words))} ended with {end.code}") from end


def made_pages(folder: Path, only: str) -> dict[str, Path]:
    """Writes the pages whose name contains ``only``, and their layouts; returns the file of each page."""
    pages: dict[str, Path] = {}
    for model, devices, ranks in (
        ("gpt2", 8, None),
        ("gpt2", 8, 2),
        ("llama3_405b", 16384, None),
        ("llama3_405b", 16384, 16),
    ):
        name = model if ranks is None else f"{model}-stages"
        layout, page = folder / f"{name}.json", folder / f"{name}.html"
        if only in name or (name == "gpt2" and only in "schedule"):
            how = ("--memory-limit", "none") if ranks is None else ("--pipeline", ranks)
            pase("compile", f"zoo:{model}", "--devices", devices, *how, "-o", layout)
        if only in name:
            pase("report", layout, "-o", page, "--time-limit", 2)
            pages[name] = page
    if only in "schedule":
        pages["schedule"] = folder / "schedule.html"
        pase("schedule", folder / "gpt2.json", "--policy", "ddp,ours", "--gantt", pages["schedule"])
    if only in "scale":
        pages["scale"] = folder / "scale.html"
        machines = ("--machine", "h100x8,b200x8", "--price", "h100x8=2.5,b200x8=4")
        pase("scale", "zoo:gpt2", "--devices", "8,16,32", *machines, "-o", pages["scale"])
    if only in "diagnose":
        pages["diagnose"] = folder / "diagnose.html"
        slow = ImaginedRun(ranks=3, iterations=4, slow_rank=1, slow_by=1.4)
        pase("diagnose", write(simulate(slow), folder / "traces"), "-o", pages["diagnose"])
    return pages


def keyed(page: Any) -> Iterator[str]:
    """Returns the widgets that the keyboard does not move."""
    for name, selector, key, said in (
        ("timeline", "[data-timeline] canvas", "ArrowRight", "[data-timeline] .said"),
        ("map of devices", "[data-explorer] canvas", "ArrowRight", "[data-explorer] .said"),
        (
            "graph",
            '[data-explorer] [role="treeitem"][tabindex="0"]',
            "ArrowUp",
            "[data-explorer] .panel[aria-live]",
        ),
    ):
        if not page.locator(selector).count():
            continue
        before = page.locator(said).first.text_content()
        page.locator(selector).first.focus()
        page.keyboard.press(key)
        if page.locator(said).first.text_content() == before:
            yield f"{name}: {key} changes nothing"


def searched(page: Any) -> Iterator[str]:
    """Returns the tables that a search for what no row has does not empty, or that a column's title does not sort."""
    for number in range(page.locator("[data-searched]").count()):
        region = page.locator("[data-searched]").nth(number)
        box = region.locator("xpath=preceding-sibling::*[1]").locator("input")
        box.fill("no row has this")
        if region.locator("tbody tr:visible").count():
            yield f"table {number}: the search hides no row"
        box.fill("")
        region.locator("th.n button").first.click()
        column = region.locator("th[aria-sort='descending']").evaluate("e => e.cellIndex")
        cells = region.locator(f"tbody tr td:nth-child({column + 1})").all_text_contents()
        numbers = [float(c) for c in cells if c]
        if numbers != sorted(numbers, reverse=True):
            yield f"table {number}: its title does not sort it"


def seen(browser: Any, path: Path, screen: str, look: str, pictures: Path) -> dict[str, Any]:
    """Opens a page, and returns its row; writes its picture."""
    width, height = SCREENS[screen]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=look)
    page = context.new_page()
    faults: list[str] = []
    page.on("console", lambda m: faults.append(f"console: {m.text}"))
    page.on("pageerror", lambda e: faults.append(f"error: {e}"))

    def asked(url: str) -> None:
        if not url.startswith(("file:", "data:")):
            faults.append(f"request: {url}")

    page.on("request", lambda r: asked(r.url))
    start = time.perf_counter()
    page.goto(path.resolve().as_uri())
    opened = time.perf_counter() - start
    page.screenshot(path=pictures / f"{path.stem}-{screen}-{look}.png", full_page=True)
    if over := page.evaluate(TOO_WIDE):
        faults.append(f"{over} pixels wider than the screen")
    faults += [f"no name: {e}" for e in page.evaluate(UNNAMED)]
    faults += keyed(page)
    faults += searched(page)
    context.close()
    return {"page": path.stem, "screen": screen, "look": look, "opened_s": round(opened, 2), "faults": faults}


def terminals(layout: Path, pictures: Path) -> None:
    """Writes the plan as it looks in a terminal of each width."""
    from pase.files.terminal import console
    from pase.plan.layout import load
    from pase.plan.table import render

    for width in (80, 120, 160):
        with (pictures / f"{layout.stem}-terminal-{width}.txt").open("w", encoding="utf-8") as out:
            render(load(layout), console(file=out, width=width))


def main() -> None:
    """Writes bench/results/screenshots.json."""
    args = parser(
        __doc__,
        "screenshots",
        option("--only", default="", metavar="TEXT", help="the pages with this in their name"),
        option("--pictures", type=Path, default=Path(tempfile.gettempdir()) / "pase-screenshots"),
    ).parse_args()
    from playwright.sync_api import sync_playwright

    args.pictures.mkdir(parents=True, exist_ok=True)
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as made, sync_playwright() as play:
        pages = made_pages(Path(made), args.only)
        browser = play.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        rows = [
            seen(browser, path, screen, look, args.pictures)
            for path in pages.values()
            for screen in SCREENS
            for look in LOOKS
        ]
        browser.close()
        nbytes = {name: path.stat().st_size for name, path in pages.items()}
        for layout in Path(made).glob("*.json"):
            terminals(layout, args.pictures)
    save({"bytes": nbytes, "pages": rows}, args.out)
    for row in rows:
        print(row["page"], row["screen"], row["look"], f"{row['opened_s']} s", *row["faults"], sep="  ")
    print(f"pictures in {args.pictures}")
    sys.exit(any(row["faults"] for row in rows))
