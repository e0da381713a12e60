"""What pase replay, diagnose, optimize and profile have in common: refusals of bad input, and narrow terminals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cases.timelines import ImaginedRun, simulate, trace, write
from tests.command import printed, run


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["replay", "nowhere"], "no such file"),
        (["replay", "{traces}", "--align", "stars"], "choose ends, dpro or none"),
        (["replay", "{traces}", "--what-if", "magic=3"], "what-if 'magic=3'"),
        (
            ["replay", "{traces}", "--what-if", "op:nothing-like-it=0.5"],
            "no device op has a name that matches",
        ),
        (["replay", "{traces}", "--what-if", "op:nothing-like-it=0.5"], "in the trace, such as '"),
        (["replay", "{traces}", "--what-if", "latency=0"], "0 is no factor"),
        (["replay", "{traces}", "--what-if", "bandwith=2"], "did you mean 'bandwidth'?"),
        (["replay", "{traces}", "--what-if", "op:[=0.5"], "not a regular expression"),
        (["optimize", "{traces}", "--memory-limit", "much"], "not a size"),
        (["optimize", "{traces}", "--memory-limit", "8GiB"], "no memory events"),
        (["optimize", "{traces}", "--passes", "magic"], "no pass 'magic'"),
        (["diagnose", "{traces}", "--align", "stars"], "choose ends, dpro or none"),
        (["profile", "--", "no-such-program-anywhere"], "'no-such-program-anywhere'"),
    ],
)
def test_bad_input_is_one_clear_message(traces: Path, argv: list[str], words: str) -> None:
    code, out, err = run(*(a.replace("{traces}", str(traces)) for a in argv))
    assert code == 2
    assert words in " ".join(err.split())
    assert "Traceback" not in err
    assert not out


@pytest.mark.parametrize("command", ["replay", "diagnose", "optimize"])
def test_traces_of_different_runs_are_told_apart(tmp_path: Path, command: str) -> None:
    folder = write(simulate(ImaginedRun(ranks=2, iterations=3)), tmp_path / "x")
    later = json.dumps(trace(simulate(ImaginedRun(ranks=2, iterations=3)), 1)).replace(
        "ProfilerStep#", "ProfilerStep#10"
    )
    (folder / "rank1.json.gz").unlink()
    (folder / "rank1.json").write_text(later)
    code, _, err = run(command, folder)
    assert code == 2
    assert "no iteration is complete on every rank" in " ".join(err.split())


def test_reports_fit_eighty_columns(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = write(simulate(ImaginedRun(ranks=3, iterations=4, skew_us=(0.0, 25e3, -17e3))), tmp_path / "x")
    for command in ("replay", "diagnose", "optimize"):
        lines = printed(command, folder).splitlines()
        assert max(map(len, lines)) <= 80 and "…" not in "".join(lines)
