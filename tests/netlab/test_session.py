"""What a stopped run had done is taken up, by commit and machine; the time given is kept to."""

import dataclasses
import json
import time
from pathlib import Path

import pytest

from bench.netlab import jobs, replays, strategies
from bench.netlab.__main__ import EXPECTED_MIN, PARTS, _steps
from bench.netlab.net import LabError, Topology
from bench.netlab.page import render
from bench.netlab.session import Session, rows_of
from bench.netlab.steps import Cell
from pase.calibrate import Journal, Sample
from pase.calibrate.here import parse_levels

CELLS = [{"key": k} for k in "abc"]


class Lab:
    """Stands for a network; ``ran`` holds what each program was told."""

    topology = Topology(racks=(2,), host_mbit=100)

    def address(self, i):
        return "10.0.0.1"


@pytest.fixture
def hosts(monkeypatch):
    """on_every_host that does what ``does`` says for each cell: True done, False killed, None not even begun."""
    told, does = [], {}

    def run(network, argv, logs, *, timeout_s, watch):
        job = json.loads(Path(argv(0)[2]).read_text())
        told.append([c["key"] for c in job["cells"]])
        with open(job["results"], "a") as f:
            for c in job["cells"]:
                does_it = does.get(c["key"], True)
                if does_it is None:
                    return
                f.write(json.dumps({"at": job["stamp"], "key": c["key"], "begun": time.time()}) + "\n")
                f.flush()
                if not does_it:
                    raise LabError("host 1 ended with status 137")
                f.write(json.dumps({"at": job["stamp"], "key": c["key"], "steps_s": [1.0]}) + "\n")
                f.flush()
                watch()

    monkeypatch.setattr(jobs, "on_every_host", run)
    return told, does


def test_a_cell_that_kills_its_hosts_is_left_behind_and_a_resumed_run_does_the_rest(tmp_path, hosts):
    told, does = hosts
    session = Session(folder=tmp_path, results=tmp_path)
    does["b"] = False
    seen = []
    found = jobs.results_of(Lab(), session, "n", CELLS, on_row=lambda rows: seen.append(sorted(rows)))
    assert told == [["a", "b", "c"], ["c"]]
    assert "status 137" in found["b"]["failed"] and found["a"]["steps_s"] == [1.0] and "steps_s" in found["c"]
    assert seen[0] == ["a"] and seen[-1] == ["a", "b", "c"]
    # Again, with what is there: only the one that failed.
    does["b"] = True
    again = jobs.results_of(Lab(), Session(folder=tmp_path, resume=True), "n", CELLS)
    assert told[-1] == ["b"] and "steps_s" in again["b"]
    # Of another machine file nothing is taken up; and without resume nothing at all.
    jobs.results_of(Lab(), Session(folder=tmp_path, resume=True), "n", CELLS, stamp="other")
    jobs.results_of(Lab(), Session(folder=tmp_path), "n", CELLS)
    assert told[-2:] == [["a", "b", "c"]] * 2


def test_racks_take_up_the_compute_of_as_many_hosts(tmp_path):
    """Under their own levels, or ``pase calibrate`` would refuse the journal; of collectives they take nothing."""
    hosts, racks = (Topology(racks=r, host_mbit=200) for r in ((4,), (2, 2)))
    about = {"platform": "cpu", "levels": [["host", 4]]}
    journal = Journal(tmp_path / f"{hosts.slug}.toml.journal", about)
    for key in ("launch float32", "all_reduce float32 1024B over [4]"):
        journal.add(Sample(key=key, seconds=1.0, spread=0.0, repeats=5, inner=1))
    out = tmp_path / f"{racks.slug}.toml"
    jobs._seeded(out, racks)
    levels = [[level.name, level.ways] for level in parse_levels(racks.levels, 4)]
    seeded = Journal(out.with_name(out.name + ".journal"), about | {"levels": levels})
    assert list(seeded.samples) == ["launch float32"]
    alone = Topology(racks=(4,), host_mbit=200, hosts_a_core=2)
    jobs._seeded(tmp_path / f"{alone.slug}.toml", alone)
    assert not list(tmp_path.glob("*acore*"))


def test_a_cut_line_is_no_result(tmp_path):
    file = tmp_path / "n.jsonl"
    file.write_text('{"at": "s", "key": "a", "begun": 5}\n{"at": "s", "key": "a", "x": 1}\n{"at": "s", "ke')
    assert rows_of(file, "s") == ({"a": {"at": "s", "key": "a", "x": 1}}, "a")
    assert rows_of(file, "s", since=6.0)[1] is None
    assert rows_of(file, "t") == ({}, None)


def test_nothing_is_begun_after_the_time_is_up(tmp_path, hosts):
    told, does = hosts
    late = jobs.results_of(Lab(), Session(folder=tmp_path, until=time.time() - 1), "n", CELLS)
    assert not told and all(r["left_out"] for r in late.values())
    does["a"] = None
    with pytest.raises(LabError, match="ended without a result"):
        jobs.results_of(Lab(), Session(folder=tmp_path), "n", CELLS)


