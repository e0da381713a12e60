"""``pase compare``."""

import json

from pase.commands.compare import compare

MODEL, DEVICES = "zoo:mlp", 8


def test_the_command_prints_a_table_or_one_json_object(capsys):
    compare(MODEL, 4, vary=["bandwidth=0.5,2"], json=True)
    found = json.loads(capsys.readouterr().out)
    assert [r["factors"] for r in found["vary"]] == [{"bandwidth": f} for f in (0.5, 1.0, 2.0)]
    assert all(r["regret"] >= 0 and r["cost"] >= r["best"] for r in found["vary"])
    compare(MODEL, 4, vary=["bandwidth=0.5,2"])
    assert "worst regret" in capsys.readouterr().out
