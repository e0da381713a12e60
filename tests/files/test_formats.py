"""Commands write no format into a file whose name says another."""

import pytest

from tests.command import run

REFUSED = {
    "compile zoo:mlp --devices 4 -o plan.html": "pase report",
    "schedule layout.json -o plan.html": "--gantt",
    "replay traces -o page.html": "pase diagnose",
    "diagnose traces -o page.json": "name a .html file",
    "report layout.json -o report.pdf": "name a .html file",
    "scale zoo:mlp --devices 4 -o page.png": "name a .html file",
    "calibrate -o machine.json": "name a .toml file",
    "optimize traces -o changes.csv": "name a .json file",
    "solve problem.json -o solution.html": "name a .json file",
}


@pytest.mark.parametrize("words", REFUSED)
def test_another_format_is_refused_before_any_work(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words.split())
    assert code == 2 and out == "" and not list(tmp_path.iterdir())
    assert "--output" in err and REFUSED[words] in err


@pytest.mark.parametrize("name", ["plan.json", "plan", "plan.layout"])
def test_other_names_are_accepted(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("compile", "zoo:mlp", "--devices", 4, "--mesh", 4, "-o", name)
    assert code == 0, err
    assert (tmp_path / name).read_text().startswith("{")
