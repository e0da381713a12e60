"""Estimates of a run under another strategy: a measured step is scaled by the predictions for two layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pase
from bench.cases.timelines import ImaginedRun, simulate, write
from pase.bridges.restrategy import _scaled, by_ratio, predicted, split_finding
from pase.errors import PaseError
from pase.replay import align, load, measure
from pase.replay.graph import build_graph
from pase.replay.reports.findings import Scene
from pase.replay.reports.trust import Run
from pase.replay.simulation.steady import evaluate
from pase.replay.types import COLLECTIVE, OPERATIONS, on_stream
from tests.command import run


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("layouts")
    out = {}
    for name, mesh, devices, batch in (
        ("data", "4", 4, 128),
        ("both", "2x2", 4, 128),
        ("eight", "8", 8, 128),
        ("twice", "4", 4, 256),
    ):
        plan = pase.compile(f"zoo:alexnet?batch={batch}", devices=devices, mesh=mesh, baselines=False)
        out[name] = folder / f"{name}.json"
        plan.save(out[name])
    return out


def serial(compute_ns: float = 100.0, sum_ns: float = 50.0):  # type: ignore[no-untyped-def]
    reduce = OPERATIONS.index("all_reduce")
    tasks: list[dict[str, object]] = [
        {"device": (0, "7"), "duration_ns": compute_ns},
        {"device": (0, "20"), "duration_ns": sum_ns, "kind": COLLECTIVE, "operation": reduce, "ways": 4},
    ]
    return build_graph(tasks, [(0, 1)])


def test_each_kind_is_scaled_by_its_own_ratio() -> None:
    made = _scaled(
        serial(), {"compute": 2.0, "all_reduce": 1.0}, {"compute": 1.0, "all_reduce": 3.0}, "s", "x"
    )
    assert made.detail["ratios"] == {"compute": 0.5, "all_reduce": 3.0} and made.added_s == 0
    assert evaluate(made.graph)[0] == pytest.approx(0.5 * 100 + 3 * 50)
    assert "by ratio" in made.note


def test_a_kind_that_the_run_has_not_is_added_in_the_runs_own_measure() -> None:
    # The run measures 50 ns for a predicted 25 ns, so the added collective also takes twice its prediction.
    now, other = {"compute": 1.0, "all_reduce": 25e-9}, {"compute": 1.0, "all_gather": 10e-9}
    made = _scaled(serial(), now, other, "s", "x")
    assert evaluate(made.graph)[0] == pytest.approx(100.0)
    assert made.added_s == made.detail["added_s"] == pytest.approx(20e-9)


def test_a_layout_that_predicts_none_of_the_runs_collectives_is_not_its_layout() -> None:
    with pytest.raises(PaseError, match="all_reduce") as e:
        _scaled(serial(), {"compute": 1.0}, {"compute": 1.0, "all_reduce": 1.0}, "s", "now.json")
    assert e.value.where == "now.json"


def test_the_same_strategy_changes_nothing_and_another_by_its_ratio(
    layouts: dict[str, Path], tmp_path: Path
) -> None:
    traces = write(simulate(ImaginedRun(ranks=2, iterations=3)), tmp_path / "t")
    common = ("replay", traces, "--layout", layouts["data"], "--json")
    code, out, err = run(*common, "--what-if", f"strategy={layouts['data']}")
    assert code == 0, err
    (same,) = json.loads(out)["what_if"]
    assert same["speedup"] == pytest.approx(1.0) and same["method"] == "ratio"
    code, out, err = run(*common, "--what-if", f"strategy={layouts['both']}", "--what-if", "bandwidth=2")
    assert code == 0, err
    other, faster, both = json.loads(out)["what_if"]
    a, b = (predicted(pase.load(layouts[k])) for k in ("data", "both"))
    assert other["ratios"]["compute"] == pytest.approx(b["compute"] / a["compute"])
    assert other["ratios"]["all_reduce"] == pytest.approx(b.get("all_reduce", 0.0) / a["all_reduce"])
    assert both["iteration_s"] <= other["iteration_s"] + 1e-12 and faster["speedup"] >= 1
    # The text report names the method.
    code, out, _ = run(
        "replay", traces, "--layout", layouts["data"], "--what-if", f"strategy={layouts['both']}"
    )
    assert code == 0 and "a prediction by ratio" in " ".join(out.split())


def _parts(rng: np.random.Generator, kinds: tuple[str, ...]) -> dict[str, float]:
    return {k: float(10.0 ** rng.uniform(-4, -1)) for k in ("compute", *kinds)}


def test_a_split_is_worth_no_more_than_what_it_removes(tmp_path: Path) -> None:
    """Whatever the two layouts predict: of compute, of the run's collective, and of one that the run has not."""
    m = measure(align(load(write(simulate(ImaginedRun(ranks=2, iterations=4, layers=3)), tmp_path / "t"))))
    scene = Scene(run=Run(measured=m), parts=(), late=())
    assert not scene.run.doubts
    g, mine = scene.graph, scene.graph.rank == 0
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(40):
        ours, theirs = _parts(rng, ("all_reduce",)), _parts(rng, ("all_reduce", "all_gather"))
        f = split_finding(scene, 0, Path("now.json"), Path("other.json"), ours, theirs, "s")
        compute = on_stream(g.kind) & (g.kind != COLLECTIVE) & mine
        sums = (g.kind == COLLECTIVE) & mine
        removed = sum(
            float(g.duration_ns[tasks].sum()) * max(1 - theirs[k] / ours[k], 0.0)
            for k, tasks in (("compute", compute), ("all_reduce", sums))
        )
        assert 0 <= f.cost_ns <= min(removed, f.measured_ns) * (1 + 1e-9)
        assert ("saves nothing" in f.title) == (f.cost_ns == 0)
        gains.append(f.cost_ns)
    assert 5 < sum(x > 0 for x in gains) < 40
    same = split_finding(scene, 0, Path("now.json"), Path("now.json"), ours, ours, "s")
    assert same.cost_ns == 0


