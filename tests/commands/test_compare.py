"""``pase compare``."""

import json

from pase.commands.compare import compare
from tests.command import reported, run

MODEL, DEVICES = "zoo:mlp", 8


def test_the_command_prints_a_table_or_one_json_object(capsys):
    compare(MODEL, 4, vary=["bandwidth=0.5,2"], json=True)
    found = json.loads(capsys.readouterr().out)
    assert [r["factors"] for r in found["vary"]] == [{"bandwidth": f} for f in (0.5, 1.0, 2.0)]
    assert all(r["regret"] >= 0 and r["cost"] >= r["best"] for r in found["vary"])


def test_a_layout_has_devices_and_machine_and_is_a_row(plan, tmp_path):
    path = tmp_path / "layout.json"
    plan.save(path)
    found = reported("compare", path)
    assert (found["devices"], found["machine"], found["model"]) == (4, plan.machine, plan.model)
    rows = {r["name"]: r for r in found["strategies"]}
    assert rows[str(path)]["cost"] == plan.cost >= rows["pase"]["cost"]
    assert all(0 <= r["exposed"] <= r["communication"] for r in rows.values())
    code, _, said = run("compare", plan.model)
    assert code == 2 and "--devices" in said
