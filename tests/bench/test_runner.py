"""The runner of benches: which rows it measures, what it keeps, and what it saves and prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import runner
from bench.runner import BEGAN, Benchmark, option


def squares(measured: list[int], **more: Any) -> Benchmark:
    """A bench of three rows, which notes what it measures."""

    def measure(n: int, given: Any) -> dict[str, Any]:
        measured.append(n)
        if n == given.fails:
            raise RuntimeError("no")
        return {"n": n, "square": n * n}

    of: dict[str, Any] = {
        "result": "squares",
        "rows": {f"n {n}": n for n in (1, 2, 3)},
        "measure": measure,
        "named": "n {n}",
        "head": lambda rows: {"sum": sum(r["square"] for r in rows)},
        "options": [option("--fails", type=int)],
    }
    return Benchmark(**of | more)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[list[int], dict[str, Any]]]:
    """Runs the bench by its command line; returns what was measured and the result file."""

    def ran(*arguments: str, **more: Any) -> tuple[list[int], dict[str, Any]]:
        measured: list[int] = []
        try:
            squares(measured, **more).run([*arguments, "-o", str(tmp_path / "squares.json")])
        except RuntimeError:
            measured.append(0)
        return measured, json.loads((tmp_path / "squares.json").read_text())

    return ran


def test_rows_are_measured_and_saved_with_the_provenance(run, capsys):
    measured, result = run()
    assert measured == [1, 2, 3] and result["sum"] == 14
    assert [r["square"] for r in result["rows"]] == [1, 4, 9]
    assert result.items() >= BEGAN.items()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1/3") and "square 4" in lines[1] and max(map(len, lines[:4])) <= 80


def test_only_chosen_rows_are_measured_and_the_others_stay(run):
    run()
    assert run("--only", "2")[0] == run("2")[0] == [2]
    assert [r["n"] for r in run("--only", "2", "--only", "3")[1]["rows"]] == [1, 2, 3]
    with pytest.raises(SystemExit, match="n 1, n 2, n 3"):
        run("--only", "4")


def test_an_interrupted_run_is_resumed(run):
    measured, result = run("--fails", "3")
    assert measured == [1, 2, 3, 0] and len(result["rows"]) == 2
    assert run("--resume")[0] == [3] and run("--resume")[0] == []
    assert run("--again", resumes=True)[0] == [1, 2, 3] and run(resumes=True)[0] == []
    assert run(resumes=True, current=lambda row: row["n"] != 2)[0] == [2]


def test_half_of_the_rows_of_a_name_is_not_kept(run):
    def measure(n, given):
        yield {"n": n, "square": 1}
        if n == given.fails:
            raise RuntimeError("no")
        yield {"n": n, "square": 1}

    assert [r["n"] for r in run("--fails", "2", measure=measure)[1]["rows"]] == [1, 1]
    assert [r["n"] for r in run("--resume", measure=measure)[1]["rows"]] == [1, 1, 2, 2, 3, 3]


def test_rows_of_another_commit_say_so(run, tmp_path):
    run()
    file = tmp_path / "squares.json"
    file.write_text(file.read_text().replace(f'"commit": "{BEGAN["commit"]}"', '"commit": "abc"'))
    assert [r.get("commit") for r in run("--only", "2")[1]["rows"]] == ["abc", None, "abc"]


def test_a_row_that_the_bench_no_longer_has_is_dropped(run, tmp_path):
    (tmp_path / "squares.json").write_text(json.dumps({"commit": "abc", "rows": [{"n": 4, "square": 16}]}))
    assert [r["n"] for r in run("--only", "2")[1]["rows"]] == [2]
    (tmp_path / "squares.json").write_text(json.dumps({"commit": "abc", "rows": [{"n": 4, "square": 16}]}))
    assert [r["n"] for r in run("--only", "2", rows=lambda: {"n 2": 2})[1]["rows"]] == [2, 4]


def test_a_row_may_have_several_arguments_and_gets_its_name_as_a_field(run):
    def measure(a, b, given):
        return {"square": a * b, "failed": given.fails}

    rows = run(rows={"n 6": (2, 3)}, measure=measure, named="{n}")[1]["rows"]
    assert rows == [{"n": "n 6", "square": 6, "failed": None}]


def test_json_is_the_result_alone(run, capsys):
    _, result = run("--json")
    assert json.loads(capsys.readouterr().out).items() <= result.items()


def test_a_page_is_made_from_the_file_alone(run):
    pages: list[int] = []
    run(page=lambda result: pages.append(result["sum"]))
    assert run("--page", page=lambda result: pages.append(result["sum"]))[0] == []
    assert pages == [14, 14]


def test_a_file_of_all_rows_is_not_replaced_by_chosen_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    made = runner.parser("", "all", runner.option("--only", default=""))
    made.parse_args(["--only", "2"])
    (tmp_path / "all.json").write_text("{}")
    assert made.parse_args([]).out.name == "all.json"
    made.parse_args(["--only", "2", "-o", str(tmp_path / "two.json")])
    with pytest.raises(SystemExit):
        made.parse_args(["--only", "2"])
    assert "name another file" in capsys.readouterr().err


def test_no_page_is_made_of_chosen_rows_alone(run, capsys):
    pages: list[int] = []

    def page(result):
        pages.append(len(result["rows"]))

    run("--only", "2", page=page)
    assert pages == [] and "no page is made" in capsys.readouterr().out
    run(page=page)
    run("--only", "2", page=page)
    assert pages == [3, 3]


def test_rows_measured_together_get_their_arguments_and_may_be_more_than_were_asked_for(run):
    def stream(chosen: dict[str, int]) -> Any:
        return [*((k, {"square": n * n}) for k, n in chosen.items()), ("n 9", {"n": 9, "square": 81})]

    _, result = run("--only", "n 2", measure=None, stream=stream)
    assert result["rows"] == [{"n": 2, "square": 4}, {"n": 9, "square": 81}]