def test_a_cell_without_a_result_yet_has_no_row():
    """And of a result under the other lowering it has none either."""
    about = {"model": "m", "batch": 8, "strategy": "ours", "layout": "", "mesh": (2,), "lowering": "manual"}
    cell = Cell(**about, predicted_s=1.0, predicted_compute_s=0.5)
    item = {"cell": dataclasses.asdict(cell)}
    assert strategies._row(Lab.topology, item, {}) is None
    got = {"m 8 ours annotated": {"steps_s": [1.0, 2.0, 3.0], "compile_s": 0.1, "cpu_s": 0.2}}
    assert strategies._row(Lab.topology, item, got) is None
    row = strategies._row(Lab.topology, item, {"m 8 ours manual": got["m 8 ours annotated"]})
    assert row["lowering"] == "manual"
    assert row["measured_s"] == 2.0 and row["spread"] == pytest.approx(1.0)


def test_every_part_gets_its_turn_before_the_larger_networks(tmp_path):
    class Args:
        mbit = hosts = models = rates = None
        batches, iterations, training = "0,1", 6, 8

    steps = _steps(Args(), Session(folder=tmp_path), list(PARTS))
    order = ["strategies of 2 hosts", "buckets", "replay", "lowerings", "strategies of 4 hosts"]
    order += ["racks", "levels", "pipelines", "torch", "frameworks"]
    took = [f"{p} of {t.split()[1]} hosts" if p == "strategies" else p for p, t, _ in steps]
    assert list(dict.fromkeys(took)) == order and {p for p, _, _ in steps} == set(PARTS) == set(EXPECTED_MIN)
    networks = {p: len({t for q, t, _ in steps if q == p}) for p in PARTS}
    several = {"strategies": len(strategies.FULL), "pipelines": len(strategies.STAGED), "frameworks": 4}
    assert networks == dict.fromkeys(PARTS, 1) | several
    # One part alone is that part alone.
    assert [p for p, _, _ in _steps(Args(), Session(folder=tmp_path), ["lowerings"])] == ["lowerings"]


def test_the_page_takes_what_a_session_writes(tmp_path):
    session = Session(folder=tmp_path, results=tmp_path)
    rows = [
        {
            "network": "n",
            "hosts": 2,
            "model": "m",
            "batch": 8,
            "strategy": s,
            "same_as": None,
            "predicted_s": p,
            "predicted_compute_s": p / 2,
            "measured_s": t,
            "spread": 0.0,
            "commit": session.commit,
        }
        for s, p, t in (("ours", 1.0, 1.0), ("fsdp", 2.0, 2.5), ("no split", 3.0, 4.0))
    ]
    session.write("strategies", {"summary": strategies.summary(rows), "rows": rows})
    assert session.kept("strategies", ["other"]) == rows and not session.kept("strategies", ["n"])
    page = tmp_path / "page.md"
    page.write_text(
        "".join(f"<!-- table: {t} -->\nold\n<!-- end -->\n" for t in ("summary", "strategies", "errors"))
    )
    render(page, tmp_path)
    text = page.read_text()
    assert "old" not in text and "| n | m | 8 | 1000 (1000) | 4000 (3000) | fsdp 2500 (2000) |" in text
    assert "4.00; 4.00 (1 cells)" in text


def test_what_ifs_that_really_changed_are_summed_up_and_shown(tmp_path):
    change = {"what_if": "bandwidth=2", "now_s": 0.3, "predicted_s": 0.21, "measured_s": 0.2}
    doubted = {**change, "what_if": "ranks=4", "error": 0.9, "believable": False}
    changes = [
        change | {"error": 0.05, "believable": True},
        doubted,
        {"what_if": "balance=1", "refused": "why"},
    ]
    rows = [
        {"run": "mlp", "bare_s": 0.28, "traced_s": 0.3, "errors_by_rank": [0.01, -0.02], "changes": changes},
        {"run": "gpt2", "failed": "no time"},
    ]
    said = replays.summary(rows)
    assert (
        said["what_ifs"]["all"]
        == said["what_ifs"]["bandwidth"]
        == {"count": 1, "median": 0.05, "worst": 0.05}
    )
    assert (said["failed"], said["refused"], said["called_into_question"]) == (1, 1, 1)
    Session(folder=tmp_path, results=tmp_path).write("replay", {"summary": said, "rows": rows})
    page = tmp_path / "page.md"
    page.write_text("<!-- table: replay -->\nold\n<!-- end -->\n")
    render(page, tmp_path)
    text = page.read_text()
    assert "| mlp | 280 | 300 | -2.0% |" in text and "| gpt2 | no time |  |  |" in text
    assert "| mlp | bandwidth=2 | 300 | 210 | 200 | +5.0% |  |" in text
    assert "| +90.0% | not to be relied on |" in text and "| mlp | balance=1 |  |  |  |  | why |" in text
