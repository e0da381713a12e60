"""The commands pase replay, diagnose, optimize and profile."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench.cases.timelines import ImaginedRun, simulate, trace, write
from pase.replay.traces.timeline_io import schema
from tests.command import printed, reported, run


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return write(simulate(ImaginedRun(ranks=2, iterations=4, noise=0.01)), tmp_path / "traces")


def test_replay_prints_the_contract(traces: Path, tmp_path: Path) -> None:
    files = tmp_path / "aligned.json", tmp_path / "predicted.json"
    knobs = ("--what-if", "bandwidth=2", "--what-if", "op:bwd_=0.5")
    report = reported("replay", traces, "-o", files[0], "--predicted", files[1], *knobs)
    for i in report["iterations"]:
        assert {"iteration", "measured_s", "replayed_s", "error"} <= set(i)
    for r in report["ranks"]:
        assert {"rank", "measured_s", "replayed_s", "error", "clock_offset_s"} <= set(r)
        assert abs(r["error"]) < 0.05
    assert [w["knob"] for w in report["what_if"]] == [
        "bandwidth=2",
        "op:bwd_=0.5",
        "bandwidth=2 and op:bwd_=0.5",
    ]
    assert all(w["speedup"] >= 0.999 for w in report["what_if"])
    for f in files:
        document = json.loads(f.read_text())
        jsonschema.validate(document, schema())
        assert document["traceEvents"]
    # The written timeline can be replayed, with the same result.
    again = reported("replay", files[0])
    assert [r["measured_s"] for r in again["ranks"]] == [r["measured_s"] for r in report["ranks"]]


def test_replay_against_traces_compares_op_by_op(traces: Path, tmp_path: Path) -> None:
    predicted = tmp_path / "predicted.json"
    alone = reported("replay", traces, "--predicted", predicted)
    report = reported("replay", predicted, "--against", traces)
    assert report["measured_s"] == alone["measured_s"]
    assert report["matched"] > 20
    assert report["only_predicted"] == report["only_measured"] == 0
    for o in report["ops"]:
        assert o["predicted_s"] == pytest.approx(o["measured_s"], rel=0.1)


def test_diagnose_explains_with_numbers(tmp_path: Path) -> None:
    slow = ImaginedRun(ranks=3, iterations=4, kernel_us=300.0, between_us=4.0, slow_rank=1, slow_by=1.4)
    folder = write(simulate(slow), tmp_path / "slow")
    page, timeline = tmp_path / "page.html", tmp_path / "t.json"
    report = reported("diagnose", folder, "-o", page, "--timeline", timeline)
    kinds = [f["kind"] for f in report["findings"]]
    assert "straggler" in kinds
    f = report["findings"][kinds.index("straggler")]
    assert "rank 1" in f["title"]
    assert 0.2 < f["share"] < 0.4
    assert f["evidence"]
    text = page.read_text()
    assert "<div data-timeline='iteration'>" in text and "wait for rank 1" in text
    assert any(e.get("cat") == "finding" for e in json.loads(timeline.read_text())["traceEvents"])


def test_optimize_reports_steps_and_buckets(tmp_path: Path) -> None:
    run = ImaginedRun(
        ranks=2, iterations=3, layers=16, bucket_layers=1, bucket_bytes=1 << 18, bucket_growth=0.2
    )
    run.collective_us = 300.0
    folder = write(simulate(run), tmp_path / "x")
    report = reported("optimize", folder, "--passes", "tensor-fusion", "-o", tmp_path / "plan.json")
    assert report["after_s"] < report["before_s"]
    assert report["buckets"] and report["tensors"] == 16
    assert json.loads((tmp_path / "plan.json").read_text()) == report
    assert any(s["kept"] for s in report["steps"])


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


TRAIN = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
x = jax.device_put(jnp.ones((64, 128)), NamedSharding(mesh, P("d")))
w = jax.device_put(jnp.ones((128, 128)) / 128, NamedSharding(mesh, P()))
step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.tanh(x @ w).sum())(w))
for _ in range(6):
    w = step(w, x).block_until_ready()
"""


def test_profile_collects_what_replay_reads(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    report = _profiled(tmp_path / "traces", script)
    assert len(report["traces"]) == 1
    replayed = reported("replay", tmp_path / "traces")
    assert [r["rank"] for r in replayed["ranks"]] == [0, 1]
    assert len(replayed["iterations"]) >= 4
    manifest = json.loads((tmp_path / "traces" / "rank0" / "manifest.json").read_text())
    assert manifest["local_devices"] == 2


def _profiled(folder: Path, script: Path) -> dict[str, Any]:
    return json.loads(printed("profile", "--json", "-o", folder, "--", sys.executable, script))


def test_profile_passes_the_programs_failure_on(tmp_path: Path) -> None:
    code, _, err = run("profile", "-o", tmp_path / "t", "--", sys.executable, "-c", "raise SystemExit(3)")
    assert code == 2
    assert "ended with status 3" in " ".join(err.split())


def test_a_layout_is_replayed_as_it_is_scheduled(tmp_path: Path) -> None:
    layout = tmp_path / "layout.json"
    printed("compile", "zoo:alexnet", "--devices", 4, "-o", layout)
    report = reported("replay", layout, "-o", tmp_path / "t.json")
    assert not report["held_out"]
    (rank,) = report["ranks"]
    assert 0 < rank["replayed_s"] < 1
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    code, _, err = run("replay", layout, "--what-if", "bandwidth=2")
    assert code == 2
    assert str(layout) in err and "strategy=OTHER_LAYOUT.json" in err


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
