"""A pipelined layout runs in the reduced size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.command import reported, run
from tests.compiler.stages.staged import staged


@pytest.mark.release
def test_its_layout_runs_in_the_reduced_size(tmp_path):
    plan, p = staged(), staged().pipeline
    ends = (p.stages[0], replace(p.stages[-1], rank=1))
    simple = replace(p, schedule="1f1b", chunks=1, cuts=(4, 4), stages=ends, stages_of={})
    replace(plan, pipeline=simple).save(tmp_path / "layout.json")
    told = reported("run", tmp_path / "layout.json", "--reduced", "--devices", "2")
    assert told["agrees"] and told["mesh"]["stage"] == 2 and told["collectives"] == []
    code, _, said = run("run", tmp_path / "layout.json", "--reduced", "--devices", "3")
    assert code and "cannot be run as the plan's stages are (2 ranks" in said
