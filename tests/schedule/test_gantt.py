"""Drawings of schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

from pase.schedule import Options, evaluate, get_policy
from pase.schedule.gantt import _figure
from pase.schedule.load import load_problem
from tests import command
from tests.schedule.profiles import PROFILE


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "p.txt"
    path.write_text(PROFILE)
    return path


def test_a_picture_as_png(profile_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="PNG needs matplotlib")
    out = tmp_path / "g.png"
    code, _, err = command.run("schedule", str(profile_file), "--policy", "ddp,ours", "--gantt", str(out))
    assert code == 0, err
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    problem = load_problem(profile_file)
    evaluations = [evaluate(problem, get_policy(n).make(problem, Options())) for n in ("ddp", "ours")]
    figure = _figure(problem, evaluations)
    assert [ax.get_title("left").partition(":")[0] for ax in figure.axes] == ["ddp", "ours"]
    for ax, e in zip(figure.axes, evaluations, strict=True):
        assert [x.get_text() for x in ax.get_yticklabels()] == ["compute", "net"]
        drawn = [p.get_extents() for c in ax.collections for p in c.get_paths()]
        assert len(drawn) == len(e.timeline)
        assert sum(b.width for b in drawn) == pytest.approx(
            sum(i.end_s - max(i.start_s, 0.0) for i in e.timeline) * 1e3, rel=1e-6
        )
