"""``pase run``."""

from unittest.mock import Mock

import pase
from tests.command import reported, run


def test_the_readmes_first_command_runs_its_second(tmp_path, monkeypatch):
    """As ``make demo``: a plan of the published size (bfloat16) is run in the reduced size (float32).

    The gradient check is left out, because it would take three times as long as the rest. tests/house runs it with the
    commands of the README.
    """
    layout = tmp_path / "layout.json"
    pase.compile("zoo:gpt2", devices=32).save(layout)
    left_out = Mock(as_json=dict, verdict="undecided")
    monkeypatch.setattr("pase.commands.run.gradient_check", lambda *_: left_out)
    result = reported("run", layout, "--reduced", "--devices", 8)
    assert result["agrees"]
    by_kind = {c["kind"]: c for c in result["collectives"]}
    assert by_kind["all_reduce"]["compiled_bytes"] > 0 < by_kind["reduce_scatter"]["compiled_bytes"]
    assert all(c["compiled_bytes"] == c["predicted_on_cpu"] for c in by_kind.values())


def test_a_step_that_this_machine_cannot_hold_is_refused_before_it_runs(tmp_path):
    """Each device has little enough for an H100, but here all devices share the memory of one host."""
    layout = tmp_path / "layout.json"
    pase.compile("zoo:mlp?batch=16777216", devices=64).save(layout)
    code, _, said = run("run", layout)
    assert code == 1 and "--reduced" in said and "this machine" in said
