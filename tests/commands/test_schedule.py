"""`pase schedule`: what it prints, what it writes, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pase
import pase.replay
from pase.schedule import evaluate
from pase.schedule.io import plan_from_json
from pase.schedule.load import load_problem, parse_link
from tests import command
from tests.schedule.profiles import PROFILE


def run(*args: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of `pase schedule ARGS`."""
    return command.run("schedule", *args)


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "p.txt"
    path.write_text(PROFILE)
    return path


def test_all_policies_as_json(profile_file: Path, tmp_path: Path) -> None:
    out, drawing = tmp_path / "b.json", tmp_path / "g.html"
    code, stdout, _ = run(
        str(profile_file),
        "--policy",
        "all",
        "--json",
        "--staleness",
        "1",
        "-o",
        str(out),
        "--gantt",
        str(drawing),
        "--link",
        "net:100us:1GB/s",
    )
    assert code == 0
    data = json.loads(stdout)
    rows = {r["policy"]: r for r in data["policies"]}
    assert {
        "fifo",
        "ddp",
        "horovod",
        "mg_wfbp",
        "bytescheduler",
        "us_byte",
        "tic",
        "tac",
        "deft",
        "ours",
    } <= set(rows)
    for r in rows.values():
        if "skipped" not in r:
            assert {"iteration_s", "exposed_s", "bound_s", "updates_per_iteration"} <= set(r)
    problem = load_problem(profile_file, links=(parse_link("net:100us:1GB/s"),))
    plan = plan_from_json(json.loads(out.read_text()), problem)
    assert evaluate(problem, plan).iteration_s == pytest.approx(rows["ours"]["iteration_s"])
    page = drawing.read_text()
    assert (
        page.count("<div data-timeline=") == sum("skipped" not in r for r in rows.values())
        and "node3" in page
    )


def test_one_policy_and_the_table(profile_file: Path) -> None:
    code, stdout, _ = run(str(profile_file), "--policy", "ours", "--json")
    assert code == 0 and json.loads(stdout)["policy"] == "ours"
    code, stdout, _ = run(str(profile_file), "--policy", "ddp,ours")
    assert code == 0
    assert "gap to bound" in stdout and "no plan without staleness is shorter than" in stdout


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--policy", "best"], 2, "'best'"),
        (["--policy", "deft"], 1, "--staleness"),
        (["--gantt", "x.pdf"], 2, "--gantt: 'x.pdf'"),
        (["--loss", "speed=1"], 2, "--loss: "),
        (["--emit", "tpu"], 2, "--emit: "),
        (["--mode", "slow"], 2, "--mode: "),
    ],
)
def test_bad_requests(profile_file: Path, args: list[str], code: int, message: str) -> None:
    status, _, stderr = run(str(profile_file), *args)
    assert status == code and message in stderr


def test_bad_files(tmp_path: Path) -> None:
    bad = tmp_path / "x.json"
    for text, message in (("hello", "line 1, column 1"), ("{}", "schema is None")):
        bad.write_text(text)
        status, _, stderr = run(str(bad))
        assert status == 2 and message in stderr and "x.json" in stderr
    status, _, stderr = run(str(tmp_path / "absent.json"))
    assert status == 2 and "absent.json" in stderr


@pytest.fixture(scope="module")
def layout_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("jax", reason="a layout of a zoo model needs jax")
    path = tmp_path_factory.mktemp("layout") / "layout.json"
    pase.compile("zoo:alexnet?batch=256", devices=16, mesh="2x8", baselines=False).save(path)
    return path


def test_a_layout_keeps_its_bucket_plan(layout_file: Path, tmp_path: Path) -> None:
    mine, step = tmp_path / "mine.json", tmp_path / "step.json"
    mine.write_bytes(layout_file.read_bytes())
    code, out, err = run(str(mine), "--policy", "ddp", "--write", "--json", "--timeline", str(step))
    assert code == 0, err
    plan = pase.load(mine)
    assert plan.bucket_plan is not None and plan.bucket_plan.policy == "ddp"
    assert plan.bucket_problem is not None and {x.name for x in plan.bucket_problem.links} <= {
        "NVLink",
        "InfiniBand",
    }
    predicted = json.loads(out)["iteration_s"]
    (mark,) = pase.replay.load(step).marks
    assert mark.end_ns - mark.start_ns == pytest.approx(predicted * 1e9, abs=1)
    # `pase replay LAYOUT` shows the plan that the layout keeps.
    assert plan.timeline is not None
    assert plan.timeline.marks[0].end_ns == mark.end_ns


def test_links_given_replace_the_machines(layout_file: Path) -> None:
    code, out, err = run(str(layout_file), "--policy", "fifo", "--json", "--link", "slow:1ms:10MB/s")
    assert code == 0, err
    slow = json.loads(out)["iteration_s"]
    code, out, _ = run(str(layout_file), "--policy", "fifo", "--json")
    assert code == 0 and json.loads(out)["iteration_s"] < slow / 10


def test_only_a_layout_can_keep_one(profile_file: Path) -> None:
    code, _, err = run(str(profile_file), "--write")
    assert code == 2 and "p.txt" in err and "--output" in err