def test_splits_are_ranked_among_the_advice(layouts: dict[str, Path], tmp_path: Path) -> None:
    traces = write(simulate(ImaginedRun(ranks=2, iterations=3, bucket_bytes=64 << 20)), tmp_path / "t")
    asked = ("diagnose", traces, "--split", layouts["both"])
    code, out, err = run(*asked, "--plan", layouts["data"], "--json")
    assert code == 0, err
    found = [f for f in json.loads(out)["findings"] if f["kind"] == "split"]
    assert len(found) == 1 and "both.json" in found[0]["title"] and "by ratio" not in found[0]["detail"]
    code, _, err = run(*asked)
    assert code == 2 and "--plan NOW.json" in " ".join(err.split())
    code, _, err = run("diagnose", traces, "--split", layouts["twice"], "--plan", layouts["data"])
    assert code == 2 and "different batches" in " ".join(err.split())


def test_another_batch_scales_what_grows_with_it(layouts: dict[str, Path], tmp_path: Path) -> None:
    a, b = (predicted(pase.load(layouts[k])) for k in ("data", "twice"))
    made = by_ratio(layouts["data"], layouts["twice"])(None, serial())  # type: ignore[arg-type]
    ratio = made.detail["ratios"]["compute"]
    assert ratio == pytest.approx(b["compute"] / a["compute"])
    assert 1.5 < ratio < 2.0  # the update does not grow with the batch
    other = tmp_path / "other.json"
    pase.compile("zoo:alexnet?classes=64", devices=4, mesh="4", baselines=False).save(other)
    with pytest.raises(PaseError, match="different models") as e:
        by_ratio(layouts["data"], other)
    assert str(other) in e.value.where and "parameter '" in e.value.what


def test_layouts_are_compared_as_predicted(layouts: dict[str, Path]) -> None:
    code, out, err = run("replay", layouts["data"], "--what-if", f"strategy={layouts['both']}", "--json")
    assert code == 0, err
    report: dict[str, Any] = json.loads(out)
    (w,) = report["what_if"]
    code, out, _ = run("replay", layouts["both"], "--json")
    assert w["iteration_s"] == pytest.approx(json.loads(out)["ranks"][0]["replayed_s"], rel=1e-6)
    assert w["method"] == "prediction" and "nothing is measured" in w["note"]


def test_what_has_no_common_measure_is_refused(layouts: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(PaseError, match=r"devices \(4, 8\)") as e:
        by_ratio(layouts["data"], layouts["eight"])
    assert str(layouts["eight"]) in e.value.where
    traces = write(simulate(ImaginedRun(ranks=2, iterations=2)), tmp_path / "t")
    code, _, err = run("replay", traces, "--what-if", f"strategy={layouts['data']}")
    assert code == 2 and "--layout NOW.json" in " ".join(err.split())


def test_bucket_plans_from_the_command(tmp_path: Path) -> None:
    traces = write(
        simulate(
            ImaginedRun(
                iterations=3, bucket_layers=1, bucket_bytes=1 << 20, bucket_growth=0.3, collective_us=400.0
            )
        ),
        tmp_path / "t",
    )
    asked = ("--what-if", "bucket-plan=ours", "--what-if", "bucket-plan=ddp")
    code, out, err = run("replay", traces, *asked, "--json")
    assert code == 0, err
    ours, ddp = json.loads(out)["what_if"]
    assert ours["speedup"] > 1.01 and ours["control_s"] == pytest.approx(ours["base_s"], rel=0.01)
    assert ours["messages"] < ours["tensors"] and ddp["policy"] == "ddp"
    code, out, _ = run("replay", traces, "--what-if", "bucket-plan=ours", "--what-if", "bandwidth=2")
    assert code == 0 and "bucket-plan=ours and bandwidth=2" in " ".join(out.split())
    code, _, err = run("replay", traces, "--what-if", "bucket-plan=magic")
    assert code == 2 and "no scheduling policy 'magic'" in " ".join(err.split())
